"""Conditions that several transforms put on the other transforms in their chain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from shardlib.errors import IllegalComposition, axes_named
from shardlib.plan.claims import LeafInfo
from shardlib.plan.resolved import Resolved
from shardlib.plan.value import ROLES


class Narrow(Protocol):
    """A codec of gradients, of gathered parameters or of rows of tokens."""

    @property
    def wide(self) -> bool: ...


def require_summed(resolved: Resolved, axis: str, codec: object) -> None:
    """Refuse compressed gradients on an axis over which no gradients are summed."""
    if not resolved.varies_over(axis):
        raise IllegalComposition(
            f"gradients are to travel over axis {axis!r} in {codec}, and nothing sums them there: add "
            f"zero(axis={axis!r}), or name the axis over which zero divides the batch"
        )


def require_split_parameters(resolved: Resolved, axis: str, packing: object) -> None:
    """Refuse compressed gathers on an axis over which no parameters are split."""
    if axis not in resolved.location("param").axes:
        raise IllegalComposition(
            f"parameters are to travel over axis {axis!r} in {packing}, and none are split over it: add zero(stage=3, "
            f"axis={axis!r}); at lower stages parameters are not gathered for use"
        )


def require_whole_leaves(resolved: Resolved, axis: str, codec: object) -> None:
    """Refuse a codec that compresses whole leaves if any role of the state is split."""
    split = sorted({axis for role in ROLES for axis in resolved.location(role).axes})
    if split:
        raise IllegalComposition(
            f"gradients are to travel over axis {axis!r} in {codec}, which are made of whole leaves, and zero splits the "
            f"state over {axes_named(split)}: use zero(stage=0), or compress shards by sl.onebit() or sl.quantize()"
        )


def require_no_float64(
    resolved: Resolved, codec: Narrow, instead: str, leaves: Iterable[LeafInfo] | None = None
) -> None:
    """Refuse float64 parameters with a codec that cannot represent float64.

    Args:
        instead: what a user can do in place of other parameters.
        leaves: those of which values travel in the codec; by default all.
    """
    leaves = resolved.leaves if leaves is None else leaves
    wide = [leaf.path for leaf in leaves if resolved.dtype(leaf) == torch.float64]
    if wide and not codec.wide:
        raise IllegalComposition(
            f"{codec} holds no float64, which {len(wide)} parameters are ({wide[0]} first); use float32 parameters, or "
            f"{instead}"
        )


def require_split_gradients(resolved: Resolved) -> None:
    """Refuse ``sync="each"`` if gradients are not split."""
    if resolved.step.sync == "each" and not resolved.location("grad").axes:
        raise IllegalComposition(
            "sync='each' reduces gradients after every micro-batch into their shards, and at ZeRO stages 0 and "
            "1 they are kept whole; use sync='last' (the same numbers, less traffic), or stage 2 or 3"
        )
