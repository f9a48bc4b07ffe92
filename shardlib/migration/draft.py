"""A migration in the making: what the readers of all kinds of configurations fill in alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardlib.migration.calls import Call, Variable
from shardlib.migration.reader import Reader
from shardlib.migration.value import SHARED, BatchRows, Migration

# The layers of decoders, by the names that transformers and torchtitan give them.
_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
RULES = {f"*/{name}": "column" for name in _COLUMNS} | {f"*/{name}": "row" for name in ("o_proj", "down_proj")}


@dataclass
class Draft:
    """See `Migration`, whose parts these are.

    Attributes:
        ranks: the number of ranks, if it is known.
        rules: for tensor slicing, of the user's model.
        stage, zero: of `zero`, with its other arguments.
        axes: mesh axis -> size; None for what is left.
        node: how nodes take part, where axes are "node" and "local": "replicate" or "hierarchical".
        transforms: besides `zero` and what cuts the batch.
        micro, accumulation, total: rows of micro-batches and of all ranks, and micro-batches of a step.
        pipeline: arguments of `pipeline`, where there are stages.
        clip: the largest norm of the gradients.
        options: further arguments of `make_train_step`.
    """

    origin: str
    ranks: int | None = None
    rules: Mapping[str, Any] | None = None
    stage: int = 0
    zero: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, int | None] = field(default_factory=lambda: {"data": None})
    node: str | None = None
    transforms: list[Call] = field(default_factory=list)
    micro: int | None = None
    accumulation: int | None = None
    total: int | None = None
    pipeline: dict[str, Any] | None = None
    optimizer: Any = None
    schedule: Any = None
    clip: float | None = None
    program: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def nodes(self, local: int, node: str) -> None:
        """Divide the axis of data into nodes of ``local`` ranks."""
        del self.axes["data"]
        self.axes = {"node": None, "local": local, **self.axes}
        self.node = node

    @property
    def over(self) -> list[str]:
        """The axes over which gradients are summed."""
        return [axis for axis in self.axes if axis not in SHARED or axis == "seq"]

    @property
    def data_ranks(self) -> int | None:
        """The number of ranks with rows of their own."""
        shared = math.prod(size for axis, size in self.axes.items() if axis in SHARED and size is not None)
        if self.ranks is None:
            return None
        return self.ranks // shared

    def slice_layers(self, size: int) -> None:
        """Slice layers over an axis "model"."""
        self.axes["model"] = size
        self.transforms.append(Call("tensor_slicing", (dict(self.rules or RULES),)))

    def sequence(self, size: int, kind: str) -> None:
        """Cut sequences over an axis "seq"."""
        self.axes["seq"] = size
        self.transforms.append(Call("sequence", ("seq", kind)))

    def settle_rows(self, reader: Reader, total: str, micro: str, accumulation: str) -> None:
        """Find the numbers of the batch that follow from others. The texts are the configuration's keys."""
        data = self.data_ranks
        if self.total is None:
            self.accumulation = self.accumulation or 1
        elif self.micro is None:
            self.accumulation = self.accumulation or 1
            if data is not None:
                if self.total % (data * self.accumulation):
                    reader.refuse(
                        total,
                        f"{self.total} rows do not divide over {data} ranks and {self.accumulation} micro-batches; take a "
                        f"multiple of {data * self.accumulation}",
                    )
                self.micro = self.total // (data * self.accumulation)
        elif self.accumulation is not None:
            rows = self.micro * self.accumulation
            if self.total % rows or (data is not None and rows * data != self.total):
                held = f"{self.micro} rows times {self.accumulation} micro-batches" + (
                    f" on {data} ranks" if data else ""
                )
                reader.refuse(total, f"{held} do not make {self.total} rows; leave one of the numbers out")
            elif data is None:
                shared = math.prod(size for axis, size in self.axes.items() if axis in SHARED and size is not None)
                self.ranks = self.total // rows * shared
        elif data is None:
            reader.refuse(
                total,
                f"how many micro-batches of {self.micro} rows ({micro}) make {self.total} depends on the number of ranks; "
                f"give it (migrate(source, ranks=8), --ranks 8), or {accumulation}",
            )
        elif self.total % (self.micro * data):
            reader.refuse(
                total, f"{self.total} rows do not divide over {data} ranks with {self.micro} rows each; take a multiple"
            )
        else:
            self.accumulation = self.total // (self.micro * data)
        self.accumulation = self.accumulation or 1
        if self.total is None and self.micro is not None and self.data_ranks is not None:
            self.total = self.micro * self.accumulation * self.data_ranks

    def finish(self, readers: Sequence[Reader]) -> Migration:
        """The migration, with the entries of all readers."""
        accumulation = self.accumulation or 1
        transforms = [*self._zeros(), *self.transforms]
        if self.pipeline is not None:
            schedule = self.pipeline.pop("schedule", "1f1b")
            transforms.append(Call("pipeline", (schedule,), {"microbatches": accumulation, **self.pipeline}))
        elif accumulation > 1:
            transforms.append(Call("accumulate", (accumulation,)))
        program: dict[str, Any] = {}
        program["parallel"] = Call("chain", tuple(transforms)) if len(transforms) > 1 else transforms[0]
        program |= self.program
        if self.schedule is not None:
            program["schedule"] = self.schedule
        clip = None if self.clip is None else Call("optim.clip_by_global_norm", (self.clip,))
        if self.optimizer is not None:
            program["optimizer"] = Call("optim.chain", (clip, self.optimizer)) if clip else self.optimizer
        elif clip:
            program["clip"] = clip
        rank = None if self.micro is None else self.micro * accumulation
        entries = tuple(entry for reader in readers for entry in reader.entries())
        rows = BatchRows(self.micro, accumulation, rank, self.total)
        return Migration(self.origin, entries, program, self.axes, self.ranks, rows, self.options, tuple(self.notes))

    def _zeros(self) -> list[Call]:
        if self.node == "replicate":
            return [Call("zero", (self.stage,), {"axis": "local", "replicate": "node", **self.zero})]
        if self.node == "hierarchical":
            zeros = [Call("zero", (self.stage,), {"axis": axis, **self.zero}) for axis in ("node", "local")]
            return [*zeros, Call("hierarchical", ("local",))]
        over = self.over
        return [Call("zero", (self.stage,), {**({} if over == ["data"] else {"axis": tuple(over)}), **self.zero})]


def rate(draft: Draft, lr: Any) -> Any:
    """What an optimizer takes as its rate: the schedule, where there is one."""
    return lr if draft.schedule is None else Variable("schedule")
