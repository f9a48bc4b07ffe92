"""`make_schedule`: a schedule from a name, orders, a table or a file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardlib.errors import ScheduleError, listing
from shardlib.schedules.actions import Action, Schedule, from_orders
from shardlib.schedules.check import check
from shardlib.schedules.dualpipe import dualpipe_v
from shardlib.schedules.generators import (
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    zbv,
    zero_bubble_h1,
)
from shardlib.schedules.table import is_table, read_cells, read_table

Spec = str | Path | Schedule | Sequence[Sequence[Action]] | Mapping[int, Sequence[Any]]

# Schedules with a fixed number of chunks per rank, and schedules that take it as an argument.
_FIXED: dict[str, tuple[Callable[[int, int], Schedule], int]] = {
    "gpipe": (gpipe, 1),
    "1f1b": (one_f_one_b, 1),
    "zb-h1": (zero_bubble_h1, 1),
    "zb-v": (zbv, 2),
    "dualpipe-v": (dualpipe_v, 2),
}
_CHUNKED: dict[str, Callable[[int, int, int], Schedule]] = {
    "interleaved-1f1b": interleaved_1f1b,
    "interleaved-zb": interleaved_zero_bubble,
    "looped-bfs": looped_bfs,
}
NAMES = (*_FIXED, *_CHUNKED)


def _key(name: str) -> str:
    return re.sub("[-_ ]", "", name.lower()).removeprefix("schedule")


# Torch's names (torch.distributed.pipelining.get_schedule_class) are those of `NAMES` up to hyphens and capitals, or these.
_BY_KEY = {_key(name): name for name in NAMES} | {
    "interleavedzerobubble": "interleaved-zb",
    "zbvzerobubble": "zb-v",
}


def named_schedule(spec: object) -> str | None:
    """The entry of `NAMES` for a schedule's name in torch's or this library's spelling; None for anything else.

    >>> sl.schedules.named_schedule("Interleaved1F1B")
    'interleaved-1f1b'
    """
    return _BY_KEY.get(_key(spec)) if isinstance(spec, str) else None


def make_schedule(spec: Spec, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """A checked schedule for ``ranks`` and ``microbatches``.

    Args:
        spec: one of `NAMES`, or torch's name for it (``"Interleaved1F1B"``, ``"ZBVZeroBubble"``, …; capitals and hyphens
            do not matter); a `Schedule`; a list of compute actions per rank; torch's ``pipeline_order``; or text that
            `read_table` reads, or the path of a file with such text.
        chunks: stages per rank. Interleaved schedules are made with this number (2 by default); any other schedule must
            have it.

    Raises:
        ScheduleError: an unknown name, a schedule made for other sizes, or one that cannot run (see `check`).

    >>> sl.schedules.make_schedule("ZBVZeroBubble", 2, 4).name
    'zb-v'
    """
    name = named_schedule(spec)
    schedule = _given(spec) if name is None else _named(name, ranks, microbatches, chunks)
    wanted = [("ranks", schedule.ranks, ranks), ("micro-batches", schedule.microbatches, microbatches)]
    if chunks is not None:
        per_rank = {len(schedule.stages_of(rank)) for rank in range(schedule.ranks)}
        wanted += [("stages per rank", count, chunks) for count in sorted(per_rank)]
    problems = [f"it has {given} {what}, and {want} are wanted" for what, given, want in wanted if given != want]
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
            f"{spec!r} is no schedule: neither a name ({', '.join(NAMES)}, or torch's for one of them) nor a file nor CSV "
            "text; take one of the names, or give your own lists of actions"
        )
    orders = [spec[rank] for rank in sorted(spec)] if isinstance(spec, Mapping) else spec
    # Entries of torch's pipeline_order have a computation_type, or are None.
    if any(entry is None or hasattr(entry, "computation_type") for order in orders for entry in order):
        return read_cells([["" if entry is None else str(entry) for entry in order] for order in orders], "custom")
    return from_orders(orders)
