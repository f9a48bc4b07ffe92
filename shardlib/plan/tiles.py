"""Checks and notes on leaves that are gathered in tiles (see `shardlib.plan.buckets.Bucket.cut`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardlib.errors import IllegalComposition, axes_named, listing
from shardlib.plan.buckets import Bucket
from shardlib.plan.resolved import Resolved
from shardlib.plan.value import PlanValue


def check_tiles(plan: PlanValue) -> None:
    """Refuse tiles that a plan cannot cut.

    Raises:
        IllegalComposition: lists every leaf whose rows do not divide, or whose gradients' exchanges keep residuals.
    """
    tiled = [bucket for bucket in plan.buckets if bucket.tiles > 1]
    if failures := [f"{bucket.paths[0]}: {failure}" for bucket in tiled for failure in _failures(plan, bucket)]:
        raise IllegalComposition(f"leaves that cannot be gathered in tiles:\n{listing(failures)}")


def _failures(plan: PlanValue, bucket: Bucket) -> Iterator[str]:
    rows, parts = bucket.shapes[0][0], bucket.ways * bucket.tiles
    padded = plan.placement_of[bucket.paths[0]].compute.spec.padded
    if padded or rows % parts:
        fitting = [tiles for tiles in range(2, bucket.tiles) if rows % (bucket.ways * tiles) == 0 and not padded]
        remedy = (
            f"give n={fitting[-1]}" if fitting else "make their number divide (pad a vocabulary), or leave it whole"
        )
        yield f"{rows} rows do not divide into {bucket.tiles} tiles of {bucket.ways} ranks' shares; {remedy}"
    if whole := bucket.axes[bucket.param_level :]:
        yield (
            f"its optimizer state is split over {axes_named(whole)} too, and its parameters are not; split both over the "
            "same axes (zero(3, axis=..., replicate=...))"
        )
    channels = [exchange.channel for exchange in plan.routes[bucket.name].reductions if exchange.channel]
    if kept := [channel for channel in channels if channel.keeps]:
        yield (
            f"its gradients travel over axis {kept[0].axis!r} in {kept[0].codec}, which keeps residuals of whole leaves; "
            "send gradients without residuals (feedback=False), or leave the leaf whole"
        )


def comes(resolved: Resolved, split: Iterable[str], sliced: Iterable[str]) -> bool:
    """Whether a leaf is brought to the device for use: gathered along axes, from another memory, or both.

    Args:
        split: the axes that parameters lie on.
        sliced: the axes of the leaf's slices.
    """
    return bool(set(split) - set(sliced)) or resolved.location("param").memory != "device"


def idle_tiles(resolved: Resolved, split: Iterable[str]) -> list[str]:
    """A line for the log on leaves that have tiles and are on the device, whole. ``split``: as in `comes`."""
    idle = [
        path
        for path, use in resolved.uses.items()
        if (use.tiles or 1) > 1 and not comes(resolved, split, use.spec.axes if use.spec else ())
    ]
    return [f"not gathered, so used whole instead of in tiles: {', '.join(idle)}"] if idle else []
