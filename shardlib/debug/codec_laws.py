"""Laws of sums in few bits beyond their noise, tested on random numbers in place of gradients.

The result must follow the sum of what the ranks give element by element; every rank's share must count alike; and no element
may be lost. What a codec drops otherwise, by rounding or by design, is no finding: over many draws all ranks and elements
fare alike.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from shardlib.collectives.codecs.base import Codec, Item, Residuals, Rows
from shardlib.debug.finding import Difference, Finding
from shardlib.mesh.launch.simulate import simulate
from shardlib.mesh.mesh import Mesh
from shardlib.plan.plan import Plan

_DRAWS = 256
_SIGMAS = 6  # standard deviations that chance does not reach
_LOST = 0.25  # of the mean factor: what an element's must reach


def codec_laws(plan: Plan) -> Finding | None:
    """The first law that a codec of the plan's sums breaks."""
    kinds: dict[Any, None] = dict.fromkeys(
        (c.codec, c.axis, c.ways, c.level is not None, c.mean, c.dtype) for c in plan.channels if c.ways > 1
    )
    return next((found for kind in kinds if (found := _law(*kind))), None)


@functools.lru_cache(maxsize=16)  # a plan is tested step by step
def _law(codec: Any, axis: str, ways: int, scattered: bool, mean: bool, dtype: torch.dtype) -> Finding | None:
    broken = _broken(*_sums(codec, axis, ways, scattered, mean, dtype))
    if broken is None:
        return None
    what, ranks, apart = broken
    return Finding(
        "reduction", f"sums over axis {axis!r} in {codec}", 0, apart, ranks, note=f"of {_DRAWS} drawn buffers: {what}"
    )


def _sums(
    codec: Codec, axis: str, ways: int, scattered: bool, mean: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the ranks give, ``[ranks, draws, elements]``, scaled so that its sum over ranks is due; and what rank after rank
    gets, ``[ranks or 1, draws, elements]``."""
    shape, leaf = (16, 8 * ways), 128 if scattered else 128 * ways
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(ways, _DRAWS, 256 * ways, generator=generator).to(dtype)

    def of_rank(mesh: Mesh) -> torch.Tensor:
        rows = Rows(
            ways=ways,
            index=mesh.rank,
            elements=256 * ways,
            filled=[(start, start + leaf) for start in range(0, 256 * ways, leaf)],
            scattered=scattered,
            mean=mean,
            dtype=dtype,
            shapes=() if scattered else (shape, shape),
        )
        bound = codec.bind(rows)
        kept: dict[str, torch.Tensor] = {}
        items = []
        for draw, values in enumerate(given[mesh.rank].clone()):
            names = {f"{draw}/{number}": value for number, value in enumerate(bound.start(mesh.device))}
            items.append(Item(bound, bound.pad(values), tuple(names)))
            kept |= names
        return torch.stack(list(codec.exchange(mesh, axis, items, Residuals(kept)).wait()))

    got = [sums.double() for sums in simulate(of_rank, mesh={axis: ways})]
    due = given.double() / (ways if mean else 1)
    return due, torch.cat(got, 1)[None] if scattered else torch.stack(got)


def _broken(given: torch.Tensor, got: torch.Tensor) -> tuple[str, tuple[int, ...], Difference] | None:
    """The law that is broken, as text, with the ranks and the factors that differ."""
    differ = [rank for rank, sums in enumerate(got) if not torch.equal(sums, got[0])]
    if differ:
        apart = float((got - got[0]).abs().max())
        return "ranks get different sums", tuple(differ), Difference(apart, 0.0, float(got.abs().max()))
    due, found = given.sum(0), got[0]
    follows, chance = _factors(found, due)
    factor = float(follows.mean())
    limit = _SIGMAS * float(chance.norm()) / len(chance)
    if not factor > limit:
        return (
            "they do not follow the sum of what ranks give, element by element",
            (),
            Difference(1 - factor, limit, 1.0),
        )
    # One factor per draw and rank: elements of a draw may depend on each other.
    rest = found - factor * due
    shares, square = (rest * given).mean(2), given.square().mean()
    parts, limits = shares.mean(1) / square, _SIGMAS * shares.std(1) / square / _DRAWS**0.5
    worst = int((parts.abs() - limits).argmax())
    mine, limit = float(parts[worst]), max(float(limits[worst]), 1e-3 * factor)
    if abs(mine) > limit:
        what = f"the share of rank {worst} counts {factor + mine:.3g} times, and those of all ranks {factor:.3g} times"
        return what, (worst,), Difference(abs(mine), limit, factor)
    lost = follows + _SIGMAS * chance < _LOST * factor
    heard = follows > _SIGMAS * chance  # which of a codec that sends few elements at a time are too few to tell
    if lost.any() and 2 * int(heard.sum()) > int((~lost).sum()):
        what = (
            f"{int(lost.sum())} of {len(lost)} elements are lost, the first of them element {int(lost.int().argmax())}"
        )
        return what, (), Difference(factor - float(follows.min()), _LOST * factor, factor)
    return None


def _factors(found: torch.Tensor, due: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By what factor each element of sums, ``[draws, elements]``, follows the one that is due, and the standard deviation of
    that factor."""
    squares = due.square().sum(0)
    factors = (found * due).sum(0) / squares
    return factors, (found - factors * due).std(0) / squares.sqrt()
