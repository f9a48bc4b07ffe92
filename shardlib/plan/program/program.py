"""The program of one rank: what it does in a step, in order. Payload, transfers, predicted time and print-out visit it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from shardlib.plan.program.ops import Compute, Op, Send
from shardlib.plan.program.passes import Pass, handed, ops_of
from shardlib.plan.program.update import ending, updating
from shardlib.plan.tables import size
from shardlib.plan.value import PlanValue
from shardlib.schedules import Action, Kind


@dataclass(frozen=True)
class Program:
    """The operations of one rank in a step; ``print`` it.

    A rank makes passes (a micro-batch's forward or backward in a stage) in the order of its plan's schedule, then what ends
    the micro-batches, and then, with all other ranks, the update. Autograd drives a pass: the executor makes the exchanges
    of a pass over each axis in the program's order, as tests hold.

    Attributes:
        plan: the part of the plan for the rank.
        owned: whether the optimizer sums over its axis itself (1-bit Adam, once its variance is frozen).
    """

    plan: PlanValue
    owned: bool = False

    @classmethod
    def of(cls, plan: PlanValue, owned: bool = False) -> Program:
        """The program of a part of a plan, made once: all that visit it share it."""
        if owned not in plan.programs:
            plan.programs[owned] = cls(plan, owned)
        return plan.programs[owned]

    @cached_property
    def actions(self) -> Mapping[Action, Pass]:
        """The passes of a step, in order."""
        (home,) = {self.plan.stages.schedule.rank_of[stage] for stage in self.plan.local_stages}
        order = self.plan.stages.schedule.orders[home]
        last = {a.stage: a.microbatch for a in order if a.kind in (Kind.B, Kind.W)}
        on_disk = any(bucket.memory.grad == "disk" for bucket in self.plan.trained)
        begun, found = set[int](), dict[Action, Pass]()
        for action in order:
            stage, kind, microbatch = action
            reduces = kind in (Kind.B, Kind.W)
            final = reduces and last[stage] == microbatch
            found[action] = Pass(stage, kind, final, reduces and on_disk and stage in begun)
            if reduces:
                begun.add(stage)
        return found

    def ops(self, one: Pass) -> tuple[Op, ...]:
        """The operations of a pass, in order."""
        if one not in self._ops:
            self._ops[one] = ops_of(self.plan.of_stage(one.stage).tiled, one, self.owned)
        return self._ops[one]

    def handed(self, one: Pass) -> tuple[Send, ...]:
        """What a pass ends with: messages to another stage."""
        return handed(self.plan.everywhere, one)

    @cached_property
    def _ops(self) -> dict[Pass, tuple[Op, ...]]:
        return {}

    @cached_property
    def ending(self) -> tuple[Op, ...]:
        """What follows the last pass, before the ranks begin the update together."""
        return tuple(ending(self.plan))

    @cached_property
    def updating(self) -> tuple[Op, ...]:
        return tuple(updating(self.plan, self.owned))

    def parts(self) -> Iterator[tuple[str, tuple[Op, ...], int]]:
        """The parts of a step: a name, operations in order, and how often the step has them. Equal passes are one part."""
        stages = len(self.plan.local_stages) > 1 or self.plan.stages.axis is not None
        for one, times in Counter(self.actions.values()).items():
            yield f"{one}, stage {one.stage}" if stages else str(one), (*self.ops(one), *self.handed(one)), times
        yield "after the last micro-batch", self.ending, 1
        yield "update", self.updating, 1

    def sends(self) -> Iterator[tuple[Send, int]]:
        """Everything that the rank sends or moves, and how often in a step."""
        for _, ops, times in self.parts():
            yield from ((op, times) for op in ops if isinstance(op, Send) and op.bytes)

    def __str__(self) -> str:
        lines: list[str] = []
        for name, ops, times in self.parts():
            shown = [line for op in ops if (line := _line(op))]
            if shown:
                lines.append(f"{name}, {times} times:" if times > 1 else f"{name}:")
                lines += [f"  {line}" for line in shown]
        return "\n".join(lines)


def _line(op: Op) -> str:
    """An operation as text; "" for what neither computes nor sends."""
    if isinstance(op, Compute):
        return f"compute {op.unit or '(top)'}"
    if isinstance(op, Send) and op.bytes:
        of = f" of {op.unit}" if op.unit else ""
        return f"{'move' if op.moves else 'send'} {op.what}{of}: {op.link}, {size(op.bytes)}, {op.form}"
    return ""
