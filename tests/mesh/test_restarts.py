"""How many ranks go on after a failure, and when a run is given up."""

import pytest

from shardlib.mesh.launch.supervise import Counts, End, Restarts
from shardlib.mesh.launch.supervised import RESIZE, RankProgress

KILLED = End(137, "killed", lost=1, by_signal=True)
RAISED = End(1, "raised", lost=1)


@pytest.mark.parametrize(
    "text, allowed", [("4", (4,)), ("2:4", (2, 3, 4)), ("3:3", (3,)), ("4,1,2,4", (1, 2, 4)), ("12", (12,))]
)
def test_numbers_of_ranks(text, allowed):
    assert Counts.parse(text).allowed == allowed


@pytest.mark.parametrize("text", ["", "0", "four", "4:2", "0:2", "2:", ":2", "1,,2", "1,0", "-1", "1:2:3", "2 ", "2\n"])
def test_what_names_no_ranks_is_refused(text):
    with pytest.raises(ValueError, match=r"write 4, a range|are at least 1"):
        Counts.parse(text)


@pytest.mark.parametrize(
    "text, ranks, lost, left",
    [("2:4", 4, 1, 3), ("2:4", 3, 1, 2), ("2:4", 2, 1, 2), ("2:4", 4, 3, 2), ("1,2,4", 4, 1, 2), ("4", 4, 1, 4)],
)
def test_ranks_that_are_left(text, ranks, lost, left):
    plan = Restarts(Counts.parse(text), 10)
    plan.ranks = ranks
    plan.after(End(137, "killed", lost, by_signal=True), RankProgress(0, 5, None, 0.0))
    assert plan.ranks == left


def test_missing_ranks_are_taken_back_at_the_next_checkpoint():
    plan = Restarts(Counts.parse("1:4"), 10)
    assert (plan.ranks, plan.saves) == (4, 0)
    plan.after(KILLED, RankProgress(0, 7, 5))
    assert (plan.ranks, plan.saves) == (3, 1)
    plan.after(End(RESIZE), RankProgress(5, 10, 10))
    assert (plan.ranks, plan.saves) == (4, 0)


@pytest.mark.parametrize("end", [KILLED, RAISED])
def test_ranks_that_fail_whenever_they_are_taken_back_wait_longer_each_time(end):
    plan = Restarts(Counts.parse("3:4"), 10)
    plan.after(KILLED, RankProgress(0, 100, 90))
    waits = []
    for step in range(110, 300, 20):
        waits.append(plan.saves)
        plan.after(End(RESIZE), RankProgress(step - 10, step, step))
        plan.after(end, RankProgress())  # at the start
    assert waits == [1, 2, 4, 8, 16, 32, 64, 64, 64, 64]
    plan.after(End(RESIZE), RankProgress(300, 310, 310))
    plan.after(KILLED, RankProgress(310, 325, 320))  # after a checkpoint: they were well
    assert plan.saves == 1


@pytest.mark.parametrize("end", [KILLED, RAISED])
def test_a_run_without_progress_is_given_up(end):
    plan = Restarts(Counts.parse("4"), 5)
    for step in [3, 7, 2, 7, 6, 5]:  # 7 is new, and five attempts follow
        plan.after(end, RankProgress(0, step))
        assert plan.ranks == 4
    plan.after(end, RankProgress(0, 8))
    assert plan.ranks == 4
    for step in [8, 7, 8, 5]:
        plan.after(end, RankProgress(0, step))
    assert plan.ranks == 4
    plan.after(end, RankProgress(0, 6))
    assert plan.ranks is None and plan.why == "started again 5 times without a new step"


@pytest.mark.parametrize("step", [None, 57])
def test_an_exception_at_the_same_step_is_the_scripts(step):
    plan = Restarts(Counts.parse("2:4"), 10)
    plan.after(RAISED, RankProgress(step=step))
    plan.after(KILLED, RankProgress(step=step))  # not the script's: counting begins again
    plan.after(RAISED, RankProgress(step=step))
    plan.after(RAISED, RankProgress(step=step))
    assert plan.ranks == 2
    plan.after(RAISED, RankProgress(step=step))
    assert plan.ranks is None and plan.why == "failed 3 times in a row at the same step"


@pytest.mark.parametrize("code", [0, 138, 143])
def test_ranks_that_end_by_themselves_are_done(code):
    plan = Restarts(Counts.parse("2:4"), 10)
    plan.after(End(code), RankProgress(0, 5))
    assert plan.ranks is None and not plan.why
