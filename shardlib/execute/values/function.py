"""A user's function on whole leaves that are functions of this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from shardlib.collectives.styles.slices import Slices
from shardlib.common._compat import without_derivatives
from shardlib.common.writes import has_place, owner_of
from shardlib.errors import HandleError
from shardlib.execute.handles import materialise
from shardlib.execute.losses import Outcome, read_loss, wants
from shardlib.execute.sequence import SequenceParts
from shardlib.execute.slicing import SlicedHandle
from shardlib.execute.surroundings import Surroundings
from shardlib.execute.values.wholes import Wholes
from shardlib.execute.watch import watched
from shardlib.execute.whole_batch import WholeBatch
from shardlib.mesh.mesh import Mesh
from shardlib.nn.blocks import Runner, block_runner
from shardlib.plan.plan import Plan
from shardlib.rng import Key
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, unflatten

Buffers = Mapping[str, torch.Tensor]  # bucket name -> this rank's buffer, or the slot of its gradient


class Function:
    """A function of whole parameters, as a function of shards.

    Args:
        fn: of the tree of parameters and further arguments.
        trained: whether micro-batches are those of a step.
        blocks: how blocks run, given what is around them; None for a plain call.

    Attributes:
        wholes: the exchanges of each bucket.
        trained: the same, of those that have gradients.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        plan: Plan,
        mesh: Mesh,
        trained: bool,
        blocks: Callable[[Surroundings], Runner] | None = None,
    ) -> None:
        self.fn, self.plan, self.mesh = fn, plan, mesh
        self.wholes = [Wholes(b, plan.routes[b.name], mesh, b.unit in plan.kept) for b in plan.buckets]
        self.trained = [whole for whole in self.wholes if whole.bucket.trainable]
        self._wants_rng = wants(fn, "rng")
        self._parts = SequenceParts(plan.step.sequence, mesh, set()) if plan.step.sequence else None
        self._looked = False  # whether a call was looked at, for what is wrong without a sign
        self._slices = Slices(mesh, plan.step.sequence)
        batch = WholeBatch(plan, mesh, trained, lambda: None)  # exchanges are the same on all ranks
        self._surroundings = Surroundings(
            mesh, batch, self._parts, None, None, plan.step.autocast, None, _refuse_further
        )
        self._blocks = None if blocks is None else blocks(self._surroundings)

    def __call__(self, stored: Buffers, slots: Buffers, *args: Any, key: Key | None = None) -> Any:
        """``fn(whole parameters, *args)`` at ``stored + slots``; see `Wholes.slot`."""
        extra = {"rng": key} if self._wants_rng and key is not None else {}
        with self._running():
            leaves = self._leaves(stored, slots)
            tree = unflatten(self.plan.shape.treedef, [leaves.get(leaf.path) for leaf in self.plan.leaves])
            with nullcontext() if self._looked else self._watched(leaves):
                result = self.fn(tree, *args, **extra)
        self._looked = True
        return result

    def outcome(self, stored: Buffers, slots: Buffers, batch: Any, key: Key | None, buffers: Any = None) -> Outcome:
        """What a loss function gives for one micro-batch on this rank. Torch's own generators are the caller's to seed."""
        inputs = (batch,) if buffers is None else (buffers, batch)
        return read_loss(self(stored, slots, *inputs, key=key), buffers is not None)

    def slots(self) -> dict[str, torch.Tensor]:
        """The slot of each trained bucket's gradient."""
        return {whole.bucket.name: whole.slot() for whole in self.trained}

    def reduced(self, gradients: Buffers) -> dict[str, torch.Tensor]:
        """Gradients, summed over micro-batches, summed over ranks and cut as the optimizer holds them."""
        return {whole.bucket.name: whole.last(gradients[whole.bucket.name]) for whole in self.trained}

    def _leaves(self, stored: Buffers, slots: Buffers) -> dict[str, torch.Tensor]:
        """The parameters by path: whole leaves, and slices that layers compute with together."""
        leaves: dict[str, torch.Tensor] = {}
        for whole in self.wholes:
            name = whole.bucket.name
            leaves.update(zip(whole.bucket.paths, whole.leaves(stored[name], slots.get(name)), strict=True))
        for path, style in self.plan.styles.items():
            if path in leaves:
                leaf, compute = leaves[path], self.plan.placement_of[path].compute
                window = compute.spec.window(compute.shape, self.mesh.shape, self.mesh.coords)
                trained = self.plan.bucket_of[self.plan.placement_of[path].bucket].trainable
                leaves[path] = SlicedHandle.make(
                    _Given(leaf), 0, path, tuple(leaf.shape), leaf, trained, style, window, self._slices, False
                )
        return leaves

    def _watched(self, leaves: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        plain = [(path, materialise(leaf)) for path, leaf in leaves.items()]
        there = [(path, below) for path, leaf in plain if has_place(below := without_derivatives(leaf))]
        return watched(leaves, lambda tensor: owner_of(tensor, there), self.plan.styles, self._slices, self._parts)

    @contextmanager
    def _running(self) -> Iterator[None]:
        runner = block_runner.set(self._blocks)
        try:
            with self._surroundings.installed():
                yield
        finally:
            block_runner.reset(runner)
            self._slices.clear()


def _refuse_further(tree: Sharded) -> Tree:
    raise HandleError(
        "a function as a function of values (torch.func around it, or compile=True) reads a further sharded tree: give it "
        "whole leaves, sl.unshard(params), or put it into the tree of parameters and sl.freeze(globs) it"
    )


class _Given:
    """The source of a slice that is there already."""

    def __init__(self, leaf: torch.Tensor) -> None:
        self._leaf = leaf

    def leaf(self, index: int) -> torch.Tensor:
        return self._leaf

    def data(self, index: int) -> torch.Tensor:
        return self._leaf.detach()

    def root_gradient(self, index: int) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        return self._leaf, lambda gradient: gradient


def gradients_of(
    totals: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor], slots: Buffers
) -> dict[str, torch.Tensor]:
    """The gradients of ``Σ seeds · totals`` with respect to slots. What no total depends on has zeros."""
    started = [(total, seed.to(total.dtype)) for total, seed in zip(totals, seeds) if total.requires_grad]
    found: Sequence[torch.Tensor | None] = [None] * len(slots)
    if started and slots:
        outputs, cotangents = zip(*started)
        found = torch.autograd.grad(outputs, list(slots.values()), cotangents, allow_unused=True)
    return {
        name: torch.zeros(slot.shape, dtype=slot.dtype, device=slot.device) if gradient is None else gradient
        for (name, slot), gradient in zip(slots.items(), found, strict=True)
    }
