"""States that were moved come back whole or not at all: nothing is left behind, mixed or written over unnoticed."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from helpers.models import mlp, regression_batch
from helpers.offloaded import stepped
from helpers.trees import assert_same

import shardlib as sl
from shardlib.errors import StorageError, TreeError
from shardlib.optim.moved import View
from shardlib.tree import tree_map

LOSS, PARAMS = mlp([5, 7, 3], torch.float32)
BATCHES = [regression_batch(12, 5, 3, torch.float32, seed=seed) for seed in range(4)]


def start(mesh, *transforms):
    return sl.make_train_step(LOSS, sl.shard(PARAMS, mesh, sl.chain(*transforms)), sl.optim.adamw(0.1))


@pytest.mark.parametrize("way", ["disk", "host", "host and disk", "another process"])
def test_states_on_disk_go_along(tmp_path, way):
    """Masters and moments that are in files of their own are part of what is moved, and of what comes back."""

    def run(mesh, *offload):
        state, step = start(mesh, sl.zero(1), sl.precision("bf16"), *offload)
        state = stepped(state, step, BATCHES[:2])
        if offload and way == "another process":
            sl.to_disk(state, tmp_path / "parked")
            state, step = start(mesh, sl.zero(1), sl.precision("bf16"), sl.offload("disk", folder=tmp_path / "other"))
            state = sl.to_device(tmp_path / "parked", like=state)
        elif offload:
            moved = state if way == "disk" else sl.to_host(state)
            state = sl.to_device(moved if way == "host" else sl.to_disk(moved, tmp_path / "parked"))
        return sl.unshard(stepped(state, step, BATCHES[2:]).params)

    disk = sl.offload("disk", folder=tmp_path / "states")
    wanted = sl.simulate(run, mesh={"data": 2})
    assert_same(sl.simulate(run, disk, mesh={"data": 2}), wanted)


def test_a_device_without_room_leaves_the_state_where_it_is(tmp_path, monkeypatch):
    home, calls = View.home, []

    def full(self):
        calls.append(self)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("out of memory")
        return home(self)

    tree = {"x": torch.ones(4), "y": torch.ones(4)}
    on_host, parked = sl.to_host(tree), sl.to_disk(tree, tmp_path)
    views = on_host.skeleton.views
    on_host.skeleton.views = {name: replace(view, device=torch.device("meta")) for name, view in views.items()}
    monkeypatch.setattr(View, "home", full)
    for moved in (on_host, parked):
        calls.clear()
        with pytest.raises(torch.OutOfMemoryError):
            sl.to_device(moved)
        back = sl.to_device(moved)
        assert sorted(back) == ["x", "y"] and all(leaf.shape == (4,) for leaf in back.values())


def test_a_state_that_nobody_has_brought_back_is_not_written_over(tmp_path):
    first = sl.to_disk({"x": torch.ones(4)}, tmp_path)
    other = {"x": torch.full((4,), 2.0)}
    with pytest.raises(StorageError, match=f"{tmp_path} holds this tree, which no run has taken up .* Bring it back"):
        sl.to_disk(other, tmp_path)
    assert sl.to_device(first)["x"].tolist() == [1.0] * 4
    assert sl.to_device(sl.to_disk(other, tmp_path))["x"].tolist() == [2.0] * 4


def test_a_state_that_was_replaced_is_missed(tmp_path):
    """Another run has taken it up, and moved the next one there."""
    first = sl.to_disk({"x": torch.ones(4)}, tmp_path)
    assert sl.to_device(tmp_path, like={"x": torch.zeros(4)})["x"].tolist() == [1.0] * 4
    second = sl.to_disk({"x": torch.full((4,), 2.0)}, tmp_path)
    with pytest.raises(
        StorageError, match=r"no longer holds this tree: this tree was moved there since. Give each its"
    ):
        sl.to_device(first)
    assert sl.to_device(second)["x"].tolist() == [2.0] * 4


def test_a_tree_says_what_each_rank_holds(tmp_path):
    def run(mesh):
        with pytest.raises(TreeError, match="no sharded part that says which of 2 ranks holds what"):
            sl.to_disk({"x": torch.full((4,), float(mesh.rank))}, tmp_path / "plain")
        whole = sl.shard({"w": torch.arange(12.0)}, mesh, stage=3)
        (buffer,) = whole.buffers.values()
        held, tree = buffer.clone(), {"params": whole, "rank": torch.tensor(mesh.rank), "view": [buffer[:2]]}
        back = sl.to_device(sl.to_disk(tree, tmp_path / "sharded"))
        (buffer,) = back["params"].buffers.values()
        assert back["rank"] == mesh.rank and torch.equal(buffer, held)
        assert back["view"][0].data_ptr() == buffer.data_ptr()  # one storage, as before
        return sl.unshard(back["params"])["w"].tolist()

    assert sl.simulate(run, mesh={"data": 2}) == [list(map(float, range(12)))] * 2


@pytest.mark.parametrize("other", ["shape", "dtype", "axis"])
def test_a_state_of_another_form_with_as_many_bytes_is_refused(tmp_path, other):
    def run(mesh, shape, dtype, stage, back):
        state = sl.shard({"w": torch.ones(shape, dtype=dtype)}, mesh, stage=stage)
        if not back:
            sl.to_disk(state, tmp_path)
            return None
        with pytest.raises(StorageError, match=r"with other shapes, dtypes or shards than like=|differ:"):
            sl.to_device(tmp_path, like=state)
        return None

    sl.simulate(run, (4, 2), torch.float16, 3, False, mesh={"data": 2, "model": 1})
    given = {
        "shape": ((2, 4), torch.float16, {"data": 2, "model": 1}),
        "dtype": ((4, 2), torch.bfloat16, {"data": 2, "model": 1}),
        "axis": ((4, 2), torch.float16, {"model": 1, "data": 2}),
    }[other]
    sl.simulate(run, given[0], given[1], 3, True, mesh=given[2])


class Counted(NamedTuple):
    """The state of an optimizer with numbers of Python's and NumPy's."""

    count: int
    last: dict


def _counting():
    def init(params, shards):
        return Counted(0, {"rate": 1.0, "seen": np.zeros(2, np.int64), "on": False, "share": np.float32(0)})

    def update(updates, state, params, *, shards):
        count, rate = state.count + 1, state.last["rate"] / 3
        last = {"rate": rate, "seen": state.last["seen"] + 1, "on": True, "share": np.float32(rate)}
        return tree_map(lambda grad: -rate * grad, updates), Counted(count, last)

    return sl.optim.GradientTransformation(init, update, sl.optim.Locality.ELEMENTWISE)


def test_numbers_are_there_in_another_process(tmp_path):
    def made():
        buffers = {"steps": 0, "mean": torch.zeros(1)}
        loss_fn = lambda p, b, x: ((p["w"] * x).sum(), {"steps": b["steps"] + 1, "mean": b["mean"]})  # noqa: E731
        return sl.make_train_step(loss_fn, {"w": torch.ones(2)}, _counting(), buffers=buffers)

    state, step = made()
    for _ in range(3):
        state, _ = step(state, torch.ones(2))
    held, steps = state.opt.inner, state.buffers["steps"]
    sl.to_disk(state, tmp_path)
    found = sl.to_device(tmp_path, like=made()[0])
    assert found.buffers["steps"] == steps == 3
    assert repr(found.opt.inner) == repr(held) and held.count == 3
    with pytest.raises(TreeError, match="no place for these:\n  - x: complex"):
        sl.to_disk({"x": 1j, "y": torch.ones(2)}, tmp_path / "other")
