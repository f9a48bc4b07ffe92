"""A plan as text: leaves with their specs, those that differ only in an index (layers) together; bytes, messages."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardlib.common.tensors import dtype_name
from shardlib.mesh.memories import MEMORIES
from shardlib.mesh.specs import Leaf
from shardlib.plan.memory import ROLE_NAMES, held_bytes, live_bytes, memory_peaks
from shardlib.plan.placement import Placement
from shardlib.plan.program import messages, payload
from shardlib.plan.tables import count, shortened, size, table
from shardlib.plan.value import PlanValue
from shardlib.schedules import peak_in_flight, simulate

_INDEX = re.compile(r"(?<=/)\d+(?=/|$)|^\d+(?=/)")
_MERGED = re.compile(r"\d+(?:[…,]\d+)*(?: … [\d,…]+)?")  # one or several indices


def describe(plan: PlanValue) -> str:
    """The text `print(plan)` shows: leaves and specs, units, bytes per rank, payload per step and axis, the log."""
    staged = plan.stages.axes
    untraced = " (messages between stages are not traced)" if staged and plan.traces is None else ""
    paragraphs = [
        summary(plan),
        table(
            ("parameter", "shape", "dtype", "stored", "gradient", "optimizer"), map(leaf_cells, alike(plan.placements))
        ),
        table(("unit", "leaves", "elements", "param", "grad", "gathered"), _unit_rows(plan), right=5),
        *[_stages(plan, axis) for axis in staged],
        ("Per rank: " if len(plan.views) == 1 else "Per rank, at most: ") + _memory(plan, "device"),
        *[f"In {memory} memory: {_memory(plan, memory)}" for memory in memories_beside(plan)],
        *([_peaks(plan)] if live_bytes(plan) is not None else []),
        f"Payload per step{untraced}: " + _by_axis(payload(plan)),
    ]
    paragraphs += [*_messages(plan, moves=False), *_messages(plan, moves=True)]
    if plan.reductions.owner:
        paragraphs.append(
            f"Once {plan.reductions.owner.name} sums gradients itself: {_by_axis(payload(plan, owned=True))}"
        )
    if plan.gathers:
        how = "as traced" if plan.traces is not None else "assuming each unit once forward and once backward"
        paragraphs.append(f"Gathers per micro-batch: {len(plan.gathers)} ({how})")
        paragraphs += _unused(plan)
    if plan.step.keep is not None:
        kept = ", ".join(unit or "(top)" for unit in plan.tiled.units if unit in plan.kept) or "none fits"
        paragraphs.append(f"Gathered from forward to backward: {kept}: {size(sum(plan.kept.values()))}")
    if plan.step.remat and plan.traces is not None:
        told = plan.step.remat.without_blocks(sum(trace.blocks for trace in plan.traces))
        paragraphs += [told] if told else []
    if plan.traces:
        paragraphs += dict.fromkeys(sentence for trace in plan.traces for sentence in trace.assumptions)
    if plan.claims and plan.claims.log:
        paragraphs.append("\n".join(plan.claims.log))
    return "\n\n".join(paragraphs)


def summary(plan: PlanValue) -> str:
    """The mesh, and how much is planned on it, in a line."""
    mesh = " × ".join(f"{axis}={size}" for axis, size in plan.sizes.items()) or "one device"
    microbatches = plan.step.microbatches
    reduced = f" (reduced at {'the last' if plan.step.sync == 'last' else 'each'})" if microbatches > 1 else ""
    home = plan.part and plan.part.home
    title = "Plan" if home is None else f"Plan of the ranks at {plan.stages.axis}={home}"
    return (
        f"{title} on {mesh}: {count(plan.parameters)} parameters, {len(plan.units)} units, "
        f"{microbatches} micro-batch{'es' * (microbatches > 1)} per step{reduced}"
    )


def _by_axis(sent: Mapping[str, int]) -> str:
    return "   ".join(f"{axis} {size(count)}" for axis, count in sent.items()) or "none"


def _messages(plan: PlanValue, moves: bool) -> Iterator[str]:
    """`message_rows` as a table, if there are any."""
    header, rows = message_rows(plan, moves)
    if rows:
        yield table(header, rows, right=2)


def message_rows(plan: PlanValue, moves: bool) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """What a rank sends to others, or moves between memories: the header and the rows of a table. A row has all messages of a
    kind; with several stages, the numbers of the rank that sends most of that kind."""
    most: dict[tuple[str, str, str, str], tuple[float, int]] = {}
    for view in plan.views:
        totals: dict[tuple[str, str, str, str], tuple[float, int]] = {}
        for message in messages(view, moves=moves):
            if message.bytes and (moves or plan.sizes[message.axis] > 1):
                key = message.what, message.axis, message.when, message.form
                times, sent = totals.get(key, (0, 0))
                totals[key] = times + message.times * message.collectives, sent + message.bytes
        for key, numbers in totals.items():
            most[key] = max(most.get(key, (0, 0)), numbers, key=lambda pair: pair[1])
    rows: list[tuple[str, ...]] = [
        (what, axis, form, when, str(round(times)), size(sent))
        for (what, axis, when, form), (times, sent) in most.items()
    ]
    header = ("moved", "way", "as", "when", "transfers") if moves else ("sent", "axis", "as", "when", "messages")
    return (*header, "bytes"), rows


def _unused(plan: PlanValue) -> Iterator[str]:
    """A sentence on sharded units that the traced batch did not use, if there are any."""
    sharded = {bucket.unit for bucket in plan.tiled.buckets if bucket.fetched}
    idle = [unit for unit in plan.tiled.units if unit in sharded.difference(plan.gathers)]
    if idle:
        yield (
            f"Not used by the traced batch: {', '.join(unit or '(top)' for unit in idle)}. What any rank uses all ranks "
            "gather, so a rank that uses one adds its gathers to every rank's payload"
        )


def _stages(plan: PlanValue, axis: str) -> str:
    """A table with one row per coordinate along the stages' axis: stages, blocks and bytes."""
    schedule, spans, rows = plan.stages.schedule, plan.stages.spans, []
    in_flight = peak_in_flight(schedule)
    for home, view in enumerate(plan.everywhere.views):
        blocks = [spans[stage] for stage in view.local_stages]
        rows.append(
            (
                f"{axis}={home}",
                ", ".join(map(str, view.local_stages)),
                ", ".join(f"{start}…{stop - 1}" if stop - start > 1 else str(start) for start, stop in blocks),
                count(sum(math.prod(shape) for bucket in view.buckets for shape in bucket.shapes)),
                size(held_bytes(view, "param")),
                size(held_bytes(view, "grad")),
                "-" if view.needs is None else size(held_bytes(view, "optimizer")),
                str(in_flight[home]),
            )
        )
    header = ("rank", "stages", "blocks", "elements", "param", "grad", "optimizer", "micro-batches held")
    bubble = f"{schedule.name}: a bubble of {simulate(schedule).bubble:.1%} of the work where F = I = W"
    return f"{table(header, rows, right=5)}\n\n{bubble}"


def memories_beside(plan: PlanValue) -> list[str]:
    """The memories besides the device's in which something lives."""
    used = {memory for bucket in plan.everywhere.buckets for memory in bucket.memory}
    used |= {MEMORIES[memory].works for memory in used}
    return [memory for memory in MEMORIES if memory in used and memory != "device"]


def _memory(plan: PlanValue, memory: str) -> str:
    there = {"comm": bool(plan.residuals), "buffers": bool(plan.buffers)}
    shown = {name: role for role, name in ROLE_NAMES.items() if there.get(role, True)} | {"total": "total"}
    held = {
        name: "(not given)" if role == "optimizer" and plan.needs is None else size(held_bytes(plan, role, memory))
        for name, role in shown.items()
    }
    return "   ".join(f"{name} {count}" for name, count in held.items())


def _peaks(plan: PlanValue) -> str:
    """A line for each memory on what it holds at its peak."""
    views = [memory_peaks(view) for view in plan.views]
    highest = (
        max((view[m] for view in views if m in view), key=lambda peak: peak.bytes, default=None) for m in MEMORIES
    )
    return "\n".join(["At its peak a rank holds, without its batch,", *(f"  {peak}" for peak in highest if peak)])


def _unit_rows(plan: PlanValue) -> list[tuple[str, ...]]:
    """One row per run of consecutive units with equal cells."""
    rows: list[tuple[list[str], tuple[str, ...]]] = []
    gathers = Counter(plan.gathers)
    for unit, buckets in plan.tiled.buckets_of.items():
        elements = sum(math.prod(shape) for bucket in buckets for shape in bucket.shapes)
        param = sum(bucket.size(bucket.param_level) * bucket.dtype.itemsize for bucket in buckets)
        grad = sum(
            bucket.size(bucket.grad_level) * bucket.reduce_dtype.itemsize for bucket in buckets if bucket.trainable
        )
        whole = sum(bucket.size(0) * bucket.dtype.itemsize for bucket in buckets)
        times = gathers[unit]
        cells = (
            str(sum(len(bucket.paths) for bucket in buckets)),
            count(elements),
            size(param),
            size(grad),
            f"{times} × {size(whole)}" if times else "-",
        )
        if rows and rows[-1][1] == cells:
            rows[-1][0].append(unit)
        else:
            rows.append(([unit], cells))
    return [
        (names[0] or "(top)" if len(names) == 1 else f"{names[0]} … {names[-1]} (each)", *cells)
        for names, cells in rows
    ]


@dataclass(frozen=True)
class AlikeLeaves:
    """Leaves of one shape, dtype and specs whose paths differ in indices alone.

    Attributes:
        path: of all of them, such as ``blocks/0…7/weight``.
        members: their placements.
    """

    path: str
    members: Sequence[Placement]

    @property
    def first(self) -> Placement:
        return self.members[0]

    @property
    def block(self) -> str:
        """The path up to the first index; else its first part; "" for a leaf at the top."""
        parts = self.path.split("/")
        for number, part in enumerate(parts[:-1]):
            if _MERGED.fullmatch(part):
                return "/".join(parts[: number + 1])
        return parts[0] if len(parts) > 1 else ""


def alike(placements: Iterable[Placement]) -> list[AlikeLeaves]:
    """The leaves, those together that differ only in an index, in the order of their first ones."""
    found: dict[tuple[Any, ...], tuple[list[tuple[int, ...]], list[Placement]]] = {}
    for placement in placements:
        path = placement.path
        numbers = tuple(map(int, _INDEX.findall(path)))
        pattern = _INDEX.sub("#", path) if numbers else path
        param, grad, optimizer = placement.param, placement.grad, placement.optimizer
        others = (leaf and (leaf.spec, leaf.memory) for leaf in (grad, optimizer))
        roles = (param.spec, param.memory, *others)
        indices, members = found.setdefault((pattern, param.shape, param.dtype, placement.aliases, *roles), ([], []))
        indices.append(numbers)
        members.append(placement)
    return [AlikeLeaves(_merge(key[0], indices), members) for key, (indices, members) in found.items()]


def _merge(pattern: str, numbers: list[tuple[int, ...]]) -> str:
    """``blocks/#/weight`` with indices 0..7 -> ``blocks/0…7/weight``."""
    for column in range(len(numbers[0])):
        values = sorted({row[column] for row in numbers})
        whole = values == list(range(values[0], values[-1] + 1))
        shown = f"{values[0]}…{values[-1]}" if whole and len(values) > 1 else ",".join(map(str, values))
        pattern = pattern.replace("#", shown, 1)
    return pattern


def spec_text(leaf: Leaf) -> str:
    """The spec of a leaf, with its memory where that is not the device's."""
    spec = "whole" if repr(leaf.spec) == "P()" else repr(leaf.spec)
    return spec if leaf.memory == "device" else f"{spec} in {leaf.memory} memory"


def leaf_cells(leaves: AlikeLeaves) -> tuple[str, ...]:
    """Path, shape, dtype, and the specs as a parameter, as a gradient and in the optimizer."""
    placement = leaves.first
    tied = f" (tied: {', '.join(placement.aliases)})" if placement.aliases else ""
    return (
        leaves.path + tied,
        "×".join(map(str, placement.param.shape)) or "scalar",
        dtype_name(placement.param.dtype),
        spec_text(placement.param),
        spec_text(placement.grad) if placement.grad else "frozen",
        spec_text(placement.optimizer) if placement.optimizer else "-",
    )


def blocks_of(leaves: Iterable[AlikeLeaves]) -> dict[str, list[AlikeLeaves]]:
    """Block -> its leaves, in order."""
    found: dict[str, list[AlikeLeaves]] = {}
    for each in leaves:
        found.setdefault(shortened(each.block, 60), []).append(each)
    return found
