"""Short forms of deep plans: of many blocks that are treated alike a few are traced, and stand for the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import optree

from shardlib.plan.buckets import Bucket
from shardlib.plan.plan import Plan
from shardlib.plan.records import Shape
from shardlib.tree import Tree, leaves_of, path_name, unflatten

# Neighbours of one kind that a short form keeps, at the beginning and at the end. What is gathered ahead in forward, or
# still on its way in backward, reaches a few blocks far; the last of the first ones, which stands for those that are left
# out, is then like the next one.
_FIRST, _LAST = 3, 5


class Short(NamedTuple):
    """A short form of a plan.

    Attributes:
        plan: for parameters with fewer blocks.
        repeats: number of a block, from 1 -> how many like it are left out right after it.
        stands: path of each block -> paths of the blocks that it is in the whole plan: one, or those that it stands for.
        kept: numbers of the elements that the list of blocks still has.
        others: elements of that list beside the blocks.
    """

    plan: Plan
    repeats: dict[int, int]
    stands: dict[str, tuple[str, ...]]
    kept: tuple[int, ...]
    others: int


def short_form(plan: Plan, *, sequential: bool = False) -> Short | None:
    """The short form of a plan; None if it has none that is shorter.

    Args:
        sequential: whether every element of the parameters, which are a list, is a block: those before and after the blocks
            that are alike, too.
    """
    stack = None if plan.stages.axes else _stack(plan.shape.treedef)
    if stack is None:
        return None
    at, start, length, whole = stack
    before = start if sequential else 0
    blocks = [path_name((*at, start + number)) for number in range(length)]
    kinds = _kinds(plan, blocks)
    if kinds is None:
        return None
    remat = plan.step.remat
    recomputed = 0 if remat is None else length if remat.blocks is None else remat.blocks
    groups: list[tuple[int, ...]] = []  # the blocks that each one of the short form stands for
    for _, run in itertools.groupby(range(length), key=lambda number: (before + number < recomputed, kinds[number])):
        numbers = list(run)
        groups += _grouped(numbers, max(_LAST, _leaving(plan, kinds[numbers[0]], length)))
    if len(groups) == length:
        return None
    # Where nothing but recompute differs, the first blocks serve any number of recomputed ones.
    alike = all(kind == kinds[0] for kind in kinds)
    present = list(range(len(groups))) if alike else [group[0] for group in groups]
    kept = (*range(start), *(start + number for number in present), *range(start + length, whole))
    short = _without(plan, at, kept, {path for n, path in enumerate(blocks) if n not in present})
    if short is None:
        return None
    if remat is not None and remat.blocks is not None:
        after = max(0, recomputed - before - length)
        again = replace(
            remat, blocks=min(before, recomputed) + after + sum(before + group[0] < recomputed for group in groups)
        )
        short = replace(short, step=replace(short.step, remat=again))
    repeats = {position: len(group) - 1 for position, group in enumerate(groups, 1 + before) if len(group) > 1}
    stands = {blocks[number]: tuple(blocks[n] for n in group) for number, group in zip(present, groups, strict=True)}
    return Short(short, repeats, stands, kept, whole - length)


def _grouped(run: list[int], end: int) -> list[tuple[int, ...]]:
    """Neighbours of one kind, each alone; or one of them, the last of the first ones, with those that it stands for: all
    but the ``end`` ones at the end."""
    if len(run) <= _FIRST + end:
        return [(number,) for number in run]
    first, middle, last = run[: _FIRST - 1], run[_FIRST - 1 : -end], run[-end:]
    return [*((number,) for number in first), tuple(middle), *((number,) for number in last)]


def _leaving(plan: Plan, kind: list[Any], length: int) -> int:
    """How many blocks it takes in backward until as many gradients arrive in another memory as leave; 0 if they never do.

    Up to there each block's gradients come on top of those that are on their way: see `shardlib.sharded.flights`.
    """
    leaves = (bucket for bucket in kind if isinstance(bucket, Bucket) and bucket.memory.optimizer != "device")
    moved = sum(bucket.owned for bucket in leaves)
    blocks = 2 * plan.largest_unit // moved + _LAST if moved else 0
    return 0 if blocks > length + _LAST else blocks


class _Stack(NamedTuple):
    """Neighbours in a list that have equal structures: the way to the list, the first one, their number, and the list's."""

    at: tuple[Any, ...]
    start: int
    length: int
    whole: int


def _stack(treedef: Any) -> _Stack | None:
    """The longest stack."""
    found = _stacks(unflatten(treedef, range(treedef.num_leaves)), ())
    return max(found, key=lambda stack: stack.length, default=None)


def _stacks(node: Any, at: tuple[Any, ...]) -> Iterator[_Stack]:
    if optree.tree_is_leaf(node):
        return
    children, _, entries, _ = optree.tree_flatten_one_level(node)
    if isinstance(node, (list, tuple)) and len(node) > _FIRST + _LAST and not any(map(optree.tree_is_leaf, children)):
        forms = [optree.tree_structure(child) for child in node]
        runs = [list(run) for _, run in itertools.groupby(range(len(node)), key=forms.__getitem__)]
        longest = max(runs, key=len)
        if len(longest) > _FIRST + _LAST:
            yield _Stack(at, longest[0], len(longest), len(node))
            return
    for child, entry in zip(children, entries, strict=True):
        yield from _stacks(child, (*at, entry))


def _kinds(plan: Plan, blocks: list[str]) -> list[list[Any]] | None:
    """What a plan does with each block's parameters, without names; None if one is tied to another block's."""
    number = {path: number for number, path in enumerate(blocks)}
    depth = blocks[0].count("/") + 1
    kinds: list[list[Any]] = [[] for _ in blocks]  # where parameters are stored follows from their buckets

    def local(path: str) -> tuple[int | None, str]:
        """The block that a path lies in, and the path within it."""
        parts = path.split("/")
        return number.get("/".join(parts[:depth])), "/".join(parts[depth:])

    for bucket in plan.buckets:
        block, unit = local(bucket.unit)
        if block is not None:
            paths = tuple(local(path) for path in bucket.paths)
            if any(other != block for other, _ in paths):
                return None
            home = None if bucket.home is None else local(bucket.home)[1]
            kinds[block].append(replace(bucket, name="", unit=unit, paths=tuple(path for _, path in paths), home=home))
    for placement in plan.placements:
        block, path = local(placement.path)
        if any(local(alias)[0] != block for alias in placement.aliases):
            return None
        if block is not None:
            leaf, aliases = replace(placement.compute, path=path), [local(alias)[1] for alias in placement.aliases]
            kinds[block].append((leaf, aliases, placement.style, placement.dealt))
    return kinds


def _without(plan: Plan, at: tuple[Any, ...], kept: tuple[int, ...], gone: set[str]) -> Plan | None:
    """A plan for parameters of which the list at ``at`` has only the elements ``kept``; those at the paths ``gone`` have
    none."""
    depth = len(at) + 1

    def stays(path: str) -> bool:
        return "/".join(path.split("/")[:depth]) not in gone

    tree = _with(unflatten(plan.shape.treedef, range(len(plan.shape.paths))), at, kept)
    leaves = leaves_of(tree)
    placements = [number for number, placement in enumerate(plan.placements) if stays(placement.path)]
    places = {number: place for place, number in enumerate(placements)}
    owners = [plan.shape.owners[leaf] for leaf in leaves]
    paths = tuple(plan.shape.paths[leaf] for leaf in leaves)
    if not all(owner in places for owner in owners):
        return None
    shape = Shape(optree.tree_structure(tree), paths, tuple(places[owner] for owner in owners))
    return replace(
        plan,
        shape=shape,
        placements=tuple(plan.placements[number] for number in placements),
        buckets=tuple(bucket for bucket in plan.buckets if stays(bucket.unit)),
    )


def _with(node: Any, at: tuple[Any, ...], kept: tuple[int, ...]) -> Tree:
    if not at:
        return type(node)(node[number] for number in kept)
    children, how, entries, build = optree.tree_flatten_one_level(node)
    index = list(entries).index(at[0])
    return build(how, [_with(child, at[1:], kept) if n == index else child for n, child in enumerate(children)])
