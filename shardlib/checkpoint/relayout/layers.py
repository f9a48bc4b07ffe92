"""Layers of experts with seats, as a plan has them, and the present and next places of their experts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardlib.collectives import primitives
from shardlib.errors import TreeError, listing
from shardlib.nn.moe.placement import NONE, balanced_replicas
from shardlib.plan.plan import Plan
from shardlib.sharded.tree import Sharded

_SEATS, _REPLICAS, _EXPERTS = "router/seats", "router/replicas", "experts/"

Given = Mapping[str, Any] | None  # layer -> a number for each expert


class Places(NamedTuple):
    """The places of a layer's experts.

    Attributes:
        seats: of each expert.
        replicas: the spare slot of each expert's second copy, −1 for none.
    """

    seats: Sequence[int]
    replicas: Sequence[int]


@dataclass(frozen=True)
class Layer:
    """A layer of experts that have seats.

    Attributes:
        name: the path of the layer's parameters; "" for the whole tree.
        experts: paths of the leaves with the experts along dimension 0.
        places: fields of `Places` -> paths of the leaves that have them: of "seats", and of "replicas" if there are any.
        number: of experts.
        ranks: over which they are dealt out.
        spare: slots of a rank for second copies.
    """

    name: str
    experts: tuple[str, ...]
    places: Mapping[str, str]
    number: int
    ranks: int
    spare: int


def layers_of(plan: Plan) -> dict[str, Layer]:
    """Name -> layer with seats.

    Raises:
        TreeError: there is none; or leaves of a layer with other numbers of experts than its seats.
    """
    placements = plan.everywhere.placement_of
    found, failures = {}, []
    for path in placements:
        if path != _SEATS and not path.endswith(f"/{_SEATS}"):
            continue
        name = path.removesuffix(_SEATS).rstrip("/")
        beneath, copies = f"{name}/{_EXPERTS}".lstrip("/"), f"{name}/{_REPLICAS}".lstrip("/")
        leaves = [placement.compute for other, placement in placements.items() if other.startswith(beneath)]
        (number,) = placements[path].compute.shape
        failures += [
            f"{leaf.path}: shape {leaf.shape}, and {number} seats" for leaf in leaves if leaf.shape[:1] != (number,)
        ]
        ways = {math.prod(plan.sizes[axis] for axis in (*leaf.spec.entries, ())[0]) for leaf in leaves}
        ranks, places, spare = max(ways, default=1), {"seats": path}, 0
        if copies in placements:
            places["replicas"] = copies
            spare = plan.step.tokens.spare if plan.step.tokens and ranks > 1 else 0
        found[name] = Layer(name, tuple(leaf.path for leaf in leaves), places, number, ranks, spare)
    if failures or not found:
        problem = (
            f"these leaves have other sizes than their layers' seats:\n{listing(failures)}\n"
            if failures
            else "none has. "
        )
        raise TreeError(
            f'relayout moves the experts of layers that have seats, and {problem}Give each layer params["router"]["seats"] = '
            "torch.arange(experts) (init_moe(seats=True)) before sl.shard"
        )
    return found


def present_places(params: Sharded, layers: Iterable[Layer]) -> dict[str, Places]:
    """Layer -> the places of its experts. Collective."""
    layers = list(layers)
    plan, mesh, paths = params.plan, params.mesh, {path: layer for layer in layers for path in layer.places.values()}
    held: dict[str, list[tuple[int, list[int]]]] = {}
    for path, extent, shard in _shards(params, paths):
        held.setdefault(path, []).append((extent.start, shard.tolist()))
    whole = {path: [-1] * layer.number for path, layer in paths.items()}
    for one in primitives.all_gather_object(mesh, list(plan.sizes), held):
        for path, runs in one.items():
            for start, values in runs:
                whole[path][start : start + len(values)] = values
    return {
        layer.name: _none(layer)._replace(**{what: whole[path] for what, path in layer.places.items()})
        for layer in layers
    }


def _none(layer: Layer) -> Places:
    """Every expert in its own row, without replicas."""
    return Places(list(range(layer.number)), [NONE] * layer.number)


def write_places(params: Sharded, places: Iterable[tuple[Layer, Places]]) -> None:
    """Write the new places of layers' experts to this rank's shards, in place."""
    values = {path: getattr(new, what) for layer, new in places for what, path in layer.places.items()}
    for path, extent, shard in _shards(params, values):
        shard.copy_(torch.tensor(values[path])[extent.start : extent.stop])


def _shards(params: Sharded, paths: Mapping[str, Any]) -> Iterable[tuple[str, range, torch.Tensor]]:
    """Path, extent and view of this rank's elements of the leaves at ``paths``."""
    for bucket in params.plan.buckets:
        if not paths.keys().isdisjoint(bucket.paths):
            extents = bucket.extents(params.mesh.coords, bucket.param_level)
            segments = bucket.leaf_segments(params.buffers[bucket.name], bucket.param_level)
            for path, extent, segment in zip(bucket.paths, extents, segments, strict=True):
                if path in paths:
                    yield path, extent, segment[: len(extent)]


def next_places(
    layers: Mapping[str, Layer], present: Mapping[str, Places], seats: Given, replicas: Given, counts: Given
) -> dict[str, Places]:
    """Layer -> the places that were asked for, or that balance ``counts``; with none of these, seats are the experts' own
    numbers, and there are no replicas.

    Raises:
        ValueError: counts and places are given; or seats that are no permutation, replicas that do not fit the spare slots,
            or counts of another number of experts.
        TreeError: layers that the parameters do not have.
    """
    if counts is not None and (seats is not None or replicas is not None):
        raise ValueError("relayout: give seats= and replicas=, or counts= to have them chosen, and not both")
    if counts is None and seats is None and replicas is None:
        return {name: _none(layer) for name, layer in layers.items()}
    given = {"seats": seats or {}, "replicas": replicas or {}, "counts": counts or {}}
    unknown = [name for some in given.values() for name in some if name not in layers]
    if unknown:
        raise TreeError(
            f"relayout: no layers with seats at {', '.join(map(repr, unknown))}; there are {', '.join(map(repr, layers))}"
        )
    asked = {what: {name: torch.as_tensor(one) for name, one in some.items()} for what, some in given.items()}
    wrong = [
        f"{name!r}: {what} {fault}"
        for what, some in asked.items()
        for name, one in some.items()
        for fault in [_fault(layers[name], what, one)]
        if fault
    ]
    if wrong:
        raise ValueError(f"relayout: these do not fit:\n{listing(wrong)}")
    chosen = {name: _balanced(layers[name], present[name], one) for name, one in asked.pop("counts").items()}
    for what, some in asked.items():
        for name, one in some.items():
            chosen[name] = chosen.get(name, present[name])._replace(**{what: one.tolist()})
    return chosen


def _fault(layer: Layer, what: str, given: torch.Tensor) -> str:
    """What is wrong with one of the arguments of `relayout` for a layer; "" if nothing is."""
    if given.shape != (layer.number,):
        return f"have shape {tuple(given.shape)}, and the layer has {layer.number} experts"
    values = given.tolist()
    if what == "seats" and sorted(values) != list(range(layer.number)):
        return f"{values} are no permutation of the numbers of its experts"
    copies = [value for value in values if value != NONE] if what == "replicas" else []
    slots = layer.ranks * layer.spare
    if len({*copies}) < len(copies) or not {*copies} <= {*range(slots)}:
        return (
            f"{values} need {'other slots' if slots else 'spare slots'}: {layer.ranks} ranks have {layer.spare} each "
            "(sl.experts(spare=), init_moe(replicas=True)), numbered through from 0, and a slot has one copy; −1 is none"
        )
    return ""


def _balanced(layer: Layer, present: Places, counts: torch.Tensor) -> Places:
    fitting = [slot if slot < layer.ranks * layer.spare else NONE for slot in present.replicas]
    chosen = balanced_replicas(counts, layer.ranks, layer.spare, *map(torch.tensor, (present.seats, fitting)))
    return Places(*(one.tolist() for one in chosen))
