"""`skip_unused`, which leaves parameters alone that a step's loss does not use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import optree
import torch

from shardlib.errors import IllegalComposition
from shardlib.optim.base import GradientTransformation, write_copies
from shardlib.optim.code import coded
from shardlib.optim.combine import added, require_no_axis
from shardlib.optim.schedules.base import later
from shardlib.optim.shards import WHOLE, Locality, Selection, Shards, widest
from shardlib.plan.claims import LeafInfo
from shardlib.tree import Tree, tree_map


class SkipUnusedState(NamedTuple):
    """``missed``: path -> steps in which the parameter was not used (0-d float); ``inner_states``: path -> the state of the
    inner transformation for that parameter alone."""

    missed: dict[str, torch.Tensor]
    inner_states: dict[str, Tree]


@dataclass(frozen=True)
class _Called:
    """The choice of the parameter of one path."""

    path: str

    def __call__(self, info: LeafInfo) -> bool:
        return info.path == self.path


@coded
def skip_unused(inner: GradientTransformation) -> GradientTransformation:
    """``inner``, except that a parameter which no rank uses in any micro-batch of a step keeps its value and its state.

    As torch's optimizers do with parameters whose ``grad`` is None: heads that take turns, experts without rows, branches
    that are not taken. Otherwise, as in optax, their gradient is zero: moments go on moving them, and weight decay shrinks
    them. Each parameter counts its own updates, for bias corrections too; learning rates by schedules go on with the steps.
    In `shardlib.make_train_step` only, which knows what a step used. A kernel then runs per parameter, not per bucket.

    Put clips before it: ``chain(clip_by_global_norm(1.0), skip_unused(adamw(3e-4)))``.

    Raises:
        ValueError: ``inner`` reads all parameters, as clips do, or declares no locality.
        IllegalComposition: ``inner`` reduces gradients itself; in a step, nobody knows what was used.

    >>> params = {"body": torch.ones(2), "a": torch.ones(2), "b": torch.ones(2)}
    >>> tx = sl.optim.skip_unused(sl.optim.adamw(0.1, weight_decay=0.1))
    >>> state, step = sl.make_train_step(lambda p, head: (p["body"] * p[head]).sum(), params, tx)
    >>> state, _ = step(state, "a")
    >>> torch.equal(sl.unshard(state.params)["b"], params["b"])
    True
    """
    require_no_axis("skip_unused", inner)
    if inner.locality in (None, Locality.GLOBAL):
        raise ValueError(
            "skip_unused updates each parameter alone, and its transformation reads all of them, or declares no locality: "
            "put clips before it, chain(clip_by_global_norm(1.0), skip_unused(adamw(3e-4)))"
        )

    def each(tree: Tree, shards: Shards) -> dict[str, Selection]:
        return {info.path: shards.select(_Called(info.path), tree) for info in shards.about(tree)}

    def init(params: Tree, shards: Shards = WHOLE) -> SkipUnusedState:
        chosen = each(params, shards)
        states = {path: inner.init(some.take(params), shards=some.shards) for path, some in chosen.items()}
        return SkipUnusedState({path: torch.zeros(()) for path in states}, states)

    def update(updates: Tree, state: SkipUnusedState, params: Tree, *, shards: Shards = WHOLE):
        used, missed, states, result = _used(shards), dict(state.missed), dict(state.inner_states), updates
        for path, some in each(updates, shards).items():
            part = some.take(updates)
            if path in used:
                own = None if params is None else some.take(params)
                with later(missed[path]):
                    part, states[path] = inner.update(part, states[path], own, shards=some.shards)
            else:
                part, missed[path] = tree_map(torch.zeros_like, part), missed[path] + 1
            result = some.put(result, part)
        return result, SkipUnusedState(missed, states)

    def apply(
        params: Tree,
        updates: Tree,
        state: SkipUnusedState,
        scale: torch.Tensor | None,
        shards: Shards,
        copies: Tree,
    ) -> SkipUnusedState:
        used, missed, states = _used(shards), dict(state.missed), dict(state.inner_states)
        for path, some in each(updates, shards).items():
            own, written = some.take(params), some.take(copies)
            if path in used:
                with later(missed[path]):
                    states[path] = inner.apply(
                        own, some.take(updates), states[path], scale=scale, shards=some.shards, copies=written
                    )
            else:
                missed[path] = missed[path] + 1
                write_copies(written, own)
        return SkipUnusedState(missed, states)

    def sends(shards: Shards) -> Mapping[str, int]:
        return added(inner.sends(some.shards) for some in each({}, shards).values())

    locality = widest(Locality.GLOBAL, inner.locality)
    return GradientTransformation(init, update, locality, apply=apply, sends=sends, last=inner.last)


def skips_unused(state: Tree) -> bool:
    """Whether an optimizer's state is one that depends on what a step uses."""
    nodes = optree.tree_leaves(state, is_leaf=lambda node: isinstance(node, SkipUnusedState))
    return any(isinstance(node, SkipUnusedState) for node in nodes)


def _used(shards: Shards) -> frozenset[str]:
    if shards.used is None:
        raise IllegalComposition(
            "skip_unused: only make_train_step knows which parameters a step used; leave it out of loops over "
            "tx.update, or freeze parameters that are never used (sl.unused_params names them)"
        )
    return shards.used
