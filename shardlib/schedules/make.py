"""One entry for every way to say which schedule is meant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from shardlib.errors import ScheduleError, listing
from shardlib.schedules.actions import Action, Schedule, from_orders
from shardlib.schedules.check import check
from shardlib.schedules.generators import (
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    zbv,
    zero_bubble_h1,
)
from shardlib.schedules.table import is_table, read_table

Spec = str | Path | Schedule | Sequence[Sequence[Action]]

# Schedules with a fixed number of chunks per rank, and those that take it.
_FIXED: dict[str, tuple[Callable[[int, int], Schedule], int]] = {
    "gpipe": (gpipe, 1),
    "1f1b": (one_f_one_b, 1),
    "zb-h1": (zero_bubble_h1, 1),
    "zb-v": (zbv, 2),
}
_CHUNKED: dict[str, Callable[[int, int, int], Schedule]] = {
    "interleaved-1f1b": interleaved_1f1b,
    "interleaved-zb": interleaved_zero_bubble,
}
NAMES = (*_FIXED, *_CHUNKED)


def make_schedule(spec: Spec, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """A checked schedule for ``ranks`` and ``microbatches``.

    ``spec`` is one of `NAMES`, a `Schedule`, a list of compute actions per rank, or CSV as `read_table` takes it
    (text, or the path of a file). ``chunks``, the stages per rank, is a choice for the interleaved schedules
    (2 by default); elsewhere it may be given to be compared.

    Raises:
        ScheduleError: an unknown name, a schedule made for other sizes, or one that cannot run (see `check`).
    """
    if isinstance(spec, str) and spec.lower() in NAMES:
        schedule = _named(spec.lower(), ranks, microbatches, chunks)
    else:
        schedule = _given(spec)
    wanted = [("ranks", schedule.ranks, ranks), ("micro-batches", schedule.microbatches, microbatches)]
    if chunks is not None:
        per_rank = {len(schedule.stages_of(rank)) for rank in range(schedule.ranks)}
        wanted += [("stages per rank", found, chunks) for found in sorted(per_rank)]
    problems = [f"it has {found} {what}, and {want} are wanted" for what, found, want in wanted if found != want]
    if problems:
        raise ScheduleError(
            f"schedule {schedule.name!r} is made for other sizes:\n{listing(problems)}\n"
            "Give a schedule of these sizes, or ask for one by name."
        )
    check(schedule)
    return schedule


def _named(name: str, ranks: int, microbatches: int, chunks: int | None) -> Schedule:
    if name in _CHUNKED:
        return _CHUNKED[name](ranks, microbatches, 2 if chunks is None else chunks)
    make, fixed = _FIXED[name]
    if chunks not in (None, fixed):
        raise ScheduleError(
            f"schedule {name!r} has {fixed} stage{'s' * (fixed > 1)} per rank, and chunks={chunks} is wanted; "
            f"leave chunks out, or take one of {', '.join(_CHUNKED)}"
        )
    return make(ranks, microbatches)


def _given(spec: Spec) -> Schedule:
    if isinstance(spec, Schedule):
        return spec
    if isinstance(spec, Path) or (isinstance(spec, str) and is_table(spec)):
        return read_table(spec)
    if isinstance(spec, str):
        if Path(spec).is_file():
            return read_table(Path(spec))
        raise ScheduleError(
            f"{spec!r} is no schedule: neither a name ({', '.join(NAMES)}) nor a file nor CSV text; "
            "take one of the names, or give your own lists of actions"
        )
    return from_orders(spec)
