"""What a rank's collectives are for, and the text of reports on ranks that wait for each other."""

import re

import pytest
import torch
from helpers.models import mlp, regression_batch, share

import shardlib as sl
from shardlib.errors import RankMismatch
from shardlib.mesh.transport import activity, watch
from shardlib.mesh.transport.activity import Activity
from shardlib.mesh.transport.watch import activities, on_rank

LOSS, PARAMS = mlp([8, 16, 4])
BATCH = regression_batch(8, 8, 4)
PLANS = {
    "stage 3": ({"data": 2}, sl.zero(stage=3)),
    "stage 2, hybrid": ({"data": 2, "copy": 2}, sl.zero(stage=2, replicate="copy")),
}


class Spy:
    """A transport that notes what each exchange is for."""

    def __init__(self, group, seen):
        self._group, self._seen = group, seen

    def __getattr__(self, name):
        found = getattr(self._group, name)
        if not callable(found):
            return found

        def called(*args, **kwargs):
            self._seen.append((name, activity.here().path, activity.here().step))
            return found(*args, **kwargs)

        return called


def exchanges(mesh, transform):
    """(op, path, step) of every exchange of the fourth step, which follows the trace, and of those around it."""
    seen = []
    mesh = mesh.with_transport(lambda axis, group: Spy(group, seen))
    tx = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.lamb(0.01))
    state, step = sl.make_train_step(LOSS, sl.shard(PARAMS, mesh, transform), tx)
    mine = share(BATCH, mesh.rank, mesh.size)
    for _ in range(3):
        state, _ = step(state, mine)
    before, seen[:] = list(seen), []
    step(state, mine)
    return before, seen


@pytest.mark.parametrize("name", PLANS)
def test_every_exchange_of_a_step_says_what_it_is_for(name):
    shape, transform = PLANS[name]
    for before, seen in sl.simulate(exchanges, transform, mesh=shape):
        assert {step for *_, step in before} == {None, 0, 1, 2}
        assert {step for *_, step in seen} == {3} and all(path for _, path, _ in seen), seen
        units = {f"layers/{number}" for number in range(2)}
        gathered = {path for op, path, _ in seen if op == "all_gather"}
        reduced = {path for op, path, _ in seen if op == "reduce_scatter"}
        assert gathered == units and reduced == {f"the gradient of {unit}" for unit in units}
        assert {path for *_, path, _ in seen} - gathered - reduced == {
            "the loss and the gradients' norm",
            "the optimizer",
        }


def test_a_simulation_says_what_ranks_wait_for():
    def run(mesh):
        state, step = sl.make_train_step(LOSS, sl.shard(PARAMS, mesh, stage=3), sl.optim.sgd(0.1))
        while state.step < 3 - mesh.rank:
            state, _ = step(state, share(BATCH, mesh.rank, mesh.size))

    place = r"on axis 'data' \(call \d+, for layers/0, in step 2\); rank 1 has finished"
    with pytest.raises(RankMismatch, match=rf"rank 0 waits in all_gather\(\d+ × float64\) {place}"):
        sl.simulate(run, mesh={"data": 2})


def test_names_end_with_what_they_name():
    here = activity.here()
    with pytest.raises(ValueError), activity.naming("layers/0"):
        with activity.naming("layers/1"):
            assert here.label == ", for layers/1"
        assert here.label == ", for layers/0"
        raise ValueError
    assert here.label == ""


def ranks(*calls_made, waits=(), step=None):
    """The activities of ranks on an axis "data", which have made these numbers of calls; ``waits`` wait in their last."""
    made = []
    members = tuple(range(len(calls_made)))
    for rank, number in enumerate(calls_made):
        rank_of = Activity()
        rank_of.step = step
        for _ in range(number):
            rank_of.path = f"layers/{number}"
            call = rank_of.series("data", members).call("all_reduce", torch.empty(5))
        rank_of.path = "something later"
        if rank in waits:
            rank_of.waiting.append((call, 0.0))
        made.append(rank_of)
    return made


def test_who_is_missing():
    """A rank that has made the call, or a later one, is not; names are those of the call's start."""
    states = {rank: each.state() for rank, each in enumerate(ranks(3, 3, 2, 4, waits=(0, 1), step=7))}
    head = r"all_reduce\(5 × float32\) on axis 'data' \(size 4\) has not ended on rank 0 \(call 3, for layers/3, in step 7, "
    assert re.match(rf"{head}after \d+ s\): rank 2 has not made this call\. ", on_rank(0, states))
    assert "rank 1 waits in all_reduce(5 × float32) on axis 'data' (call 3, for layers/3, in step 7) for rank 2" in (
        on_rank(0, states)
    )
    said = on_rank(2, states)
    assert re.match(r"rank 2 waits in no collective, while", said) and re.search(
        r"rank 0, 1 wait in .* for rank 2", said
    )


def test_ranks_that_made_other_calls():
    """One evaluates, and the other goes on with a step, of which it has started more than the call that it waits in."""
    one, other = ranks(2, 2)
    calls = [rank_of.series("data", (0, 1)) for rank_of in (one, other)]
    one.waiting.append((calls[0].call("all_reduce", torch.empty(7)), 0.0))
    other.waiting.append((calls[1].call("reduce_scatter", torch.empty(80)), 0.0))
    calls[1].call("reduce_scatter", torch.empty(300))
    states = {0: one.state(), 1: other.state()}
    differ = (
        "rank 0 calls all_reduce(7 × float32) on axis 'data'; rank 1 calls reduce_scatter(80 × float32) on axis 'data'"
    )
    for rank in range(2):
        assert f"the ranks' calls differ: {differ}" in on_rank(rank, states)


def test_ranks_that_do_not_answer_and_ranks_that_do():
    states = {rank: each.state() for rank, each in enumerate(ranks(1, 1, 0, 0, waits=(0,)))}
    states[3] = "its process (17) has ended"
    states[1].ended = "has ended: its program came to its end"
    said = on_rank(0, states, "Connection closed")
    assert ": rank 1 has ended; rank 2 has not made this call; rank 3 no longer answers" in said
    assert "rank 3 no longer answers: its process (17) has ended\n" in said and said.endswith("(Connection closed)")
    assert activities(dict.fromkeys(range(3), "silent")) == ["rank 0, 1, 2 no longer answer: silent"]


def test_a_failed_call_stays_the_one_that_is_reported():
    """While a program cleans up it may wait in others."""
    (rank_of,) = ranks(1)
    calls = rank_of.series("data", (0,))
    first, second = calls.call("all_gather", None), calls.call("broadcast", None)

    def fail():
        raise RuntimeError

    for call in (first, second):
        with pytest.raises(RuntimeError):
            rank_of.wait(call, fail)
    seen = []
    rank_of.wait(second, lambda: seen.append(rank_of.state()))
    assert (seen[0].waits, seen[0].failed) == (first, True)


def test_the_oldest_call_of_a_device_is_overdue():
    (rank_of,) = ranks(0)
    calls = [rank_of.series("data", (0,)).call("all_reduce", None) for _ in range(3)]
    over = [True, False, False]
    for number, call in enumerate(calls):
        rank_of.follow(call, lambda number=number: over[number])
    assert not rank_of.overdue(600) and rank_of.state().waits is None
    assert rank_of.overdue(0) and rank_of.state().waits is calls[1]
    over[:] = [True] * 3
    assert not rank_of.overdue(0)


def test_processes_of_this_host():
    assert watch.look(watch.identity())[0] is False and "runs" in watch.look(watch.identity())[1]
    host, pid, started = watch.identity().split()
    for ended in (f"{host} {2**22 + 1} {started}", f"{host} {pid} {int(started) - 1}"):
        assert watch.look(ended)[0] is True and watch.look(ended)[1].endswith("has ended")
    assert watch.look(f"another-{host} {pid} {started}") == (False, "it gives no sign of life") == watch.look("")
