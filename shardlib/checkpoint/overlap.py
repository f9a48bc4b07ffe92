"""Filling a fragment of a state from the saved fragments that overlap it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardlib.checkpoint.fragments import Fragment


def missing(fragment: Fragment, sources: Sequence[Fragment]) -> str:
    """Why the sources do not cover ``fragment``, or ""."""
    if not sources:
        return f"{fragment.name}: not in the checkpoint"
    gap = _first_gap(fragment, _same_slice(fragment, sources))
    if gap is not None and any(source.window for source in (fragment, *sources)):
        absent = (~_assemble(fragment, sources)[1][fragment.indices()]).nonzero()
        gap = fragment.start + int(absent[0]) if len(absent) else None
    return "" if gap is None else f"{fragment.name}: elements {gap} to {fragment.stop} are not in the checkpoint"


def fill(fragment: Fragment, sources: Sequence[Fragment]) -> None:
    """Copy a fragment's elements from the sources, which cover it."""
    same_slice = _same_slice(fragment, sources)
    if _first_gap(fragment, same_slice) is not None:
        # The sources are other slices. Leaves are assembled one at a time, so no more than one is ever whole.
        fragment.data.copy_(_assemble(fragment, sources)[0][fragment.indices()])
        return
    for source in same_slice:
        start, stop = max(fragment.start, source.start), min(fragment.stop, source.stop)
        if start < stop:
            fragment.data[start - fragment.start : stop - fragment.start].copy_(
                source.data[start - source.start : stop - source.start]
            )


def _same_slice(fragment: Fragment, sources: Sequence[Fragment]) -> list[Fragment]:
    """The sources that hold elements of the slice that ``fragment`` lies in (both may be of the whole leaf)."""
    return [source for source in sources if source.window == fragment.window]


def _first_gap(fragment: Fragment, sources: Sequence[Fragment]) -> int | None:
    """The index of the first element of a fragment that no source holds; None when they hold all."""
    covered = fragment.start
    for source in sorted(sources, key=lambda source: source.start):
        if source.start <= covered:
            covered = max(covered, source.stop)
    return None if covered >= fragment.stop else covered


def _assemble(fragment: Fragment, sources: Sequence[Fragment]) -> tuple[torch.Tensor, torch.Tensor]:
    """The flattened whole leaf from slices, and a mask of the elements that the sources hold."""
    window = next(each.window for each in (fragment, *sources) if each.window)
    whole = torch.zeros(math.prod(window.shape), dtype=sources[0].data.dtype)
    held = torch.zeros(whole.numel(), dtype=torch.bool)
    for source in sources:
        indices = source.indices()
        whole[indices] = source.data
        held[indices] = True
    return whole, held
