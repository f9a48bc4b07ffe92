"""What ranks hold for themselves in tensors of an own optimizer, of further trees and of buffers: kept, or refused."""

import pytest
import torch
from helpers.saved import tensors

import shardlib as sl
from shardlib.errors import CheckpointError, RankFailure, TreeError

SHAPES = {"a": (3, 5), "b": (7,)}
STACKED = {
    "stacked": (lambda flat: flat.new_zeros(2, *flat.shape), torch.stack),
    "a list": (lambda flat: [torch.zeros_like(flat) for _ in range(2)], list),
    "stacks in a dict": (
        lambda flat: {"both": flat.new_zeros(1, 2, *flat.shape)},
        lambda both: {"both": torch.stack(list(both))[None]},
    ),
}


def moments(held):
    """The first and second moment of a bucket, however they are held."""
    return held["both"][0] if isinstance(held, dict) else held


def adam(kind):
    """A user's Adam without bias correction, which keeps both moments together."""
    make, join = STACKED[kind]

    def init(params, shards):
        return {"m": {name: make(flat) for name, flat in params.items()}}

    def update(updates, state, params=None, *, shards):
        m = {}
        for name, g in updates.items():
            first, second = moments(state["m"][name])
            m[name] = join((0.9 * first + g, 0.9 * second + g**2))
        steps = {name: -0.1 * moments(held)[0] / (moments(held)[1].sqrt() + 0.1) for name, held in m.items()}
        return steps, {"m": m}

    return sl.optim.GradientTransformation(init, update, sl.optim.Locality.ELEMENTWISE)


def targets(step):
    torch.manual_seed(step)
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in SHAPES.items()}


def start(mesh, stage, kind):
    params = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}

    def loss_fn(p, batch):
        return sum(((p[name] - batch[name]) ** 2).sum() for name in SHAPES)

    return sl.make_train_step(loss_fn, sl.shard(params, mesh, sl.zero(stage)), adam(kind))


def on_one_device(steps):
    held = {name: [torch.zeros(shape, dtype=torch.float64) for _ in range(3)] for name, shape in SHAPES.items()}
    for step in range(steps):
        for name, target in targets(step).items():
            w, first, second = held[name]
            g = 2 * (w - target)
            first, second = 0.9 * first + g, 0.9 * second + g**2
            held[name] = [w - 0.1 * first / (second.sqrt() + 0.1), first, second]
    return {name: w for name, (w, *_) in held.items()}


@pytest.mark.parametrize(("mesh", "stage"), [({"data": 2}, 1), ({"data": 3}, 3), ({"data": 1}, 0)])
@pytest.mark.parametrize("kind", STACKED)
def test_shards_that_are_kept_together_come_back(tmp_path, kind, mesh, stage):
    def first(mesh):
        state, step = start(mesh, 1, kind)
        for number in range(3):
            state, _ = step(state, targets(number))
        with sl.checkpoint.Manager(tmp_path) as manager:
            manager.save(state)

    def resumed(mesh):
        state, step = start(mesh, stage, kind)
        state = sl.checkpoint.restore(tmp_path, state)
        for number in range(3, 6):
            state, _ = step(state, targets(number))
        return sl.unshard(state.params)

    sl.simulate(first, mesh={"data": 2})
    for got in sl.simulate(resumed, mesh=mesh):
        for name, wanted in on_one_device(6).items():
            torch.testing.assert_close(got[name], wanted, rtol=1e-12, atol=1e-12)


def own(entries):
    """An optimizer whose state is what ``entries`` makes of the shards, and stays."""

    def init(params, shards):
        return entries(params)

    def update(updates, state, params=None, *, shards):
        return updates, state

    return sl.optim.GradientTransformation(init, update, sl.optim.Locality.ELEMENTWISE)


def plain(mesh, optimizer=None):
    axis, *others = mesh.shape
    params = sl.shard({"w": torch.zeros(6)}, mesh, sl.zero(1, axis=axis, replicate=others[0] if others else None))
    return sl.make_train_step(lambda p, x: (p["w"] * x).sum(), params, optimizer or sl.optim.sgd(0.1))[0]


KEPT = {
    "along the last dimension": lambda mesh, flat: torch.full((len(flat), 2), float(mesh.rank > 1)),
    "one value": lambda mesh, flat: torch.tensor(mesh.rank > 1),
    "of another dtype": lambda mesh, flat: torch.zeros(3, dtype=torch.int32 if mesh.rank > 1 else torch.float32),
    "of another shape": lambda mesh, flat: torch.zeros(3, 4) if mesh.rank > 1 else torch.zeros(4, 3),
}


@pytest.mark.parametrize("asynchronous", [None, False, True])
@pytest.mark.parametrize("kind", KEPT)
def test_an_optimizers_rank_local_tensors_are_refused(tmp_path, kind, asynchronous):
    def run(mesh):
        make = KEPT[kind]
        state = plain(mesh, own(lambda params: {"mine": [make(mesh, flat) for flat in params.values()]}))
        with pytest.raises(CheckpointError) as caught:
            if asynchronous is None:
                sl.checkpoint.save(tmp_path, state)
            else:
                sl.checkpoint.Manager(tmp_path, asynchronous=asynchronous).save(state)
        return str(caught.value)

    (message,) = set(sl.simulate(run, mesh={"data": 4}))
    line = "ranks 0, 1 and ranks 2, 3 hold different values under one name:\n  - opt/inner/mine/0\n"
    assert message.startswith(line) and "shards.sum" in message
    assert not list(tmp_path.iterdir())


def test_tensors_that_some_ranks_lack_are_refused(tmp_path):
    def run(mesh):
        state = plain(mesh, own(lambda params: {f"of {mesh.rank}": torch.ones(3), "all": torch.ones(2)}))
        with pytest.raises(CheckpointError) as caught:
            sl.checkpoint.save(tmp_path, state)
        return str(caught.value)

    (message,) = set(sl.simulate(run, mesh={"data": 2}))
    assert "  - opt/inner/of 0\n" in message and "  - opt/inner/of 1\n" in message and "all\n" not in message


def test_rank_local_tensors_beside_a_state_are_refused(tmp_path):
    def run(mesh):
        also = {"mine": torch.tensor(mesh.rank), "all": torch.ones(2)}
        with pytest.raises(CheckpointError) as caught:
            sl.checkpoint.save(tmp_path, plain(mesh), also=also)
        return str(caught.value)

    (message,) = set(sl.simulate(run, mesh={"data": 6}))
    assert message.startswith("rank 0 and rank 1 and rank 2 and rank 3 and others hold different values")
    assert "  - also/mine\n" in message and "also/all" not in message


def test_a_state_that_one_rank_cannot_save_stops_all(tmp_path):
    def run(mesh):
        also = {"it": 3 if mesh.rank else torch.zeros(2)}
        with pytest.raises(TreeError if mesh.rank else RankFailure, match="it: int"):
            sl.checkpoint.save(tmp_path, plain(mesh), also=also)

    sl.simulate(run, mesh={"data": 2})
    assert not list(tmp_path.iterdir())


def counted(mesh, scale):
    """Buffers as a step leaves them behind."""
    return {
        "seen": torch.tensor(scale * (mesh.rank + 1)),
        "rows": torch.full((2, 3), scale * (mesh.rank + 5)),
        "mean": torch.full((2,), 0.5 * scale),
        "batches": torch.tensor(7 * scale),
    }


def with_buffers(mesh, scale):
    state = plain(mesh)
    state.buffers = counted(mesh, scale)
    return state


def test_a_count_that_steps_keep_goes_on(tmp_path):
    """A rank's own rows, as a loss function counts them."""

    def run(mesh):
        def loss_fn(params, held, x):
            return (params["w"] * x).sum(), {"rows": held["rows"] + len(x)}

        params = sl.shard({"w": torch.zeros(6)}, mesh, sl.zero(1))
        held = {"rows": torch.tensor(0)}
        state, step = sl.make_train_step(loss_fn, params, sl.optim.sgd(0.1), buffers=held)
        fresh, again = sl.make_train_step(
            loss_fn, sl.shard({"w": torch.zeros(6)}, mesh, sl.zero(1)), sl.optim.sgd(0.1), buffers=held
        )
        state, _ = step(state, torch.ones(8 * (mesh.rank + 1), 6))
        sl.checkpoint.save(tmp_path, state)
        state, _ = again(sl.checkpoint.restore(tmp_path, fresh), torch.ones(8 * (mesh.rank + 1), 6))
        return int(state.buffers["rows"])

    assert sl.simulate(run, mesh={"data": 2}) == [16, 32]


@pytest.mark.parametrize("asynchronous", [None, True])
def test_rank_local_buffers_come_back_on_their_mesh(tmp_path, asynchronous):
    def run(mesh):
        state = with_buffers(mesh, 1)
        if asynchronous is None:
            sl.checkpoint.save(tmp_path, state)
        else:
            with sl.checkpoint.Manager(tmp_path) as manager:
                manager.save(state)
        state = sl.checkpoint.restore(tmp_path, with_buffers(mesh, 0))
        for name, wanted in counted(mesh, 1).items():
            assert torch.equal(state.buffers[name], wanted) and state.buffers[name].dtype == wanted.dtype, name

    sl.simulate(run, mesh={"data": 3})


@pytest.mark.parametrize("mesh", [{"data": 3}, {"data": 1}, {"node": 2, "data": 2}, {"other": 4}])
def test_rank_local_buffers_are_refused_on_another_mesh(tmp_path, mesh):
    sl.simulate(lambda mesh: sl.checkpoint.save(tmp_path, with_buffers(mesh, 1)), mesh={"data": 4})

    def run(mesh):
        state = with_buffers(mesh, 0)
        with pytest.raises(TreeError) as caught:
            sl.checkpoint.restore(tmp_path, state)
        state = sl.checkpoint.restore(tmp_path, state, partial=["buffers/seen", "buffers/rows"])
        assert state.buffers["seen"] == 0 and not state.buffers["rows"].any()
        assert state.buffers["batches"] == 7 and torch.equal(state.buffers["mean"], torch.full((2,), 0.5))
        return str(caught.value)

    (message,) = set(sl.simulate(run, mesh=mesh))
    assert "  - buffers/rows: each rank of data=4 saved its own, and this mesh is " in message
    assert "  - buffers/seen: each rank of data=4" in message and "rank_local" not in message


def test_equal_buffers_are_saved_once(tmp_path):
    sl.simulate(lambda mesh: sl.checkpoint.save(tmp_path, with_buffers(mesh, 1)), mesh={"data": 2})
    held = tensors(sl.checkpoint.latest(tmp_path))
    local = {f"rank_local_buffers/{rank} of 2/buffers/{name}" for rank in range(2) for name in ("rows", "seen")}
    assert {name for name in held if "buffers" in name} == {"buffers/batches", "buffers/mean", *local}
    assert held["rank_local_buffers/1 of 2/buffers/seen"] == 2
