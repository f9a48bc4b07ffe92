"""Schedules in the formats of torch.distributed.pipelining: CSV with a row per rank, and the grid in its messages."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

from shardlib.errors import ScheduleError, listing
from shardlib.schedules.actions import COMPUTE, Action, Kind, Schedule, from_orders
from shardlib.schedules.messages import lower

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
