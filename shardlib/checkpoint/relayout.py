"""`relayout`, which moves experts between ranks with all that a train state has of them, and the bytes that it sends.

Here are layers with seats, and the present and next places of their experts; `reshard` moves the rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardlib.checkpoint.agreement import gathered
from shardlib.checkpoint.reshard import ExpertTensors, RowsOnRanks, move_rows, moves_of, sent_bytes
from shardlib.checkpoint.trees import trees_of
from shardlib.collectives import primitives
from shardlib.errors import TreeError, listing
from shardlib.nn.moe.placement import NONE, balanced_replicas
from shardlib.optim.train_state import TrainState, copied
from shardlib.plan.plan import Plan
from shardlib.sharded.tree import Sharded
from shardlib.tree import T

_SEATS, _REPLICAS, _EXPERTS = "router/seats", "router/replicas", "experts/"

Given = Mapping[str, Any] | None  # layer -> a number for each expert


def relayout(
    state: TrainState[T],
    seats: Given = None,
    *,
    replicas: Given = None,
    counts: Given = None,
    also: Mapping[str, Any] | None = None,
    donate: bool = True,
) -> TrainState[T]:
    """Move experts between the ranks over which `experts` deals them out, and give hot ones second copies, so that ranks have
    equal loads. Collective.

    A layer whose experts may move has *seats*, ``params["router"]["seats"]``: the row of its experts' leaves in which each
    expert lies (``init_moe(seats=True)``). Rows move with all that the state has of them: parameters, masters, the
    optimizer's state, waiting gradients and residuals. The router's order, and so counts and losses, are the experts' own:
    the state that is returned is the same function of a batch, the plan is the same, and the train step goes on::

        state = sl.relayout(state, counts={"blocks/1/moe": counts})  # by the counts of the last steps

    Outputs, losses and gradients are the same to the bit, as an expert's rows are computed in the same order wherever it is.
    Rounded otherwise may be a gradient's norm, which is added up in the order of the memory, and what a transport sums over
    more than two ranks in an order that depends on an element's place. PowerSGD's factors, which do not belong to one expert,
    stay.

    A layer with *replicas*, ``params["router"]["replicas"]`` (``init_moe(replicas=True)``), computes experts that have one in
    two places, if the plan has spare slots (``sl.experts(spare=1)``): the replica has the rows that come from one half of the
    ranks. That moves nothing here; a layer fetches the weights where it begins. Outputs and gradients are the same to the bit
    again, since with spare slots all experts compute either half of the ranks' rows by themselves.

    `unshard` and checkpoints have experts in the order of their seats, and the seats: on any mesh that is the same function.
    ``relayout(state)`` brings all experts to their own rows, without replicas, for programs that know no seats.

    Args:
        seats: layer -> the seat of each expert, a permutation; layers that are not named stay. A layer is the path of the
            parameters of `shardlib.nn.moe`, "" for the whole tree.
        replicas: layer -> the spare slot of each expert's second copy, −1 for none. Slots are numbered through, rank by rank.
        counts: layer -> assignments of each expert, from which seats are chosen, and replicas where there are spare slots
            (`shardlib.nn.routers.balanced_replicas`). All ranks must give the same: metrics are, or sum them.
        also: name -> further tree in the optimizer's layout, such as the state of `shardlib.optim.ema`, whose rows are moved
            too, in place.
        donate: whether the new state takes over the memory of ``state``, which may then not be used again.

    Raises:
        TreeError: parameters without seats; layers that they do not have.
        ValueError: seats that are no permutations, replicas that do not fit the spare slots, counts of other numbers of
            experts, or counts together with one of the others.
        RankMismatch: ranks were given different seats, replicas or counts.
        IllegalComposition: states on disk, in few bits, or of whole parameters (Adafactor's factors) cannot be moved.

    >>> params = {
    ...     "router": {"weight": torch.ones(2, 4), "seats": torch.arange(2)},
    ...     "experts": {"up": torch.tensor([[[0.0] * 4], [[1.0] * 4]]), "down": torch.ones(2, 4, 1)},
    ... }
    >>> state, train_step = sl.make_train_step(lambda params, x: params["experts"]["up"].sum(), params, sl.optim.sgd(0.1))
    >>> state = sl.relayout(state, {"": [1, 0]})
    >>> sl.unshard(state.params)["experts"]["up"].flatten().tolist()
    [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """
    settled = state.settled()
    changes = _changes(settled, seats, replicas, counts)
    tensors = _tensors(settled, changes, also)  # what cannot be moved is refused before anything changes
    params, opt, comm, buffers = settled.params, settled.opt, settled.comm, settled.buffers
    if not donate:
        params = Sharded(params.plan, params.mesh, "param", copied(params.buffers))
        opt, comm, buffers = copied(opt), copied(comm), copied(buffers)
    after = TrainState(settled.step, params.next(), opt, comm, buffers, settled.scale, settled.rng)
    if donate:
        state.take("relayout", "the state that it returned, or pass donate=False to keep this one")
    else:
        tensors = _tensors(after, changes, also)
    for change in changes:
        move_rows(after.params.mesh, tensors[change.layer.name], change.came_from)
    _write_places(after.params, [(change.layer, change.after) for change in changes])
    return after.fitting()


def relayout_payload(
    state: TrainState,
    seats: Given = None,
    *,
    replicas: Given = None,
    counts: Given = None,
    also: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    """Axis -> bytes that this rank sends in a `shardlib.relayout` with the same arguments. Moves nothing; collective.

    Rows go along one axis after the other, so what goes to another rank along two axes is sent by two ranks. Replicas move
    nothing; what their weights cost in a step is in the plan.

    >>> params = {"router": {"weight": torch.ones(2, 4), "seats": torch.arange(2)}, "experts": {"up": torch.ones(2, 3, 4)}}
    >>> def payload(mesh):
    ...     sharded = sl.shard(params, mesh, sl.experts())
    ...     state, _ = sl.make_train_step(lambda params, x: params["experts"]["up"].sum(), sharded, sl.optim.sgd(0.1))
    ...     return sl.checkpoint.relayout_payload(state, {"": [1, 0]})
    >>> sl.simulate(payload, mesh=dict(expert=2))  # 12 elements of 4 bytes
    [{'expert': 48}, {'expert': 48}]
    """
    state = state.settled()
    changes = _changes(state, seats, replicas, counts)
    tensors, mesh = _tensors(state, changes, also), state.params.mesh
    total = Counter(dict.fromkeys(mesh.shape, 0))
    for change in changes:
        total.update(sent_bytes(mesh, moves_of(tensors[change.layer.name], change.came_from)))
    return dict(total)


class LayerChange(NamedTuple):
    """A layer whose experts change their places."""

    layer: SeatedLayer
    before: ExpertPlaces
    after: ExpertPlaces

    @property
    def came_from(self) -> list[int]:
        """The row that each row's expert had before."""
        rows = [-1] * self.layer.number
        for before, after in zip(self.before.seats, self.after.seats, strict=True):
            rows[after] = before
        return rows


def _changes(state: TrainState, seats: Given, replicas: Given, counts: Given) -> list[LayerChange]:
    """The layers whose experts change their places, in the same order on all ranks."""
    layers, mesh = _layers_of(state.params.plan), state.params.mesh
    present = _present_places(state.params, layers.values())
    wanted = _next_places(layers, present, seats, replicas, counts)
    texts = {name: f"seats {list(one.seats)}, replicas {list(one.replicas)}" for name, one in wanted.items()}
    primitives.require_equal(mesh, "seats", texts, "Give relayout the same on every rank.")
    return [
        LayerChange(layer, present[name], wanted[name])
        for name, layer in layers.items()
        if name in wanted and wanted[name] != present[name]
    ]


def _tensors(
    state: TrainState, changes: Sequence[LayerChange], also: Mapping[str, Any] | None
) -> dict[str, list[RowsOnRanks]]:
    """Layer -> the tensors whose rows move."""
    moved = [change for change in changes if change.before.seats != change.after.seats]
    paths = {path: change.layer.name for change in moved for path in change.layer.experts}
    found: dict[str, list[RowsOnRanks]] = {change.layer.name: [] for change in changes}
    for path, held in ExpertTensors(trees_of(state, also), paths).by_leaf():
        found[paths[path]].append(held)
    return found


class ExpertPlaces(NamedTuple):
    """The places of a layer's experts.

    Attributes:
        seats: of each expert.
        replicas: the spare slot of each expert's second copy, −1 for none.
    """

    seats: Sequence[int]
    replicas: Sequence[int]


@dataclass(frozen=True)
class SeatedLayer:
    """A layer of experts that have seats.

    Attributes:
        name: the path of the layer's parameters; "" for the whole tree.
        experts: paths of the leaves with the experts along dimension 0.
        places: fields of `ExpertPlaces` -> paths of the leaves that have them: of "seats", and of "replicas" if any.
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


def _layers_of(plan: Plan) -> dict[str, SeatedLayer]:
    """Name -> layer with seats. Raises `TreeError` if there is none, or leaves with other numbers of experts than seats."""
    placements = plan.everywhere.placement_of
    found, failures = {}, list[str]()
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
        found[name] = SeatedLayer(name, tuple(leaf.path for leaf in leaves), places, number, ranks, spare)
    if failures or not found:
        sizes = f"these leaves have other sizes:\n{listing(failures)}\n"
        raise TreeError(
            f"relayout moves the experts of layers that have seats, and {sizes if failures else 'none has. '}Give each layer "
            'params["router"]["seats"] = torch.arange(experts) (init_moe(seats=True)) before sl.shard'
        )
    return found


def _present_places(params: Sharded, layers: Iterable[SeatedLayer]) -> dict[str, ExpertPlaces]:
    """Layer -> the places of its experts. Collective."""
    layers = list(layers)
    paths = {path: layer for layer in layers for path in layer.places.values()}
    held: dict[str, list[tuple[int, list[int]]]] = {}
    for path, extent, shard in _shards(params, paths):
        held.setdefault(path, []).append((extent.start, shard.tolist()))
    whole = {path: [-1] * layer.number for path, layer in paths.items()}
    for one in gathered(params.mesh, held):
        for path, runs in one.items():
            for start, values in runs:
                whole[path][start : start + len(values)] = values
    return {
        layer.name: _none(layer)._replace(**{what: whole[path] for what, path in layer.places.items()})
        for layer in layers
    }


def _none(layer: SeatedLayer) -> ExpertPlaces:
    """Every expert in its own row, without replicas."""
    return ExpertPlaces(list(range(layer.number)), [NONE] * layer.number)


def _write_places(params: Sharded, places: Iterable[tuple[SeatedLayer, ExpertPlaces]]) -> None:
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


def _next_places(
    layers: Mapping[str, SeatedLayer],
    present: Mapping[str, ExpertPlaces],
    seats: Given,
    replicas: Given,
    counts: Given,
) -> dict[str, ExpertPlaces]:
    """Layer -> the places that were asked for, or that balance ``counts``; with none of these, seats are the experts' own
    numbers, and there are no replicas. Errors as of `relayout`."""
    if counts is not None and (seats is not None or replicas is not None):
        raise ValueError("relayout: give seats= and replicas=, or counts= to have them chosen, and not both")
    if counts is None and seats is None and replicas is None:
        return {name: _none(layer) for name, layer in layers.items()}
    given = {"seats": seats or {}, "replicas": replicas or {}, "counts": counts or {}}
    unknown = [name for some in given.values() for name in some if name not in layers]
    if unknown:
        there = ", ".join(map(repr, layers))
        raise TreeError(f"relayout: no layers with seats at {', '.join(map(repr, unknown))}; there are {there}")
    asked = {what: {name: torch.as_tensor(one) for name, one in some.items()} for what, some in given.items()}
    every = [(name, what, one) for what, some in asked.items() for name, one in some.items()]
    if wrong := [
        f"{name!r}: {what} {fault}" for name, what, one in every if (fault := _fault(layers[name], what, one))
    ]:
        raise ValueError(f"relayout: these do not fit:\n{listing(wrong)}")
    chosen = {name: _balanced(layers[name], present[name], one) for name, one in asked.pop("counts").items()}
    for what, some in asked.items():
        for name, one in some.items():
            chosen[name] = chosen.get(name, present[name])._replace(**{what: one.tolist()})
    return chosen


def _fault(layer: SeatedLayer, what: str, given: torch.Tensor) -> str:
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
            f"{values} need {'other slots' if slots else 'spare slots'}: {layer.ranks} ranks have {layer.spare} each, "
            "numbered from 0, and a slot has one copy (−1: none); see sl.experts(spare=), init_moe(replicas=True)"
        )
    return ""


def _balanced(layer: SeatedLayer, present: ExpertPlaces, counts: torch.Tensor) -> ExpertPlaces:
    fitting = [slot if slot < layer.ranks * layer.spare else NONE for slot in present.replicas]
    chosen = balanced_replicas(counts, layer.ranks, layer.spare, *map(torch.tensor, (present.seats, fitting)))
    return ExpertPlaces(*(one.tolist() for one in chosen))
