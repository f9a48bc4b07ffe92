"""copy.deepcopy of states and sharded trees: memory of its own, on the same mesh, to go on from. Pickles are refused."""

import copy
import io
import pickle

import cloudpickle
import pytest
import torch
from helpers.models import mlp, regression_batch, share
from helpers.trees import assert_same

import shardlib as sl
from shardlib.errors import DonatedStateError, MeshError, RankFailure, TreeError

FIT, PARAMS = mlp([6, 9, 4])
BATCHES = [regression_batch(8, 6, 4, seed=seed) for seed in range(4)]
PLANS = {
    "zero0": sl.zero(0),
    "zero1": sl.zero(1),
    "zero2": sl.zero(2),
    "zero3": sl.zero(3),
    "bf16": sl.chain(sl.zero(2), sl.precision("bf16")),
    "fp16": sl.chain(sl.zero(1), sl.precision("fp16")),
    "host": sl.chain(sl.zero(3), sl.offload("host")),
    "delayed": sl.chain(sl.zero(1), sl.offload("host", delay=True)),
    "onebit": sl.chain(sl.zero(1), sl.onebit()),
}


def values(state):
    """Copies of all of a state's tensors on this rank."""
    return [leaf.clone() for leaf in torch.utils._pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]


def goes_on(mesh, transform):
    """The copy stays as it was while the state is stepped, goes where the state went, and leaves the state alone."""
    mine = [share(batch, mesh.coords["data"], mesh.shape["data"]) for batch in BATCHES]
    state, step = sl.make_train_step(FIT, sl.shard(PARAMS, mesh, transform), sl.optim.adamw(0.05))
    state, _ = step(state, mine[0])
    best, before = copy.deepcopy(state), values(state)
    assert best.params.mesh is state.params.mesh and best.params.plan is state.params.plan and best.step == 1
    assert_same(values(best), before)
    for batch in mine[1:]:
        state, metrics = step(state, batch)
    after, loss = values(state), metrics["loss"]
    assert_same(values(best), before)
    for batch in mine[1:]:
        best, metrics = step(best, batch)
    assert metrics["loss"] == loss
    assert_same(values(best), after)
    assert_same(values(state), after)
    return sl.unshard(best.params)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", PLANS)
def test_a_copy_goes_on_by_itself(name, ranks):
    sl.simulate(goes_on, PLANS[name], mesh={"data": ranks})


def test_a_copy_on_a_mesh_of_one():
    goes_on(sl.make_mesh(), sl.zero(3))


def test_a_copy_in_real_processes(pool):
    wanted = sl.simulate(goes_on, sl.zero(3), mesh={"data": 2})
    assert_same(pool.run(goes_on, sl.zero(3), mesh={"data": 2}), wanted)


def test_a_copy_of_parameters():
    def run(mesh):
        params = sl.shard(PARAMS, mesh, stage=3)
        doubled = torch.utils._pytree.tree_map(lambda leaf: 2 * leaf, params)  # a tree that has no buffers yet
        kept = copy.deepcopy({"params": params, "again": params, "doubled": doubled})
        assert kept["params"] is kept["again"] and copy.copy(params).shares(params)
        with torch.no_grad():
            for tree in (params, doubled):
                for buffer in tree.buffers.values():
                    buffer.zero_()
        return sl.unshard(kept["params"]), sl.unshard(kept["doubled"])

    for params, doubled in sl.simulate(run, mesh={"data": 2}):
        assert_same(params, PARAMS)
        assert_same(doubled, torch.utils._pytree.tree_map(lambda leaf: 2 * leaf, PARAMS))


def test_a_copy_follows_parameters_that_were_written_to():
    """Masters of a copy fit its parameters, as those of the state do at its next step."""

    def run(mesh):
        state, step = sl.make_train_step(FIT, sl.shard(PARAMS, mesh, PLANS["bf16"]), sl.optim.sgd(0.0))
        with torch.no_grad():
            for buffer in state.params.buffers.values():
                buffer.fill_(3.0)
        made, _ = step(copy.deepcopy(state), BATCHES[0])
        assert all((master == 3).all() for master in made.opt.masters.values())
        assert all((buffer == 3).all() for buffer in made.params.buffers.values())

    sl.simulate(run, mesh={"data": 2})


def test_states_that_cannot_be_copied(tmp_path):
    def run(mesh):
        state, step = sl.make_train_step(FIT, sl.shard(PARAMS, mesh, stage=1), sl.optim.sgd(0.1))
        shallow = copy.copy(state)
        step(state, BATCHES[0])
        for used in (state, shallow):
            with pytest.raises(DonatedStateError):
                copy.deepcopy(used)
                sl.unshard(used.params)

    sl.simulate(run, mesh={"data": 2})
    for number, option in enumerate(({}, {"params": "disk"})):
        transform = sl.chain(sl.zero(3), sl.offload("disk", folder=str(tmp_path / str(number)), **option))
        state, _ = sl.make_train_step(FIT, sl.shard(PARAMS, sl.make_mesh(), transform), sl.optim.adamw(0.1))
        with pytest.raises(TreeError, match=r"on disk is there once.*checkpoint.save\(folder, state\)"):
            copy.deepcopy(state)
    for moved in (sl.to_host(state_of()), sl.to_disk(state_of(), tmp_path / "parked")):
        with pytest.raises(TreeError, match=r"bring it back with sl.to_device before it is used \(a copy of it"):
            copy.deepcopy(moved)
    with pytest.raises(TreeError, match=r"parameters on disk cannot be copied.*sl.unshard"):
        copy.deepcopy(state.params)


def state_of():
    return sl.make_train_step(FIT, sl.shard(PARAMS, sl.make_mesh(), stage=1), sl.optim.adamw(0.1))[0]


def saved(value):
    torch.save(value, io.BytesIO())


@pytest.mark.parametrize("write", [pickle.dumps, cloudpickle.dumps, saved])
def test_what_a_rank_holds_is_not_pickled(write):
    def run(mesh):
        state, _ = sl.make_train_step(FIT, sl.shard(PARAMS, mesh, stage=1), sl.optim.sgd(0.1))
        with pytest.raises(
            TreeError, match=r"a TrainState is one rank's part.*checkpoint.save.*sl.unshard\(state.params"
        ):
            write({"state": state})
        with pytest.raises(TreeError, match=r"a Sharded tree, one rank's part.*sl.unshard\(params"):
            write([state.params])
        if mesh.size > 1:
            with pytest.raises(MeshError, match=r"mesh\(data=2\) belongs to this rank and cannot be pickled"):
                write(mesh)
        write(sl.unshard(state.params))

    sl.simulate(run, mesh={"data": 2})
    run(sl.make_mesh())


def returned(mesh):
    return sl.make_train_step(FIT, sl.shard(PARAMS, mesh, stage=1), sl.optim.sgd(0.1))[0]


def test_a_returned_state_is_refused_with_a_remedy():
    with pytest.raises(
        RankFailure, match=r"(?s)cannot be pickled \(or returned by sl.launch\).*sl.unshard\(state.params\)"
    ):
        sl.launch(returned, mesh={"data": 1})
