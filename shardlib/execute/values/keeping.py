"""What forward leaves for backward in a store, as calls that a graph has as nodes.

`keep` puts a tensor into a store, in host memory or divided over an axis, and `bring` has it
back. Each is two calls where other work goes on meanwhile: the first starts to move the tensor, the second waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardlib.collectives.buffers import AxisLink, link_of
from shardlib.common._compat import estimated
from shardlib.common.environment import within
from shardlib.execute.activation_offload import ActivationStore, StoredActivation
from shardlib.execute.activation_stores import HostBuffers, store_of
from shardlib.execute.context import Surroundings
from shardlib.execute.recompute import Draws, checkpointed
from shardlib.mesh.mesh import Mesh
from shardlib.nn.blocks import Runner
from shardlib.plan.plan import Plan
from shardlib.plan.recompute import Recompute


class Between:
    """How tensors are kept between forward and backward.

    Args:
        host: the store in host memory, if the plan names it and the mesh has one.

    Attributes:
        how: how blocks are recomputed; None if they are not.
        store: where the inputs of those blocks are; None if they stay where they are.
        host: whether they, or this rank's shares of them, are in host memory.
        there: what is in the store.
    """

    how: Recompute | None
    mesh: Mesh
    host: bool

    def __init__(self, how: Recompute | None, mesh: Mesh, host: HostBuffers | None) -> None:
        self.how, self.mesh, self.host = how, mesh, host is not None
        # The first step has compared what ranks divide.
        self.store: ActivationStore | None = store_of(how, mesh, host, lambda: False)
        self.there: set[StoredActivation] = set()

    def close(self) -> None:
        """Give up what a run has left in the store that an error ended, once no copy is under way."""
        for kept in self.there:
            kept.free()
        self.there.clear()


class Keeping(AxisLink):
    """What a tensor goes along into a store and back.

    Args:
        value: the tensor, without values.

    Attributes:
        host: whether it goes to host memory.
        share: this rank's share of the tensor, without values; None where tensors are not divided.
        late: whether shares are gathered when the tensor is waited for, as they are yet to come from the host.
    """

    share: torch.Tensor | None
    store: ActivationStore
    there: set[StoredActivation]
    host: bool
    late: bool

    def __init__(self, between: Between, store: ActivationStore, label: str, value: torch.Tensor) -> None:
        axis = between.how.axis if between.how else None
        super().__init__(between.mesh, axis or "", label)
        self.store, self.there = store, between.there
        self.host, self.late = between.host, between.host and axis is not None
        numel, self.share = estimated(value.numel()), None
        if axis is not None:
            numel = -(-numel // self.ways)
            self.share = torch.empty(numel, dtype=value.dtype, device="meta")
        self.bytes: Any = numel * value.itemsize

    def __str__(self) -> str:
        """Where and how much a rank keeps."""
        places = [f"over {self.axis!r}"] * bool(self.axis) + ["in host memory"] * self.host
        return f"{' and '.join(places)}, {self.bytes:,} bytes on a rank: {self.label}"


def start_keep(x: torch.Tensor, number: int) -> StoredActivation:
    """Start to move ``x`` into a store."""
    link = keeping_of(number)
    kept = link.store.put(x)
    link.there.add(kept)
    return kept


def left(started: StoredActivation, number: int, x: torch.Tensor) -> StoredActivation:
    """Let the memory of ``x``, whose way has begun, be used for what follows on the current stream."""
    keeping_of(number).store.settle()
    return started


def keep(x: torch.Tensor, number: int) -> StoredActivation:
    """``x`` in a store."""
    return left(start_keep(x, number), number, x)


def start_bring(kept: StoredActivation, number: int) -> StoredActivation:
    """Start to bring back what `keep` put into a store."""
    kept.fetch()
    return kept


def arrived(started: StoredActivation, number: int, kept: StoredActivation) -> torch.Tensor:
    """What was put into a store, on the device. What it was made of, ``kept``, is given up."""
    x = started.arrive()
    keeping_of(number).there.remove(kept)
    kept.free()
    return x


def bring(kept: StoredActivation, number: int) -> torch.Tensor:
    """What `keep` put into a store."""
    return arrived(start_bring(kept, number), number, kept)


def keeping_of(number: Any) -> Keeping:
    """The link of a number among a call's arguments."""
    link = link_of(number)
    assert isinstance(link, Keeping)
    return link


# Blocks that backward computes again, in a step as a function of values.


def recomputed(plan: Plan) -> Callable[[Surroundings], Runner] | None:
    """How the blocks of a function run, given what is around it; None where none is recomputed."""
    how = plan.step.remat
    if how is None:
        return None

    def runner(surroundings: Surroundings) -> Runner:
        draws = Draws(surroundings.mesh.device)

        def run(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            def surrounded(*args: Any, **kwargs: Any) -> Any:
                # A block within another is recomputed with it.
                with within(blocks=None), surroundings.installed(casts=False):
                    return fn(*args, **kwargs)

            return checkpointed(surrounded, args, kwargs, how, set(), draws, ())  # buffers are refused around here

        return run

    return runner
