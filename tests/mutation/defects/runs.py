"""Defects of runs that are stopped and started again."""

from ..planting import Defect

_SIGNALS = "tests/checkpoint/test_signals.py"
_RESTARTS = "tests/mesh/test_restarts.py"

DEFECTS = (
    Defect(
        "a signal that saves nothing",
        "stale",
        "checkpoint/manager.py",
        "a run that is told to end goes back to the checkpoint before",
        "        if due or received:",
        "        if due:",
        (f"{_SIGNALS}::test_the_state_is_saved_once",),
    ),
    Defect(
        "an end with the save under way",
        "order",
        "checkpoint/manager.py",
        "a run that is told to end does not wait for its save",
        "            self.wait()\n            raise SystemExit",
        "            raise SystemExit",
        (f"{_SIGNALS}::test_an_end_waits_for_its_save",),
    ),
    Defect(
        "a signal that is forgotten",
        "stale",
        "checkpoint/manager.py",
        "a signal after the last step is swallowed",
        "release(again=kind is None)",
        "release(again=False)",
        (f"{_SIGNALS}::test_a_signal_before_the_first_step_or_after_the_last_acts_as_before",),
    ),
    Defect(
        "a second Ctrl-C that waits",
        "stale",
        "mesh/launch/supervised.py",
        "a user who presses Ctrl-C again is not heard",
        "_PRESSED if number == INTERRUPT else _AGAIN",
        "_AGAIN",
        (f"{_SIGNALS}::test_ctrl_c_where_it_is_asked_for",),
    ),
    Defect(
        "as many ranks as failed",
        "agreement",
        "mesh/launch/supervise.py",
        "after a failure fewer ranks go on than are left and allowed",
        "each <= ranks),",
        "each < ranks),",
        (f"{_RESTARTS}::test_ranks_that_are_left",),
    ),
    Defect(
        "for ever",
        "order",
        "mesh/launch/supervise.py",
        "a run that comes to the same step again and again counts as one that goes on",
        "progress.step > self._furthest",
        "progress.step >= self._furthest",
        (f"{_RESTARTS}::test_a_run_without_progress_is_given_up",),
    ),
)
