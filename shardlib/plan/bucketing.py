"""Grouping leaves: into units, by the parameters' structure, and units' leaves into buckets, by how they are stored."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import optree
import torch

from shardlib.common.tensors import dtype_name
from shardlib.common.thresholds import Threshold
from shardlib.errors import IllegalComposition, axes_named, listing
from shardlib.mesh.specs import WHOLE
from shardlib.plan.buckets import Bucket, BucketMemory, stands_alone
from shardlib.plan.claims import LeafInfo, Use
from shardlib.plan.placement import Placement, RoleAxes
from shardlib.plan.stages import Stages
from shardlib.plan.transform import Resolved
from shardlib.plan.value import PlanValue
from shardlib.tree import Tree, path_name

# Checks and notes on leaves that are gathered in tiles (see `shardlib.plan.buckets.Bucket.cut`).


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


class _Kind(NamedTuple):
    """The properties that all leaves of a bucket share."""

    unit: str
    dtype: torch.dtype
    trainable: bool
    master: torch.dtype | None
    axes: tuple[str, ...]
    alone: str  # the path of a leaf that is a bucket of its own, else ""
    slices: tuple[str, ...]
    sums: tuple[str, ...]
    varying: tuple[str, ...]
    stages: tuple[int, ...]
    tiles: int

    def order(self, units: Mapping[str, int]) -> tuple[object, ...]:
        rest = (self.slices, self.sums, self.varying, self.stages, self.tiles)
        return (units[self.unit], str(self.dtype), not self.trainable, str(self.master), self.alone, *rest)


def buckets_of(
    placements: Sequence[Placement],
    resolved: Resolved,
    splits: RoleAxes,
    batch_axes: tuple[str, ...],
    stages: Stages,
    units: Mapping[str, int],
) -> tuple[Bucket, ...]:
    """The buckets of all leaves, in the order of units.

    Args:
        units: name of a unit -> its position in the parameters' pytree.
    """
    groups: dict[_Kind, list[Placement]] = {}
    for placement in placements:
        groups.setdefault(_kind(placement, resolved, splits), []).append(placement)
    buckets: list[Bucket] = []
    # States have what is kept by bucket and what is kept by path: a name that were a path would stand for both.
    names = {path for placement in placements for path in (placement.path, *placement.aliases)}
    for kind in sorted(groups, key=lambda kind: kind.order(units)):
        name = next(name for name in _names(kind) if name not in names)
        names.add(name)
        buckets.append(_bucket(name, kind, groups[kind], resolved, splits, batch_axes, stages))
    return tuple(_in_memories(buckets, resolved))


def _kind(placement: Placement, resolved: Resolved, splits: RoleAxes) -> _Kind:
    sizes, use = resolved.sizes, resolved.use(placement.path)
    trainable = placement.grad is not None
    slices = tuple(axis for axis in placement.compute.spec.axes if sizes[axis] > 1)
    # A frozen leaf has no optimizer state: its bucket is split as the parameters are, and no further.
    axes = tuple(axis for axis in (splits.optimizer if trainable else splits.param) if axis not in slices)
    numel = math.prod(placement.compute.spec.local_shape(placement.compute.shape, sizes))
    # A leaf that is on the device, whole, has no tiles.
    tiles = (use.tiles or 1) if comes(resolved, splits.param, slices) else 1
    alone = placement.path if tiles > 1 or stands_alone(numel, math.prod(sizes[axis] for axis in axes)) else ""
    return _Kind(
        unit=placement.unit,
        dtype=placement.param.dtype,
        trainable=trainable,
        master=use.master if trainable else None,
        axes=axes,
        alone=alone,
        slices=slices,
        sums=_sums(placement, use, slices, resolved),
        varying=use.varying or (),
        stages=use.stages or (0,),
        tiles=tiles,
    )


def _sums(placement: Placement, use: Use, slices: tuple[str, ...], resolved: Resolved) -> tuple[str, ...]:
    """Axes, besides the batch axes, along which ranks compute partial gradients that must be summed."""
    sums = (placement.style.axis,) if placement.style and placement.style.sums else ()
    sequence = resolved.step.sequence
    if sequence is None or resolved.sizes[sequence.axis] == 1 or placement.grad is None:
        return sums
    # Of a leaf that is whole along the sequence's axis, a rank computes the gradient from its own positions only.
    return sums if sequence.axis in (*slices, *sums) else (*sums, sequence.axis)


def _names(kind: _Kind) -> Iterator[str]:
    """The names that a bucket may have; the first that is free is its name."""
    dtype = dtype_name(kind.dtype)
    shared = (f"stages {', '.join(map(str, kind.stages))}",) if len(kind.stages) > 1 else ()
    frozen = "" if kind.trainable else "/frozen"
    owner = kind.alone or kind.unit or "(top)"
    name = "/".join((f"{owner}/{dtype}{frozen}", *kind.slices, *(f"sum over {a}" for a in kind.sums), *shared))
    yield name
    yield from (f"{name}/{number}" for number in itertools.count(2))


def _bucket(
    name: str,
    kind: _Kind,
    members: Sequence[Placement],
    resolved: Resolved,
    splits: RoleAxes,
    batch_axes: tuple[str, ...],
    stages: Stages,
) -> Bucket:
    sizes, first = resolved.sizes, members[0]

    def levels(role: str) -> int:
        return sum(axis not in kind.slices for axis in splits.of(role))

    # From minor to major: ranks that are neighbours in the batch are summed first.
    summed = [axis for axis in (*reversed(batch_axes), *kind.sums) if sizes[axis] > 1]
    return Bucket(
        name=name,
        unit=kind.unit,
        paths=tuple(member.path for member in members),
        shapes=tuple(member.compute.spec.local_shape(member.compute.shape, sizes) for member in members),
        dtype=kind.dtype,
        reduce_dtype=first.grad.dtype if first.grad else kind.dtype,
        master_dtype=kind.master,
        trainable=kind.trainable,
        axes=kind.axes,
        sizes=tuple(sizes[axis] for axis in kind.axes),
        param_level=levels("param"),
        grad_level=levels("grad") if kind.trainable else 0,
        replicas=tuple(axis for axis in summed if axis not in (*kind.axes, *kind.varying)),
        slices=kind.slices,
        short=_short(members, kind.slices, sizes),
        stages=kind.stages,
        homes=stages.homes(kind.stages),
        tiles=kind.tiles,
    )


def _in_memories(buckets: Sequence[Bucket], resolved: Resolved) -> list[Bucket]:
    """The buckets with their memories, and with masters where the optimizer works in another memory than the parameters'.

    Of a role with a share of its bytes in another memory, the buckets whose gradients come last stay on the device: those of
    the first units, since the others can be updated elsewhere while backward goes on.
    """
    placed = []
    whole: dict[tuple[int, ...], int] = {}
    for bucket in buckets:
        whole[bucket.homes] = whole.get(bucket.homes, 0) + bucket.owned
    before = dict.fromkeys(whole, 0)
    for bucket in buckets:
        middle = before[bucket.homes] + bucket.owned / 2
        before[bucket.homes] += bucket.owned
        memory = BucketMemory(
            *(
                at.memory if at.share == 1 or middle > (1 - at.share) * whole[bucket.homes] else "device"
                for at in map(resolved.location, BucketMemory._fields)
            )
        )
        if memory.optimizer == "device":
            memory = memory._replace(grad="device")
        needs_master = bucket.trainable and memory.optimizer != memory.param
        master = bucket.master_dtype or (bucket.dtype if needs_master else None)
        placed.append(replace(bucket, memory=memory, master_dtype=master))
    return placed


def _short(
    members: Sequence[Placement], slices: tuple[str, ...], sizes: Mapping[str, int]
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """See `shardlib.plan.buckets.Bucket.short`."""
    computes = [member.compute for member in members]
    if not any(leaf.spec.padded for leaf in computes):
        return ()
    short = []
    for indices in itertools.product(*(range(sizes[axis]) for axis in slices)):
        coords = dict.fromkeys(sizes, 0) | dict(zip(slices, indices, strict=True))
        held = tuple(leaf.spec.window(leaf.shape, sizes, coords).numel for leaf in computes)
        if held != tuple(leaf.spec.local_numel(leaf.shape, sizes) for leaf in computes):
            short.append((indices, held))
    return tuple(short)


# Units: the leaves that are gathered and reduced together, derived from the structure of the parameter pytree.


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
