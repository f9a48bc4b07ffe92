"""The value that a configuration becomes: transforms, an optimizer, numbers of the batch, axes, code, and a table of keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from shardlib.errors import MeshError
from shardlib.migration.calls import Call, code, make
from shardlib.migration.reader import REFUSED, TAKEN, UNNEEDED, KeyEntry
from shardlib.plan.tables import table

# Axes along which ranks share a batch.
SHARED = ("model", "pipe", "seq")


class BatchRows(NamedTuple):
    """Rows of a batch; None for what the configuration leaves open.

    Attributes:
        micro: rows of a micro-batch of a rank.
        accumulation: micro-batches of a step.
        rank: rows of a rank's batch, which a train step takes: ``micro * accumulation``.
        total: rows of all ranks' batches.
    """

    micro: int | None
    accumulation: int
    rank: int | None
    total: int | None


@dataclass(frozen=True, repr=False)
class Migration:
    """What `migrate` makes of a configuration. Its text is the table of keys, then the code.

    Attributes:
        origin: the name of what the configuration is for.
        entries: what became of each key.
        program: name -> call, in the order of the code.
        axes: name of a mesh axis -> its size; None for what is left of the ranks.
        ranks: the number of ranks, if it is known.
        rows: rows of batches.
        options: further arguments of `make_train_step`.
        notes: what is done outside of Python, such as commands.
    """

    origin: str
    entries: tuple[KeyEntry, ...]
    program: Mapping[str, Any]
    axes: Mapping[str, int | None]
    ranks: int | None
    rows: BatchRows
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @cached_property
    def values(self) -> dict[str, Any]:
        """Variable -> value of the code's variables."""
        made: dict[str, Any] = {}
        for name, call in self.program.items():
            made[name] = make(call, made)
        return made

    @property
    def chain(self) -> Any:
        """The transforms, for `shard` and `make_plan`."""
        return self.values["parallel"]

    @property
    def optimizer(self) -> Any:
        """The gradient transformation; None where the configuration leaves it to the script."""
        return self.values.get("optimizer")

    @property
    def schedule(self) -> Any:
        """The schedule of the learning rate, which `optimizer` follows; None where there is none."""
        return self.values.get("schedule")

    @property
    def curriculum(self) -> Any:
        """What each step reads, for `shardlib.data.loader`; None where there is no curriculum."""
        return self.values.get("curriculum")

    @property
    def refused(self) -> tuple[KeyEntry, ...]:
        """The keys that are refused."""
        return tuple(entry for entry in self.entries if entry.verdict == REFUSED)

    def sizes(self, ranks: int | None = None) -> dict[str, int]:
        """The sizes of the mesh's axes for ``ranks`` ranks, by default those of the configuration.

        Raises:
            MeshError: the ranks are not known, or the axes' sizes do not divide them.
        """
        ranks = self.ranks if ranks is None else ranks
        fixed = math.prod(size for size in self.axes.values() if size is not None)
        if ranks is None and None in self.axes.values():
            raise MeshError(
                "the configuration does not say how many ranks run it: give sizes(ranks), or migrate(ranks=)"
            )
        if ranks is not None and (ranks % fixed or (None not in self.axes.values() and ranks != fixed)):
            shown = " × ".join(f"{axis}={size}" for axis, size in self.axes.items() if size is not None)
            raise MeshError(f"{ranks} ranks do not divide by {shown}; take a multiple of {fixed}, or other sizes")
        left = None if ranks is None else ranks // fixed
        return {axis: size if size is not None else left or 1 for axis, size in self.axes.items()}

    @property
    def code(self) -> str:
        """Python that makes the same, and a function ``start(loss_fn, params)`` that begins to train."""
        lines = ["import shardlib as sl", ""]
        lines += [f"# {note}" for note in self.notes]
        open_axes = [axis for axis, size in self.axes.items() if size is None]
        if self.ranks is not None or not open_axes:
            lines.append(f"axes = {self.sizes()!r}")
        elif len(self.axes) == 1:
            lines.append('axes = {}  # every rank that torchrun starts, on one axis "data"')
        else:
            lines.insert(0, "import os\n")
            lines.append('ranks = int(os.environ.get("WORLD_SIZE", "1"))  # that torchrun starts')
            fixed = math.prod(size for size in self.axes.values() if size is not None)
            shown = ", ".join(
                f"{axis!r}: ranks // {fixed}" if size is None else f"{axis!r}: {size}"
                for axis, size in self.axes.items()
            )
            lines.append(f"axes = {{{shown}}}")
        lines += [f"{name} = {_laid_out(call)}" for name, call in self.program.items()]
        if any("re.compile(" in line for line in lines):
            lines.insert(0, "import re\n")
        given = "".join(f", {name}={value!r}" for name, value in self.options.items())
        signature = (
            "loss_fn, params, mesh=None" if "optimizer" in self.program else "loss_fn, params, optimizer, mesh=None"
        )
        optimizer = "sl.optim.chain(clip, optimizer)" if "clip" in self.program else "optimizer"
        lines += [
            "",
            "",
            f"def start({signature}):",
            f'    """The first state, and train_step(state, batch), {self._batch()}."""',
            "    params = sl.shard(params, mesh or sl.make_mesh(**axes), parallel)",
            f"    return sl.make_train_step(loss_fn, params, {optimizer}{given})",
        ]
        return "\n".join(lines) + "\n"

    def _batch(self) -> str:
        _, accumulation, rank, total = self.rows
        if rank is None:
            return "where a batch has one rank's rows" + (f", all ranks' {total}" if total else "")
        cut = f", cut into {accumulation} micro-batches" if accumulation > 1 else ""
        return f"where a batch has {rank} rows on each rank{cut}" + (f", {total} on all" if total else "")

    def __str__(self) -> str:
        order = (TAKEN, UNNEEDED, REFUSED)
        rows = [
            (entry.key, _short(entry.value), entry.verdict, entry.note)
            for entry in sorted(self.entries, key=lambda entry: order.index(entry.verdict))
        ]
        head = f"{self.origin}: " + ", ".join(
            f"{sum(entry.verdict == verdict for entry in self.entries)} keys {verdict}" for verdict in order
        )
        return f"{head}\n\n{table(('key', 'value', '', ''), rows)}\n\n{self.code}"

    __repr__ = __str__


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 30 else f"{shown[:27]}..."


def _laid_out(value: Any) -> str:
    """A call in one line, or one line for each argument where it is long."""
    text = code(value)
    if len(text) <= 100 or not isinstance(value, Call):
        return text
    given = [*map(code, value.args), *(f"{name}={code(each)}" for name, each in value.options.items())]
    return f"{value.callee}(\n" + "".join(f"    {each},\n" for each in given) + ")"
