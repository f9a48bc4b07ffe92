"""Filling a piece of a state from the saved pieces that overlap it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardlib.checkpoint.pieces import Piece


def missing(piece: Piece, sources: Sequence[Piece]) -> str:
    """Why the saved ranges do not cover ``piece``, or ""."""
    if not sources:
        return f"{piece.name}: not in it"
    gap = _first_gap(piece, _alike(piece, sources))
    if gap is not None and any(source.window for source in (piece, *sources)):
        lacking = (~_part(_assemble(piece, sources)[1], piece)).nonzero()
        gap = piece.start + int(lacking[0]) if len(lacking) else None
    stop = piece.start + piece.data.numel()
    return "" if gap is None else f"{piece.name}: elements {gap} to {stop} are not in it"


def fill(piece: Piece, sources: Sequence[Piece]) -> None:
    """Copy what the sources hold of a piece that they cover."""
    alike = _alike(piece, sources)
    if _first_gap(piece, alike) is not None:
        # Sliced over other ranks: put together leaf by leaf, so that no more than one is ever whole.
        piece.data.copy_(_part(_assemble(piece, sources)[0], piece))
        return
    for source in alike:
        start = max(piece.start, source.start)
        stop = min(piece.start + piece.data.numel(), source.start + source.data.numel())
        if start < stop:
            piece.data[start - piece.start : stop - piece.start].copy_(
                source.data[start - source.start : stop - source.start]
            )


def _alike(piece: Piece, sources: Sequence[Piece]) -> list[Piece]:
    """The sources that are of the same slice of the leaf, or of all of it like the piece itself."""
    return [source for source in sources if source.window == piece.window]


def _first_gap(piece: Piece, sources: Sequence[Piece]) -> int | None:
    """The first element of a piece that no source holds."""
    covered = piece.start
    for source in sorted(sources, key=lambda source: source.start):
        if source.start <= covered:
            covered = max(covered, source.start + source.data.numel())
    return None if covered >= piece.start + piece.data.numel() else covered


def _assemble(piece: Piece, sources: Sequence[Piece]) -> tuple[torch.Tensor, torch.Tensor]:
    """The flattened, whole leaf, and which of its elements the sources held."""
    window = next(found.window for found in (piece, *sources) if found.window)
    whole = torch.zeros(math.prod(window.shape), dtype=sources[0].data.dtype)
    here = torch.zeros(whole.numel(), dtype=torch.bool)
    for source in sources:
        stop = source.start + source.data.numel()
        places = source.window.places()[source.start : stop] if source.window else slice(source.start, stop)
        whole[places] = source.data
        here[places] = True
    return whole, here


def _part(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    stop = piece.start + piece.data.numel()
    return whole[piece.window.places()[piece.start : stop]] if piece.window else whole[piece.start : stop]
