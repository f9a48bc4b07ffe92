"""Numbers that are no tensors, in an optimizer's state and in buffers: saved, and restored with their types."""

import typing
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers.saved import tensors

import shardlib as sl
from shardlib.errors import CheckpointError, TreeError


class Averaged(typing.NamedTuple):
    count: int
    mu: typing.Any
    name: str = "averaged"


def adam_like(lr):
    """A user's optimizer that counts its steps in Python."""

    def init(params, shards):
        return Averaged(0, {name: torch.zeros_like(flat) for name, flat in params.items()})

    def update(updates, state, params=None, *, shards):
        count = state.count + 1
        mu = {name: 0.9 * state.mu[name] + 0.1 * g for name, g in updates.items()}
        return {name: -lr * held / (1 - 0.9**count) for name, held in mu.items()}, Averaged(count, mu)

    return sl.optim.GradientTransformation(init, update, sl.optim.Locality.ELEMENTWISE)


def counting(params, held, x):
    rows = held["seen"]["rows"] + 3
    return (x @ params["w"]).square().mean(), {"seen": {"rows": rows}, "mean": held["mean"] + 1}


def start(mesh, stage):
    params = sl.shard({"w": torch.ones(4, dtype=torch.float64)}, mesh, stage=stage)
    held = {"seen": {"rows": 0}, "mean": torch.zeros(2)}
    return sl.make_train_step(counting, params, adam_like(0.1), buffers=held)


def trained(state, step, until):
    while state.step < until:
        state, _ = step(state, torch.ones(2, 4, dtype=torch.float64))
    return state


def on_one_device(steps):
    w, mu = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for count in range(1, steps + 1):
        mu = 0.9 * mu + 0.1 * 2 * w.sum()
        w = w - 0.1 * mu / (1 - 0.9**count)
    return w


@pytest.mark.parametrize(("mesh", "stage"), [({"data": 2}, 1), ({"data": 3}, 3), ({"data": 1}, 0)])
def test_counts_go_on(tmp_path, mesh, stage):
    def first(mesh):
        with sl.checkpoint.Manager(tmp_path) as manager:
            manager.save(trained(*start(mesh, 1), 5))

    def resumed(mesh):
        state, step = start(mesh, stage)
        state = trained(sl.checkpoint.restore(tmp_path, state), step, 10)
        return state.opt.inner.count, state.opt.inner.name, state.buffers, sl.unshard(state.params)["w"]

    sl.simulate(first, mesh={"data": 2})
    held = tensors(sl.checkpoint.latest(tmp_path))
    assert held["opt/inner/count"].equal(torch.tensor(5)) and held["buffers/seen/rows"].equal(torch.tensor(15))
    for count, name, buffers, w in sl.simulate(resumed, mesh=mesh):
        assert (count, name, buffers["seen"]["rows"], buffers["mean"].tolist()) == (10, "averaged", 30, [10.0, 10.0])
        assert type(count) is int and type(buffers["seen"]["rows"]) is int
        torch.testing.assert_close(w, on_one_device(10), rtol=1e-12, atol=1e-12)


VALUES = {
    "int": (-(2**63), 0),
    "bool": (True, False),
    "float": (0.1, 0.0),
    "complex": (0.1 - 2j, 0j),
    "numpy int": (np.int16(-7), np.int16(0)),
    "numpy bool": (np.bool_(True), np.bool_(False)),
    "numpy float": (np.float32(0.1), np.float32(0)),
    "array": (np.arange(6, dtype=np.uint8).reshape(2, 3).T, np.zeros((3, 2), dtype=np.uint8)),
    "array of no dimension": (np.array(0.1), np.array(0.0)),
}


def holding(mesh, value):
    def init(params, shards):
        return {"it": [value], "w": dict(params)}

    def update(updates, state, params=None, *, shards):
        return updates, state

    tx = sl.optim.GradientTransformation(init, update, sl.optim.Locality.ELEMENTWISE)
    params = sl.shard({"w": torch.ones(4)}, mesh, stage=1)
    return sl.make_train_step(lambda p, x: (x * p["w"]).sum(), params, tx, buffers=None)[0]


@pytest.mark.parametrize("kind", VALUES)
def test_types_come_back(tmp_path, kind):
    value, fresh = VALUES[kind]

    def run(mesh):
        state = holding(mesh, value)
        state.buffers = {"it": value, "none": None}
        sl.checkpoint.save(tmp_path, state)
        state = holding(mesh, fresh)
        state.buffers = {"it": fresh, "none": None}
        state = sl.checkpoint.restore(tmp_path, state)
        for found in (state.opt.inner["it"][0], state.buffers["it"]):
            assert type(found) is type(value)
            assert np.array_equal(found, value) and np.asarray(found).dtype == np.asarray(value).dtype
        assert sl.checkpoint.bytes_to_read(tmp_path, state) > 0

    sl.simulate(run, mesh={"data": 2})


def test_ranks_own_numbers(tmp_path):
    """Of the optimizer they are refused; of buffers each rank gets its own."""

    def run(mesh):
        state = holding(mesh, 0)
        state.opt.inner["it"][0] = mesh.rank
        with pytest.raises(CheckpointError, match=r"rank 0 and rank 1 hold different values .*\n  - opt/inner/it/0\n"):
            sl.checkpoint.save(tmp_path, state)
        state = holding(mesh, 0)
        state.buffers = {"seen": 5 + mesh.rank}
        sl.checkpoint.save(tmp_path, state)
        state = holding(mesh, 0)
        state.buffers = {"seen": 0}
        return sl.checkpoint.restore(tmp_path, state).buffers["seen"]

    assert sl.simulate(run, mesh={"data": 2}) == [5, 6]


@pytest.mark.parametrize("value", [Fraction(1, 3), 2**63, sl.rng.Key(3), np.array(["a"])], ids=str)
def test_what_would_be_lost_is_refused(tmp_path, value):
    state = holding(sl.make_mesh(), value)
    state.buffers = {"it": value}
    with pytest.raises(TreeError, match=r"would lose these.*\n  - opt/inner/it/0: (Fraction|int|Key|ndarray)\n"):
        sl.checkpoint.save(tmp_path, state)
    state = holding(sl.make_mesh(), 1)
    state.buffers = {"it": value}
    with pytest.raises(TreeError, match=r"would lose these.*\n  - buffers/it: (Fraction|int|Key|ndarray)\n"):
        sl.checkpoint.save(tmp_path, state)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_without_a_number_is_refused(tmp_path):
    mesh = sl.make_mesh()
    sl.checkpoint.save(tmp_path, holding(mesh, None))
    with pytest.raises(TreeError, match="opt/inner/it/0: not in the checkpoint"):
        sl.checkpoint.restore(tmp_path, holding(mesh, 7))
    state = sl.checkpoint.restore(tmp_path, holding(mesh, 7), partial=["opt/inner/it/0"])
    assert state.opt.inner["it"] == [7]


def test_an_imported_count_goes_on(tmp_path):
    """From torch's checkpoints the number of steps becomes a counter that is a Python number."""
    import torch.distributed.checkpoint as dcp

    held = {"exp_avg": torch.arange(4.0), "step": torch.tensor(7.0)}
    dcp.save({"model": {"w": torch.ones(4)}, "optim": {"state": {"w": held}}}, checkpoint_id=tmp_path, no_dist=True)
    params = sl.shard({"w": torch.zeros(4)}, sl.make_mesh(), stage=1)
    state, _ = sl.make_train_step(lambda p, x: (x * p["w"]).sum(), params, adam_like(0.1))
    state = sl.checkpoint.import_dcp(tmp_path, state, prefix="model.")
    assert state.opt.inner.count == 7 and type(state.opt.inner.count) is int
    assert torch.equal(next(iter(state.opt.inner.mu.values())), torch.arange(4.0))
