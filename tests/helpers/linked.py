"""Training under plans that are to differ in where things lie alone, on a device whose links are slow and counted."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch

import shardlib as sl
from helpers.models import mlp, regression_batch, share

SLOW = {"up": 1e6, "down": 1e6}  # a copy takes longer than what comes after it


class Linked(NamedTuple):
    """What four steps under a plan gave, and what the last one moved.

    Attributes:
        numbers: losses, and parameters after the last step.
        norms: of the gradients.
        down, up: bytes that came from the device and went there.
        live: bytes that stayed on the device.
        planned: bytes that the plan says the links carry.
        params: bytes of parameters that the plan says are on the device.
        grads: bytes of gradients that the plan says are on disk.
    """

    numbers: tuple[list[float], list[Any]]
    norms: list[float]
    down: int
    up: int
    live: int
    planned: dict[str, int]
    params: int
    grads: int

    def assert_moves_what_is_planned(self, without: Linked) -> None:
        """Beside what links carry ``without`` offload: numbers such as the loss."""
        assert self.numbers == without.numbers
        assert (self.down - without.down, self.up - without.up) == (self.planned["down"], self.planned["up"])


def compared(
    mesh: Any,
    sizes: Sequence[int],
    rows: int,
    plans: Sequence[Sequence[Any]],
    failing: Callable[[Any, Any, tuple[torch.Tensor, ...]], None] | None = None,
    compile: bool = False,
) -> list[Linked]:
    """The steps under each plan, of networks with layers of ``sizes``. In a process with the test device.

    Args:
        plans: the transforms of each.
        compile: whether steps run as a graph.
        failing: ``failing(step, state, batch)`` is called before the third step, with a step that will raise in backward.
    """
    return [_trained(mesh, sizes, rows, sl.chain(*plan), failing, compile) for plan in plans]


def _trained(mesh: Any, sizes: Sequence[int], rows: int, transform: Any, failing: Any, compile: bool) -> Linked:
    from helpers import rig  # makes the device, for which this module may be too early

    gc.collect()
    fails: list[bool] = []
    loss_of, params = mlp(sizes, torch.float32)

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        if fails:
            params["layers"][0]["weight"].register_hook(lambda grad: 1 / 0)
        return loss_of(params, batch)

    whole = share(regression_batch(rows, sizes[0], sizes[-1], torch.float32), mesh.rank, mesh.size)
    batch = tuple(leaf.to(mesh.device) for leaf in whole)
    tx = sl.optim.chain(sl.optim.clip_by_global_norm(0.5), sl.optim.adamw(1e-2))
    state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), tx, compile=compile)
    losses, norms = [], []
    for number in range(4):
        torch.accelerator.synchronize()
        if failing and number == 2:
            fails.append(True)
            failing(step, state, batch)
            fails.clear()
        rig.reset()
        with rig.limits(**SLOW):
            state, metrics = step(state, batch)
            torch.accelerator.synchronize()
        counts = rig.counts()
        losses.append(metrics["loss"].item())
        norms.append(metrics["grad_norm"].item())
    plan = sl.make_plan(params, mesh, transform, optimizer=tx, loss_fn=loss_of, batch=batch)
    final = [leaf.cpu().tolist() for leaf in optree.tree_leaves(sl.unshard(state.params))]
    moved, held = (counts.down, counts.up, counts.live), (plan.bytes("param", "device"), plan.bytes("grad", "disk"))
    return Linked((losses, final), norms, *moved, plan.transfers(), *held)
