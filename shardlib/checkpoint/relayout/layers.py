"""Layers of experts with seats, as a plan has them, and the present and next seats of their experts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.collectives import primitives
from shardlib.errors import TreeError, listing
from shardlib.nn.moe.seats import balanced_seats
from shardlib.plan.plan import Plan
from shardlib.sharded.tree import Sharded

_SEATS, _EXPERTS = "router/seats", "experts/"


@dataclass(frozen=True)
class Layer:
    """A layer of experts that have seats.

    Attributes:
        name: the path of the layer's parameters; "" for the whole tree.
        experts: paths of the leaves with the experts along dimension 0.
        number: of experts.
        ranks: over which they are dealt out.
    """

    name: str
    experts: tuple[str, ...]
    number: int
    ranks: int

    @property
    def seats(self) -> str:
        """The path of the layer's seats."""
        return f"{self.name}/{_SEATS}".lstrip("/")


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
        beneath = f"{name}/{_EXPERTS}".lstrip("/")
        leaves = [placement.compute for other, placement in placements.items() if other.startswith(beneath)]
        (number,) = placements[path].compute.shape
        failures += [
            f"{leaf.path}: shape {leaf.shape}, and {number} seats" for leaf in leaves if leaf.shape[:1] != (number,)
        ]
        ways = {math.prod(plan.sizes[axis] for axis in (*leaf.spec.entries, ())[0]) for leaf in leaves}
        found[name] = Layer(name, tuple(leaf.path for leaf in leaves), number, max(ways, default=1))
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


def present_seats(params: Sharded, layers: Iterable[Layer]) -> dict[str, list[int]]:
    """Layer -> its seats, whole. Collective."""
    plan, mesh, paths = params.plan, params.mesh, {layer.seats: layer for layer in layers}
    held: dict[str, list[tuple[int, list[int]]]] = {}
    for path, extent, shard in _shards(params, paths):
        held.setdefault(path, []).append((extent.start, shard.tolist()))
    whole = {path: [-1] * layer.number for path, layer in paths.items()}
    for one in primitives.all_gather_object(mesh, list(plan.sizes), held):
        for path, runs in one.items():
            for start, values in runs:
                whole[path][start : start + len(values)] = values
    return {layer.name: whole[path] for path, layer in paths.items()}


def write_seats(params: Sharded, seats: Mapping[str, Sequence[int]]) -> None:
    """Write new seats, by the paths of their leaves, to this rank's shards, in place."""
    for path, extent, shard in _shards(params, seats):
        shard.copy_(torch.tensor(seats[path])[extent.start : extent.stop])


def _shards(params: Sharded, paths: Mapping[str, Any]) -> Iterable[tuple[str, range, torch.Tensor]]:
    """Path, extent and view of this rank's elements of the leaves at ``paths``."""
    for bucket in params.plan.buckets:
        if not paths.keys().isdisjoint(bucket.paths):
            extents = bucket.extents(params.mesh.coords, bucket.param_level)
            segments = bucket.leaf_segments(params.buffers[bucket.name], bucket.param_level)
            for path, extent, segment in zip(bucket.paths, extents, segments, strict=True):
                if path in paths:
                    yield path, extent, segment[: len(extent)]


def next_seats(
    layers: Mapping[str, Layer],
    present: Mapping[str, Sequence[int]],
    seats: Mapping[str, Any] | None,
    counts: Mapping[str, Any] | None,
) -> dict[str, list[int]]:
    """Layer -> the seats that were asked for, or that balance ``counts``; with neither, expert e's seat is e.

    Raises:
        ValueError: both are given; or seats that are no permutation, or counts of another number of experts.
        TreeError: layers that the parameters do not have.
    """
    if seats is not None and counts is not None:
        raise ValueError("relayout: give seats=, or counts= to have them chosen, and not both")
    given = seats if seats is not None else counts
    if given is None:
        return {name: list(range(layer.number)) for name, layer in layers.items()}
    unknown = [name for name in given if name not in layers]
    if unknown:
        raise TreeError(
            f"relayout: no layers with seats at {', '.join(map(repr, unknown))}; there are {', '.join(map(repr, layers))}"
        )
    asked = {name: torch.as_tensor(one) for name, one in given.items()}
    wrong = [
        f"{name!r}: shape {tuple(one.shape)}, and the layer has {layers[name].number} experts"
        for name, one in asked.items()
        if one.shape != (layers[name].number,)
    ]
    if seats is not None:
        wrong += [
            f"{name!r}: {one.tolist()} is no permutation of the numbers of its experts"
            for name, one in asked.items()
            if sorted(one.tolist()) != list(range(layers[name].number))
        ]
    if wrong:
        raise ValueError(f"relayout: {'seats' if seats is not None else 'counts'} that do not fit:\n{listing(wrong)}")
    if seats is not None:
        return {name: one.tolist() for name, one in asked.items()}
    return {
        name: balanced_seats(one, layers[name].ranks, torch.tensor(present[name])).tolist()
        for name, one in asked.items()
    }
