"""`relayout`, which moves experts between ranks, and the bytes that it sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardlib.checkpoint.packed import outlined
from shardlib.checkpoint.relayout.journey import MovingRows, move_rows, parcels, sent_bytes
from shardlib.checkpoint.relayout.layers import (
    Given,
    Layer,
    Places,
    layers_of,
    next_places,
    present_places,
    write_places,
)
from shardlib.checkpoint.relayout.tensors import Tensors
from shardlib.collectives import primitives
from shardlib.optim.train_state import OptimizerState, TrainState, copied
from shardlib.sharded.tree import Sharded


class LayerChange(NamedTuple):
    """A layer whose experts change their places."""

    layer: Layer
    before: Places
    after: Places

    @property
    def came_from(self) -> list[int]:
        """The row that each row's expert had before."""
        rows = [-1] * self.layer.number
        for before, after in zip(self.before.seats, self.after.seats, strict=True):
            rows[after] = before
        return rows


def relayout(
    state: TrainState,
    seats: Given = None,
    *,
    replicas: Given = None,
    counts: Given = None,
    also: Mapping[str, Any] | None = None,
    donate: bool = True,
) -> TrainState:
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
    if not donate:
        settled = _copy(settled)
        tensors = _tensors(settled, changes, also)
    params, mesh = settled.params.next(), settled.params.mesh
    after = _with(settled, params, settled.opt, settled.comm, settled.buffers)
    if donate:
        state.take("relayout", "the state that it returned, or pass donate=False to keep this one")
    for change in changes:
        move_rows(mesh, tensors[change.layer.name], change.came_from)
    write_places(params, [(change.layer, change.after) for change in changes])
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
    tensors, mesh, total = (
        _tensors(state, changes, also),
        state.params.mesh,
        Counter(dict.fromkeys(state.params.mesh.shape, 0)),
    )
    for change in changes:
        total.update(sent_bytes(mesh, parcels(tensors[change.layer.name], change.came_from)))
    return dict(total)


def _changes(state: TrainState, seats: Given, replicas: Given, counts: Given) -> list[LayerChange]:
    """The layers whose experts change their places, in the same order on all ranks."""
    layers, mesh = layers_of(state.params.plan), state.params.mesh
    present = present_places(state.params, layers.values())
    wanted = next_places(layers, present, seats, replicas, counts)
    texts = {name: f"seats {list(one.seats)}, replicas {list(one.replicas)}" for name, one in wanted.items()}
    primitives.require_equal(mesh, "seats", texts, "Give relayout the same on every rank.")
    return [
        LayerChange(layer, present[name], wanted[name])
        for name, layer in layers.items()
        if name in wanted and wanted[name] != present[name]
    ]


def _tensors(
    state: TrainState, changes: Sequence[LayerChange], also: Mapping[str, Any] | None
) -> dict[str, list[MovingRows]]:
    """Layer -> the tensors whose rows move."""
    moved = [change for change in changes if change.before.seats != change.after.seats]
    paths = {path: change.layer.name for change in moved for path in change.layer.experts}
    found: dict[str, list[MovingRows]] = {change.layer.name: [] for change in changes}
    for path, held in Tensors(outlined(state, also), paths).by_leaf():
        found[paths[path]].append(held)
    return found


def _copy(state: TrainState) -> TrainState:
    """The state with memory of its own."""
    params = Sharded(state.params.plan, state.params.mesh, "param", copied(state.params.buffers))
    return _with(state, params, copied(state.opt), copied(state.comm), copied(state.buffers))


def _with(state: TrainState, params: Sharded, opt: OptimizerState, comm: Any, buffers: Any) -> TrainState:
    return TrainState(state.step, params, opt, comm, buffers, state.scale, state.rng)
