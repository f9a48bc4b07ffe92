"""States on disk, of which there is one: what is read, copied or refused beside the run leaves the run's as they are."""

import errno

import optree
import pytest
import torch
from helpers.faults import BROKEN, FULL, Faults
from helpers.models import mlp, regression_batch
from helpers.offloaded import stepped

import shardlib as sl
from shardlib.collectives import primitives
from shardlib.errors import DonatedStateError, NonFiniteError, RankFailure, StorageError, TreeError
from shardlib.optim import GradientTransformation, Locality
from shardlib.optim.on_disk import OnDisk
from shardlib.tree import tree_map

LOSS, PARAMS = mlp([6, 9, 5, 4], torch.float32)
BATCHES = [tuple(part.roll(number, 0) for part in regression_batch(4, 6, 4, torch.float32)) for number in range(6)]


def start(mesh, *transforms, optimizer=None):
    tx = optimizer or sl.optim.adamw(1e-2)
    return sl.make_train_step(LOSS, sl.shard(PARAMS, mesh, sl.chain(*transforms)), tx)


def halves(params):
    return tree_map(lambda leaf: leaf / 2, params)


def masters(state):
    return {name: master.unpacked() for name, master in state.opt.masters.items()}


def same(one, other):
    return all(map(torch.equal, optree.tree_leaves(one), optree.tree_leaves(other)))


def refused_step(state, step, tmp_path):
    with pytest.raises(NonFiniteError):
        step(state, (BATCHES[0][0] * torch.inf, BATCHES[0][1]))


@pytest.mark.parametrize("what", [refused_step, lambda state, step, folder: sl.checkpoint.save(folder / "run", state)])
def test_parameters_that_are_put_in_for_a_while_leave_the_masters(tmp_path, what):
    """To the bit: an average that is saved, or a step that is refused before its update, writes nothing."""

    def run(*offload):
        state, step = start(sl.make_mesh(), sl.precision("bf16"), *offload)
        state = stepped(state, step, BATCHES[:2])
        kept, state.params = state.params, halves(state.params)
        what(state, step, tmp_path)
        state.params = kept
        return sl.unshard(stepped(state, step, BATCHES[2:4]).params)

    assert same(run(sl.offload("disk", folder=tmp_path / "states")), run())


def test_parameters_that_were_put_in_stay_where_a_step_is_skipped(tmp_path):
    def run(*offload):
        params = sl.shard(PARAMS, sl.make_mesh(), sl.chain(sl.precision("bf16"), *offload))
        state, step = sl.make_train_step(LOSS, params, sl.optim.adamw(1e-2), nonfinite="skip")
        state = stepped(state, step, BATCHES[:2])
        state.params = halves(state.params)
        state = stepped(state, step, [(BATCHES[0][0] * torch.inf, BATCHES[0][1]), *BATCHES[2:4]])
        return sl.unshard(state.params)

    assert same(run(sl.offload("disk", folder=tmp_path)), run())


def test_a_state_whose_parameters_were_replaced_and_put_in_goes_on_after_a_skipped_step(tmp_path):
    def run(*offload):
        params = sl.shard(PARAMS, sl.make_mesh(), sl.chain(sl.precision("bf16"), *offload))
        state, step = sl.make_train_step(LOSS, params, sl.optim.adamw(1e-2), nonfinite="skip")
        state = stepped(state, step, BATCHES[:1])
        state = sl.replace_params(state, halves(state.params))
        state.params = halves(state.params)
        state = stepped(state, step, [(BATCHES[0][0] * torch.inf, BATCHES[0][1]), *BATCHES[2:4]])
        return sl.unshard(state.params)

    assert same(run(sl.offload("disk", folder=tmp_path)), run())


def test_parameters_that_were_put_in_are_taken_up_on_all_ranks_or_on_none(tmp_path, monkeypatch):
    """A disk that is full for a moment is an error of all ranks, and of this step alone."""

    def run(mesh, fails):
        disk = sl.offload("disk", folder=tmp_path / str(fails))
        state, step = start(mesh, sl.zero(1), sl.precision("bf16"), disk)
        state = stepped(state, step, BATCHES[:2])
        state.params = halves(state.params)
        if fails is not None:
            arm = lambda: Faults(monkeypatch).fails("pwritev", FULL, "rank-1-", after=fails, times=1)  # noqa: E731
            primitives.all_gather_object(mesh, ["data"], mesh.rank == 0 and arm())
            with pytest.raises(StorageError if mesh.rank else RankFailure, match=r"rank 1: StorageError|Errno 28"):
                stepped(state, step, BATCHES[2:3])
            primitives.all_gather_object(mesh, ["data"], mesh.rank == 0 and monkeypatch.undo())
        return sl.unshard(stepped(state, step, BATCHES[2:4]).params)

    wanted = sl.simulate(run, None, mesh={"data": 2})
    assert same(sl.simulate(run, 0, mesh={"data": 2}), wanted), "while the masters follow"
    assert same(sl.simulate(run, 4, mesh={"data": 2}), wanted), "in the update"


def test_a_checkpoint_that_cannot_be_restored_leaves_what_is_on_disk(tmp_path, monkeypatch):
    """And the next one can be."""
    state, step = start(sl.make_mesh(), sl.offload("disk", folder=tmp_path / "states"))
    sl.checkpoint.save(tmp_path / "run", state)
    state = stepped(state, step, BATCHES[:2])
    before = masters(state)
    with monkeypatch.context() as patch:
        Faults(patch).fails("pwritev", errno.EIO, ".data", after=2, times=1)
        with pytest.raises(StorageError, match="Errno 5"):
            sl.checkpoint.restore(tmp_path / "run", state)
    assert same(masters(state), before)
    state = sl.checkpoint.restore(tmp_path / "run", state)
    assert same(sl.unshard(state.params), PARAMS)
    stepped(state, step, BATCHES[:1])


def test_a_state_of_another_steps_files_is_refused(tmp_path):
    """Plans that differ in folders alone are equal."""
    state, step = start(sl.make_mesh(), sl.offload("disk", folder=tmp_path / "one"))
    state = stepped(state, step, BATCHES[:2])
    with pytest.raises(StorageError, match="another folder, or save a checkpoint"):
        start(sl.make_mesh(), sl.offload("disk", folder=tmp_path / "one"))
    fresh, other = start(sl.make_mesh(), sl.offload("disk", folder=tmp_path / "two"))
    with pytest.raises(TreeError, match=r"in the files of another train step.*save a checkpoint"):
        stepped(state, other, BATCHES[2:3])
    sl.checkpoint.save(tmp_path / "run", state)
    fresh = sl.checkpoint.restore(tmp_path / "run", fresh)
    went_on = stepped(fresh, other, BATCHES[2:4])
    assert same(sl.unshard(went_on.params), sl.unshard(stepped(state, step, BATCHES[2:4]).params))


def test_a_copy_of_a_state_is_refused_when_the_run_has_gone_on(tmp_path):
    def run(*offload):
        state, step = start(sl.make_mesh(), *offload)
        state = stepped(state, step, BATCHES[:2])
        copy = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, state)
        state = stepped(state, step, BATCHES[2:4])
        if offload:
            for use in (lambda: step(copy, BATCHES[2]), lambda: sl.checkpoint.save(tmp_path / "run", copy)):
                with pytest.raises(DonatedStateError, match=r"where a later state is now.*the state of the last step"):
                    use()
            copy = tree_map(lambda leaf: leaf, state)
            state = sl.replace_params(state, state.params)
            with pytest.raises(DonatedStateError, match="where a later state is now"):
                step(copy, BATCHES[4])
        return sl.unshard(stepped(state, step, BATCHES[4:]).params)

    assert same(run(sl.offload("disk", folder=tmp_path / "states")), run())


def before_last():
    """An optimizer whose new state has its old one's memory in other places."""

    def init(params, shards=None):
        return {name: tree_map(torch.zeros_like, params) for name in ("a_now", "b_before", "c_before")}

    def update(grads, state, params, *, shards):
        updates = tree_map(lambda g, m, b: -0.1 * g - 0.05 * m - 0.02 * b, grads, state["a_now"], state["b_before"])
        old = state["a_now"]
        return updates, {"a_now": tree_map(torch.clone, grads), "b_before": old, "c_before": old}

    return GradientTransformation(init, update, Locality.ELEMENTWISE)


def test_an_update_may_return_an_old_tensor_as_another_one(tmp_path):
    def run(*offload):
        return sl.unshard(stepped(*start(sl.make_mesh(), *offload, optimizer=before_last()), BATCHES).params)

    assert same(run(sl.offload("disk", folder=tmp_path)), run())


def test_a_state_that_cannot_be_taken_up_leaves_the_fresh_one(tmp_path, monkeypatch):
    state, step = start(sl.make_mesh(), sl.offload("disk", folder=tmp_path / "one"))
    state = stepped(state, step, BATCHES[:2])
    wanted = masters(state)
    sl.to_disk(state, tmp_path / "parked")
    fresh, step = start(sl.make_mesh(), sl.offload("disk", folder=tmp_path / "two"))
    first, pack, calls = masters(fresh), OnDisk.pack, []

    def failing(self, *args):
        calls.append(self)
        if len(calls) == 3:
            raise OSError(BROKEN, "broken")
        pack(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(OnDisk, "pack", failing)
        with pytest.raises(OSError, match="broken"):
            sl.to_device(tmp_path / "parked", like=fresh)
    assert same(masters(fresh), first)
    assert same(masters(sl.to_device(tmp_path / "parked", like=fresh)), wanted)


def test_a_state_that_was_lost_names_what_can_be_done(tmp_path, monkeypatch):
    state, step = start(sl.make_mesh(), sl.offload("disk", folder=tmp_path, fraction=0.5))
    with monkeypatch.context() as patch:
        Faults(patch).fails("pwritev", BROKEN, ".data", times=1)
        with pytest.raises(StorageError) as refused:
            step(state, BATCHES[0])
    assert "roll_back" not in str(refused.value)
    assert "The states are lost" in refused.value.__notes__[0] and "restore a checkpoint" in refused.value.__notes__[0]
    with pytest.raises(DonatedStateError, match="Restore a checkpoint"):
        step(state, BATCHES[0])
