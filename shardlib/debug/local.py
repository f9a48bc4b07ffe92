"""One rank's gradients before they are summed over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardlib.debug.backward import seed_of
from shardlib.debug.difference import FLOOR, Difference, tolerance
from shardlib.debug.layout import slice_of
from shardlib.debug.view import StepView
from shardlib.plan.buckets import Bucket


def rounded(apart: Difference, bucket: Bucket) -> Difference:
    """A difference of gradients that were computed and summed in the bucket's dtypes."""
    share = max(tolerance(bucket.dtype), tolerance(bucket.reduce_dtype))
    return apart._replace(limit=max(apart.limit, share * (apart.largest + FLOOR)))


def local_gradient(view: StepView, rank: int, path: str, cells: Sequence[int]) -> torch.Tensor | None:
    """A rank's part of a leaf's gradient from some micro-batches, in the scale of its backward; None if it is not known."""
    placed = view.plan.placement_of[path]
    total = torch.zeros(placed.compute.shape, dtype=torch.float64)
    for cell in cells:
        seed = seed_of(view, cell)
        if seed is None:
            return None
        total += view.evaluated[cell].grads[path].double() * seed
    return slice_of(total, placed.compute.spec, view.plan.sizes, view.coords(rank))
