"""`make_schedule`: a schedule from a name, orders, a table or a file."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardlib.errors import ScheduleError, listing
from shardlib.schedules.actions import Schedule, check, from_orders
from shardlib.schedules.dualpipe import dualpipe_v
from shardlib.schedules.events import COMPUTE, Action, Kind
from shardlib.schedules.generators import (
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    zbv,
    zero_bubble_h1,
)
from shardlib.schedules.messages import lower

# Schedules in the formats of torch.distributed.pipelining: CSV with a row per rank, and the grid in its messages.


_CELL = re.compile(r"(\d+)([A-Z][A-Z_]*)(\d*)")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
_STEP = re.compile(r"\s*Step \d+: (.*?)(?:<-- ERROR HERE)?$")
_RANKS = re.compile(r"\s*(Rank \d+\s*)+")
# Actions in torch's lowered form that a schedule here does not hold: `lower` derives messages from the compute actions, and
# the executor gathers parameters and reduces gradients without the schedule.
_DERIVED = {Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B, "UNSHARD", "RESHARD", "REDUCE_GRAD"}


def read_table(source: str | Path, name: str | None = None) -> Schedule:
    """A schedule from text (a string with a comma or a line break) or from a file.

    The text is CSV with a row per rank, or the grid that torch prints, with a row per step under a line
    ``Rank 0  Rank 1 …``. Cells read ``0F0``, ``1B3``, ``0I1``, ``0W1``. Empty cells, which stand for idling, are dropped, and
    so are actions of torch's lowered form (``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B``, ``UNSHARD``, ``RESHARD``,
    ``REDUCE_GRAD``). ``(0F3;3B1)OVERLAP_F_B``, two overlapping actions, is read as the one after the other. The schedule is
    not checked (see `check`). ``name`` is the file's name by default.

    Raises:
        ScheduleError: cells that cannot be read, all listed, or a schedule without actions.
        OSError: a file that cannot be read.

    >>> text = sl.schedules.write_table(sl.schedules.gpipe(2, 1))
    >>> sl.schedules.read_table(text).ranks
    2
    """
    if isinstance(source, Path) or not is_table(source):
        name = name or Path(source).stem
        source = Path(source).read_text()
    rows = _grid(source.splitlines()) or list(csv.reader(io.StringIO(source, newline="")))
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    return read_cells(rows, name or "table")


def read_cells(rows: Sequence[Sequence[str]], name: str) -> Schedule:
    """A schedule from its cells, a list per rank. Raises `ScheduleError` as `read_table` does."""
    problems: list[str] = []
    orders = []
    for rank, row in enumerate(rows):
        order: list[Action] = []
        for at, cell in enumerate(row):
            pair = _PAIR.fullmatch(cell.strip())
            for text in pair[1].split(";") if pair else [cell]:
                action = _parsed(text.strip(), f"rank {rank}, cell {at}", problems)
                order += [] if action is None else [action]
        orders.append(order)
    if problems:
        raise ScheduleError(
            f"the table is not a schedule:\n{listing(problems)}\n"
            "Write a cell as [stage][F, B, I or W][micro-batch], such as 2F0, or leave it empty."
        )
    return from_orders(orders, name)


def _grid(lines: Sequence[str]) -> list[list[str]] | None:
    """The columns of a grid, one per rank; None for text that is not a grid."""
    head = next((number for number, line in enumerate(lines) if _RANKS.fullmatch(line)), None)
    if head is None:
        return None
    # Positions relative to the first column: torch indents the head by one blank more than the rows.
    starts = [match.start() - lines[head].index("Rank") for match in re.finditer("Rank", lines[head])]
    steps = [match[1] for line in lines[head + 1 :] if (match := _STEP.match(line))]
    return [[line[start:stop].strip() for line in steps] for start, stop in zip(starts, [*starts[1:], None])]


def write_table(schedule: Schedule, messages: bool = False) -> str:
    """The CSV text of a schedule: its compute actions, or its lowered orders with ``messages=True``.

    >>> print(sl.schedules.write_table(sl.schedules.zero_bubble_h1(2, 2)))
    0F0,0F1,0I0,0W0,0I1,0W1
    1F0,1I0,1F1,1I1,1W0,1W1
    """
    orders: Sequence[Sequence[Action]] = lower(schedule) if messages else schedule.orders
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([map(str, order) for order in orders])
    return text.getvalue()


def is_table(text: str) -> bool:
    """Whether a string is a table rather than a name or a path."""
    return "," in text or "\n" in text


def _parsed(cell: str, where: str, problems: list[str]) -> Action | None:
    """The action of a cell; None for a cell that is dropped, or that cannot be read, which is added to ``problems``."""
    if not cell:
        return None
    match = _CELL.fullmatch(cell)
    if match is None:
        problems.append(f"{where}: {cell!r} is not an action")
        return None
    stage, word, microbatch = match.groups()
    if word in _DERIVED:
        return None
    if word not in COMPUTE:
        problems.append(f"{where}: {cell!r} has the unknown word {word!r}")
    elif not microbatch:
        problems.append(f"{where}: {cell!r} has no micro-batch")
    else:
        return Action(int(stage), Kind(word), int(microbatch))
    return None


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
            f"{spec!r} is no schedule's name ({', '.join(NAMES)}, or torch's), file or CSV text; take one of the names, or "
            "give lists of actions"
        )
    orders = [spec[rank] for rank in sorted(spec)] if isinstance(spec, Mapping) else spec
    # Entries of torch's pipeline_order have a computation_type, or are None.
    if any(entry is None or hasattr(entry, "computation_type") for order in orders for entry in order):
        return read_cells([["" if entry is None else str(entry) for entry in order] for order in orders], "custom")
    return from_orders(orders)
