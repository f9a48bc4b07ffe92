"""Defects of the start of a run, and of reports on ranks that wait for each other."""

from ..planting import Defect

_REPORTS = "tests/mesh/test_hang_reports.py"
_RENDEZVOUS = "tests/mesh/test_rendezvous.py"

DEFECTS = (
    Defect(
        "experts without a meeting",
        "agreement",
        "execute/gathering.py",
        "a rank sends tokens to experts while others wait for it to agree on a gather",
        "while not self._agree(_MEETING):",
        "while False:",
        ("tests/execute/test_uneven_use_with_experts.py::test_ranks_train_like_one_device",),
    ),
    Defect(
        "a name that stays",
        "stale",
        "mesh/transport/activity.py",
        "calls after a unit's gather are reported as that unit's",
        "        activity.path = before",
        "        pass",
        (
            f"{_REPORTS}::test_names_end_with_what_they_name",
            f"{_REPORTS}::test_every_exchange_of_a_step_says_what_it_is_for",
        ),
    ),
    Defect(
        "a later call is another one",
        "agreement",
        "mesh/transport/activity.py",
        "a rank that has gone on to the next call counts as missing in the last one",
        "other.number >= self.number",
        "other.number == self.number",
        (f"{_REPORTS}::test_who_is_missing",),
    ),
    Defect(
        "the last call that failed",
        "order",
        "mesh/transport/activity.py",
        "a call that a program makes while it cleans up is reported in place of the one that failed",
        "self.failed = self.failed or (call, seconds)",
        "self.failed = call, seconds",
        (f"{_REPORTS}::test_a_failed_call_stays_the_one_that_is_reported",),
    ),
    Defect(
        "the newest call of a device",
        "order",
        "mesh/transport/activity.py",
        "the calls that a device waits in are looked at from the newest on",
        "while self._followed and self._followed[0][1]():",
        "while self._followed and self._followed[-1][1]():",
        (f"{_REPORTS}::test_the_oldest_call_of_a_device_is_overdue",),
    ),
    Defect(
        "a start in the place of the one before",
        "key",
        "mesh/transport/process.py",
        "after a restart gloo finds the addresses of processes that have ended",
        'return dist.PrefixStore(f"shardlib/{start}", store)',
        'return dist.PrefixStore("shardlib", store)',
        (f"{_RENDEZVOUS}::test_each_start_has_keys_of_its_own",),
    ),
    Defect(
        "one answer to each rank",
        "stale",
        "mesh/transport/process.py",
        "rank 0 answers the process that asked first, and not the one that was started in its place",
        "if asker != answered[rank]:",
        "if not answered[rank]:",
        (f"{_RENDEZVOUS}::test_a_rank_that_asks_twice",),
    ),
    Defect(
        "a process id that is used again",
        "agreement",
        "mesh/transport/watch.py",
        "another process with the number of one that has ended is taken for it",
        " or fields[19] != started:",
        ":",
        (f"{_REPORTS}::test_processes_of_this_host",),
    ),
)
