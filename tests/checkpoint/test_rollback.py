"""`with_rollback`: after steps that are not finite, training goes on from the last checkpoint with later batches."""

import json
import logging
import math

import pytest
import torch
from helpers.models import mlp, regression_batch, share

import shardlib as sl
from shardlib.tree import leaves_of

LOSS, PARAMS = mlp([8, 16, 4])
BATCHES = [regression_batch(4, 8, 4, seed=seed) for seed in range(12)]
MESHES = [({"data": 1}, 0), ({"data": 2}, 3), ({"data": 2, "replica": 2}, 2)]


def poisoned(batches, *numbers):
    """The batches, in which those of the given numbers hold a NaN in their last row."""
    changed = [tuple(leaf.clone() for leaf in batch) for batch in batches]
    for number in numbers:
        changed[number][0][-1, 0] = math.nan
    return changed


def start(mesh, stage):
    transform = sl.zero(stage, axis="data", replicate="replica") if "replica" in mesh.shape else sl.zero(stage)
    optimizer = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(0.01))
    return sl.make_train_step(LOSS, sl.shard(PARAMS, mesh, transform), optimizer, nonfinite="skip")


def rows(batch, mesh):
    return share(batch, mesh.rank, mesh.size)


def plainly(mesh, stage, batches):
    state, step = start(mesh, stage)
    for batch in batches:
        state, _ = step(state, rows(batch, mesh))
    return sl.unshard(state.params)


def guarded(mesh, stage, batches, folder, every=3, damage=None, **options):
    """Trains on all batches in order; ``damage(number, state)`` may change the state before a step."""
    state, step = start(mesh, stage)
    steps = []
    with sl.checkpoint.Manager(folder, every=every) as manager:
        step = sl.checkpoint.with_rollback(step, manager, **options)
        for number, batch in enumerate(batches):
            if damage is not None:
                damage(number, state)
            state, _ = step(state, rows(batch, mesh))
            steps.append(state.step)
            manager.step(state, notes={"batch": number + 1})
    return sl.unshard(state.params), steps


def equal(one, other):
    leaves, others = leaves_of(one), leaves_of(other)
    return all(torch.equal(a, b) for a, b in zip(leaves, others, strict=True))


@pytest.mark.parametrize(("shape", "stage"), MESHES)
def test_the_state_is_that_of_a_run_without_the_batches_since_the_checkpoint(tmp_path, shape, stage):
    given = poisoned(BATCHES, 7)

    def run(mesh):
        return guarded(mesh, stage, given, tmp_path)

    kept = [*BATCHES[:6], *BATCHES[8:]]
    wanted = sl.simulate(plainly, stage, kept, mesh=shape)
    for (params, steps), plain in zip(sl.simulate(run, mesh=shape), wanted, strict=True):
        assert steps == [1, 2, 3, 4, 5, 6, 7, 6, 7, 8, 9, 10]
        assert equal(params, plain)


def test_a_damaged_state_is_replaced(tmp_path):
    def damage(number, state):
        if number == 4:
            for buffer in state.params.buffers.values():
                buffer.data[0] = math.nan

    def run(mesh):
        return guarded(mesh, 3, BATCHES, tmp_path, damage=damage, rollback=2)

    wanted = sl.simulate(plainly, 3, [*BATCHES[:3], *BATCHES[6:]], mesh={"data": 2})
    for (params, steps), plain in zip(sl.simulate(run, mesh={"data": 2}), wanted, strict=True):
        assert steps == [1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9]
        assert equal(params, plain)


def test_single_steps_are_skipped_until_there_are_enough_in_a_row(tmp_path):
    given = poisoned(BATCHES, 4, 6, 7)
    _, steps = guarded(sl.make_mesh(), 0, given, tmp_path, rollback=2)
    assert steps == [1, 2, 3, 4, 5, 6, 7, 6, 7, 8, 9, 10]


def test_an_interrupted_run_leaves_the_same_batches_out(tmp_path):
    """The checkpoint to which the state went back is saved again, with the position behind the bad batch."""
    given = poisoned(BATCHES, 4)
    mesh = sl.make_mesh()
    guarded(mesh, 0, given[:5], tmp_path / "interrupted")
    at = sl.checkpoint.read_notes(tmp_path / "interrupted")["batch"]
    assert (at, sl.checkpoint.latest(tmp_path / "interrupted").name) == (5, "step-00000003.2")
    state, step = start(mesh, 0)
    state = sl.checkpoint.restore(tmp_path / "interrupted", state)
    for batch in given[at:]:
        state, _ = step(state, batch)
    whole, _ = guarded(mesh, 0, given, tmp_path / "whole")
    assert equal(sl.unshard(state.params), whole)


def test_ids_of_all_ranks_are_logged(tmp_path, caplog):
    given = [(x, y, torch.arange(4) + 4 * number) for number, (x, y) in enumerate(poisoned(BATCHES, 1, 2))]

    def run(mesh):
        params = sl.shard(PARAMS, mesh, stage=1)
        state, step = sl.make_train_step(
            lambda params, batch: LOSS(params, batch[:2]), params, sl.optim.sgd(0.1), nonfinite="skip"
        )
        with sl.checkpoint.Manager(tmp_path, every=100) as manager:
            step = sl.checkpoint.with_rollback(step, manager, 2, ids=lambda batch: batch[2])
            for batch in given:
                state, _ = step(state, rows(batch, mesh))

    with caplog.at_level(logging.WARNING, "shardlib.checkpoint"):
        sl.simulate(run, mesh={"data": 2})
    [line] = (tmp_path / "rollbacks.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 3,
        "back_to": 0,
        "not_finite": [{"step": 2, "ids": [4, 5, 6, 7]}, {"step": 3, "ids": [8, 9, 10, 11]}],
    }
    [record] = caplog.records
    assert record.message == "not finite in step 2, 3 (ids 4, 5, 6, 7, 8, 9, 10, 11), so back to step 0"


def test_it_ends_where_roll_backs_do_not_help(tmp_path):
    given = poisoned(BATCHES, *range(4, 12))
    with pytest.raises(sl.errors.NonFiniteError) as caught:
        guarded(sl.make_mesh(), 0, given, tmp_path, limit=2)
    assert str(caught.value).count("so back to step 3") == 3
    # A checkpoint later than the last one is progress.
    _, steps = guarded(sl.make_mesh(), 0, poisoned(BATCHES, 2, 6, 10), tmp_path / "other", limit=1)
    assert steps == [1, 2, 0, 1, 2, 3, 3, 4, 5, 6, 6, 7]


@pytest.mark.parametrize("wrong", [{"rollback": 0}, {"limit": 0}])
def test_numbers_below_one_are_refused(tmp_path, wrong):
    _, step = start(sl.make_mesh(), 0)
    with pytest.raises(ValueError, match="at least 1"):
        sl.checkpoint.with_rollback(step, sl.checkpoint.Manager(tmp_path), **wrong)
