"""Sums of gradients in few bits: nothing may be lost but what is kept for the next step."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from shardlib.collectives.codecs.base import Codec, Item, Residuals, Rows
from shardlib.debug.difference import FLOOR, Difference, difference, tolerance
from shardlib.debug.finding import Finding
from shardlib.debug.local import local_gradient, rounded
from shardlib.debug.replay import Buffers
from shardlib.debug.view import StepView
from shardlib.mesh.launch.simulate import simulate
from shardlib.mesh.mesh import Mesh
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import Channel
from shardlib.plan.plan import Plan

_NOISE = 10  # times the part of a sum that is no multiple of the right one, up to which its factor may be another


def compressed(view: StepView, bucket: Bucket, got: Mapping[int, Buffers]) -> Finding | None:
    """A compressed sum that loses something: what goes in is what comes out and what is kept for the next step.

    Sums over several axes are checked as far as each is exact.
    """
    channels = [channel for channel in view.plan.channels if channel.bucket.name == bucket.name]
    shared = view.in_parts(bucket) or len(bucket.homes) > 1
    if len(channels) != 1 or len(view.plan.routes[bucket.name].reductions) != 1 or shared:
        return None
    (channel,) = channels
    for group in _groups(view, channel.axis):
        if not all(rank in got for rank in group) or (balance := _balance(view, channel, group)) is None:
            continue
        entered, left = balance
        lost = entered - left
        if any(kept.residual for kept in channel.keeps.values()):
            apart = rounded(
                difference(lost, torch.zeros_like(lost))._replace(largest=float(entered.abs().max())), bucket
            )
            note = "what is sent and what is kept for the next step do not add up to the gradients"
        else:
            apart, note = _without_residual(entered, left, bucket)
        if apart.matters:
            what = f"the sum of the gradient of unit {bucket.label} over axis {channel.axis!r} in {channel.codec}"
            leaf = _leaf_at(channel, int(lost.abs().argmax()))
            return view.finding("reduction", what, (tuple(group), apart), leaf=leaf, note=note)
    return None


def _without_residual(wanted: torch.Tensor, found: torch.Tensor, bucket: Bucket) -> tuple[Difference, str]:
    """The error of a sum that may lose what it cannot hold: it has no other factor than its noise explains."""
    norm = max(float(wanted.norm()), FLOOR)
    factor = float((found * wanted).sum()) / norm**2
    noise = float((found - factor * wanted).norm())
    limit = max(_NOISE * noise, tolerance(bucket.reduce_dtype) * norm)
    return Difference(abs(factor - 1) * norm, limit, norm), f"it is {factor:.3g} times the sum of what the ranks send"


def _groups(view: StepView, axis: str) -> list[list[int]]:
    """The ranks that exchange with each other over an axis, in their order along it."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in view.replay.steps:
        others = tuple(place for name, place in view.coords(rank).items() if name != axis)
        groups.setdefault(others, []).append(rank)
    return list(groups.values())


def _balance(view: StepView, channel: Channel, group: list[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What enters a sum, gradients and residuals; and what leaves it, the sum and residuals. Of the padded buffer."""
    entered, scattered = None, channel.level is not None
    for rank in group:
        mine = _whole(view, channel.bucket, rank)
        if mine is None:
            return None
        entered = mine if entered is None else entered + mine
    assert entered is not None
    sums = [view.ranks[rank].grads[channel.bucket.name].double() for rank in group]
    left = torch.cat(sums) if scattered else sums[0]
    residuals = {name: kept for name, kept in channel.keeps.items() if kept.residual}
    size = next((kept.elements for kept in residuals.values() if not kept.by_row), entered.numel())
    entered, left = (_padded(buffer, channel.ways, size, scattered) for buffer in (entered, left))
    for name, kept in residuals.items():
        before, after = ([view.ranks[rank].comm[when][name].double() for rank in group] for when in (0, 1))
        join = torch.cat if kept.by_row else _added
        entered, left = entered + join(before), left + join(after)
    return entered, left


def _added(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).sum(0)


def _whole(view: StepView, bucket: Bucket, rank: int) -> torch.Tensor | None:
    """A rank's own gradient of a bucket on one device, rank-major."""
    columns, ways = [], math.prod(bucket.sizes)
    for path in bucket.paths:
        own = local_gradient(view, rank, path, view.cells_of(rank))
        if own is None:
            return None
        chunk = -(-own.numel() // ways)
        columns.append(F.pad(own.reshape(-1), (0, chunk * ways - own.numel())).view(ways, chunk))
    return torch.cat(columns, 1).reshape(-1)


def _padded(buffer: torch.Tensor, ways: int, size: int, scattered: bool) -> torch.Tensor:
    """A buffer as the codec pads it: every row of it, if rows are scattered, or else its end."""
    rows = buffer.view(ways, -1) if scattered else buffer.view(1, -1)
    return F.pad(rows, (0, size // len(rows) - rows.shape[1])).reshape(-1)


def _leaf_at(channel: Channel, position: int) -> str:
    """The leaf that an element of the exchanged buffer belongs to."""
    bucket = channel.bucket
    within = position % max(channel.elements // (channel.ways if channel.level is not None else 1), 1)
    chunks = [-(-math.prod(shape) // math.prod(bucket.sizes)) for shape in bucket.shapes]
    for path, chunk in zip(bucket.paths, chunks):
        if within < chunk:
            return path
        within -= chunk
    return bucket.paths[-1]


# Laws of sums in few bits beyond their noise, tested on random numbers in place of gradients.
# The result must follow the sum of what the ranks give element by element; every rank's share must count alike; and no
# element may be lost. What a codec drops otherwise, by rounding or by design, is no finding: over many draws all ranks and
# elements fare alike.


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
