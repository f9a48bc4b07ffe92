"""Edits of a chain of transforms by which a rank holds less of its device's memory, or of its host's."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from shardlib.plan.plan import Plan
from shardlib.plan.transform import Chain, Transform, chain
from shardlib.transforms.accumulate import Accumulate, accumulate
from shardlib.transforms.offload import Offload, offload
from shardlib.transforms.pipeline import Pipelined
from shardlib.transforms.precision import Precision
from shardlib.transforms.remat import Remat, remat
from shardlib.transforms.tile import Tile, tile
from shardlib.transforms.zero import Zero, zero

_FOLDER = "states"
_SHARES = (0.25, 0.5, 0.75)  # of the states
_MICROBATCHES = 256  # at most: more of them hold hardly less, and a step of small ones is slow
_TILES, _WEIGHTS = (4, 16), 3
_T = TypeVar("_T", bound=Transform)


def changes(
    transform: Transform, full: Collection[str], sizes: Mapping[str, int], rows: int, *, elementwise: bool, disk: bool
) -> Iterator[Chain]:
    """The chains with one transform edited: more recompute, a higher stage, more offload, smaller micro-batches.

    Args:
        full: the memories that hold too much. Where the host's or the disk is one, less offload is an edit too.
        sizes: axis -> size of the mesh.
        rows: of a rank's batch.
        elementwise: whether the optimizer's states may be in two memories.
        disk: whether its states, and parameters, may go to disk.
    """
    members, moved_too_much = _members(transform), not {"host", "disk"}.isdisjoint(full)

    def edits(before: _T | None, candidates: Iterator[_T]) -> Iterator[Chain]:
        others = [member for member in members if member is not before]
        for after in candidates:
            if after != before:
                yield chain(*others, after)

    recomputed, split = _first(members, Remat), _first(members, Zero)
    moved, cut, staged = _first(members, Offload), _first(members, Accumulate), _first(members, Pipelined)
    yield from edits(recomputed, _remats(recomputed, "host" in full))
    yield from edits(split, _stages(split, sizes))
    yield from edits(moved, _offloads(moved, elementwise, disk))
    if moved and moved_too_much:
        yield chain(*(member for member in members if member is not moved))
        yield from edits(moved, _less(moved, elementwise))
    if staged is None:
        numbers = _smaller(cut.microbatches if cut else 1, rows)
        yield from edits(cut, (replace(cut, microbatches=n) if cut else accumulate(n) for n in numbers))
    else:
        yield from edits(staged, (replace(staged, microbatches=n) for n in _smaller(staged.microbatches, rows)))


def other_changes(transform: Transform, full: Collection[str], weights: Sequence[str]) -> Iterator[Chain]:
    """The chains with one transform edited in a way that `changes` leaves out: sums of gradients in 16 bits, which round
    them, and tiles, which only some uses of a weight allow.

    Args:
        full: as of `changes`.
        weights: globs of weights, or of their layers, that tiles may make smaller.
    """
    members = _members(transform)
    mixed, tiled = _first(members, Precision), _first(members, Tile)
    if mixed and mixed.reduce_dtype == "fp32" and mixed.compute != "fp32":
        rounded = replace(mixed, reduce_dtype=mixed.compute)
        yield chain(*(rounded if member is mixed else member for member in members))
    if tiled is None and "device" in full:
        for glob, n in itertools.product(weights, _TILES):
            yield chain(*members, tile(glob, n))


def _remats(before: Remat | None, full: bool) -> Iterator[Remat]:
    if before is None:
        yield remat("auto")
        yield remat("auto", store="host")
        return
    how = before.how
    for policy in dict.fromkeys((how.policy, "auto")):
        for host in dict.fromkeys((how.host, True, not full)):
            save = how.save if policy == "full" else ()
            yield Remat(replace(how, policy=policy, save=save, host=host, blocks=None))


def _stages(before: Zero | None, sizes: Mapping[str, int]) -> Iterator[Zero]:
    present = before or zero(0)
    if any(sizes.get(axis, 1) > 1 for axis in present.axes):
        for stage in range(present.stage + 1, 4):
            yield replace(present, stage=stage)


def _offloads(before: Offload | None, elementwise: bool, disk: bool) -> Iterator[Offload]:
    present = before or offload()
    for share in _SHARES if elementwise and present.update != "delay" else ():
        if before is None or before.fraction < share:
            yield replace(present, fraction=share)
    for optimizer in ("host", "disk") if disk else ("host",):
        folders = (present.folders or (_FOLDER,)) if optimizer == "disk" else ()
        places: list[tuple[str | None, str | None]] = [("host", present.gradients), ("host", "host")]
        places.insert(0, (present.params, present.gradients))
        if optimizer == "disk":
            places += [("disk", None), ("disk", "disk")]
        else:  # what is on disk is with its states
            places = [place for place in places if "disk" not in place]
        for params, gradients in dict.fromkeys(places):
            yield Offload(optimizer, params, gradients, 1.0, folders, present.update if optimizer == "host" else None)


def _less(before: Offload, elementwise: bool) -> Iterator[Offload]:
    """Offload of less than before."""
    if before.update:
        yield replace(before, update=None)
    for params, gradients in dict.fromkeys(((None, before.gradients), (before.params, None), (None, None))):
        yield replace(before, params=params, gradients=gradients)
    for share in _SHARES if elementwise and before.update != "delay" else ():
        if share < before.fraction:
            yield replace(before, fraction=share)


def _smaller(present: int, rows: int) -> Iterator[int]:
    """Numbers of micro-batches that rows divide into, beyond the present one: at least twice as many each time."""
    for n in range(2 * present, min(rows, _MICROBATCHES) + 1):
        if n >= 2 * present and rows % n == 0:
            present = n
            yield n


def largest(plan: Plan) -> list[str]:
    """The globs of a plan's largest weights; those of one layer of all blocks have one glob."""
    sizes: dict[str, int] = {}
    for leaf in plan.leaves:
        if len(leaf.compute.shape) > 1:
            glob = re.sub(r"(?<=/)\d+(?=/)", "*", leaf.path)
            sizes[glob] = math.prod(leaf.compute.shape)
    return sorted(sizes, key=lambda glob: -sizes[glob])[:_WEIGHTS]


def _first(members: tuple[Transform, ...], kind: type[_T]) -> _T | None:
    return next((member for member in members if isinstance(member, kind)), None)


def _members(transform: Transform) -> tuple[Transform, ...]:
    return transform.transforms if isinstance(transform, Chain) else (transform,)


def difference(before: Transform, after: Transform, plan: Plan) -> str:
    """What a user changes to come from one chain to another, as code. ``plan`` has decided what the other left open."""
    old, new = _members(before), _members(after)
    gone, come = [each for each in old if each not in new], [each for each in new if each not in old]
    replaced = {type(each): each for each in gone}
    codes = []
    for each in come:
        if isinstance(each, Remat) and plan.step.remat and plan.step.remat.blocks == 0:
            continue  # nothing is recomputed: what was, is left out
        former = replaced.pop(type(each), None)
        if isinstance(each, Remat) and plan.step.remat and each.how.policy == "auto":
            each = Remat(replace(plan.step.remat, axis=None))  # with the number of blocks that the plan has chosen
        codes.append(f"{each!r} in place of {former!r}" if former else f"add {each!r}")
    return "; ".join([*codes, *(f"leave out {each!r}" for each in replaced.values())])
