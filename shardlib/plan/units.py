"""Units: the leaves that are gathered and reduced together, derived from the structure of the parameter pytree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import optree

from shardlib.common.thresholds import Threshold
from shardlib.mesh.specs import WHOLE
from shardlib.plan.claims import LeafInfo
from shardlib.plan.resolved import Resolved
from shardlib.tree import Tree, path_name

# Neighbouring elements of a list are one unit while their whole parameters take at most this many bytes. A message costs
# about as much as 220 kB more in one (two cores, gloo: 220 µs, and 1 ns for a byte), so beyond a megabyte or so little is
# saved; and two units are whole at a time.
MERGED = Threshold(1 << 20)


class Weight(NamedTuple):
    """What decides on the unit of a leaf.

    Attributes:
        bytes: of the leaf as a rank uses it; infinite for one that is gathered in tiles.
        stages: the stages that use it.
    """

    bytes: float
    stages: tuple[int, ...]


_NONE: Mapping[int, Weight] = {}


def units_of(tree: Tree, leaves: Iterable[tuple[int, LeafInfo]], resolved: Resolved) -> list[str]:
    """The unit of each leaf of the parameters, in flattening order, small neighbours merged.

    Nothing is merged where steps leave out layers, which are units then; where a share of the bytes lives in another memory,
    which is cut by buckets; or where parameters live in another memory, so that the device holds as few as can be.

    Args:
        leaves: number of each leaf in flattening order, without those that are tied to earlier ones.
    """
    weights: dict[int, Weight] = {}
    for number, leaf in leaves:
        use = resolved.use(leaf.path)
        numel = math.prod((use.spec or WHOLE).local_shape(leaf.shape, resolved.sizes))
        size = math.inf if (use.tiles or 1) > 1 else numel * resolved.dtype(leaf).itemsize
        weights[number] = Weight(size, use.stages or (0,))
    parted = any(location.share < 1 for location in resolved.locations.values())
    elsewhere = resolved.location("param").memory != "device"
    return unit_names(tree, weights, 0 if parted or elsewhere or resolved.step.layer_drop else MERGED())


def unit_names(tree: Tree, weights: Mapping[int, Weight] = _NONE, most: int = 0) -> list[str]:
    """The unit of each leaf, in flattening order.

    Each element of a list is a unit, unless the list holds tensors only; every other top-level subtree is a unit; tensors
    at the top form one unit together, named "". Then neighbouring elements of a list, with all that is in them, are merged
    into units of at most ``most`` bytes, named by the first and the last of them: "layers/0…7".

    Args:
        weights: of leaves, by their numbers in flattening order. Those that are tied to an earlier leaf have none.
        most: 0 to merge nothing.
    """
    names: list[str] = []
    _visit(tree, (), "", names, lambda spans: _merged(spans, weights, most) if most else iter(()))
    return names


class _Element(NamedTuple):
    """An element of a list: its path, and its leaves by their numbers in flattening order."""

    path: tuple[Any, ...]
    leaves: range


_Merging = Callable[[Sequence[_Element]], Iterator[tuple[str, range]]]


def _visit(node: Any, path: tuple[Any, ...], unit: str, names: list[str], merge: _Merging) -> None:
    if optree.tree_is_leaf(node):
        names.append(unit)
        return
    children, _, entries, _ = optree.tree_flatten_one_level(node)
    containers = [not optree.tree_is_leaf(child) for child in children]
    units_here = isinstance(node, (list, tuple)) and any(containers)
    elements = []
    for child, entry, container in zip(children, entries, containers, strict=True):
        below, first = (*path, entry), len(names)
        is_unit = units_here or (not path and container)
        _visit(child, below, path_name(below) if is_unit else unit, names, merge)
        elements.append(_Element(below, range(first, len(names))))
    for name, leaves in merge(elements) if units_here else ():
        names[leaves.start : leaves.stop] = [name] * len(leaves)


def _merged(elements: Sequence[_Element], weights: Mapping[int, Weight], most: int) -> Iterator[tuple[str, range]]:
    """The name and the leaves of each unit that takes up whole elements of a list."""
    group: list[_Element] = []
    taken, stages = 0.0, set[tuple[int, ...]]()
    for element in elements:
        own = [weights[number] for number in element.leaves if number in weights]
        if not own:  # without parameters, or with those of others
            continue
        size, here = sum(weight.bytes for weight in own), {weight.stages for weight in own}
        if group and (taken + size > most or here != stages):
            yield _joined(group)
            group, taken = [], 0.0
        if size > most:
            continue
        group.append(element)
        taken, stages = taken + size, here
    if group:
        yield _joined(group)


def _joined(group: Sequence[_Element]) -> tuple[str, range]:
    first, last = group[0], group[-1]
    name = path_name(first.path) + (f"…{last.path[-1]}" if len(group) > 1 else "")
    return name, range(first.leaves.start, last.leaves.stop)
