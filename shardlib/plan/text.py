"""A plan as text: who holds what, bytes, messages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shardlib.schedules import Pipeline, peak_in_flight, simulate

if TYPE_CHECKING:
    from shardlib.plan.placement import Placement
    from shardlib.plan.plan import Plan


def describe(plan: Plan) -> str:
    """The text `print(plan)` shows: leaves and specs, units, bytes per rank, payload per step and axis, the log."""
    mesh = " × ".join(f"{axis}={size}" for axis, size in plan.sizes.items()) or "one device"
    parts = [
        f"{_title(plan)} on {mesh}: {count(plan.parameters)} parameters, {len(plan.units)} units, "
        f"{plan.microbatches} micro-batch{'es' * (plan.microbatches > 1)} per step"
        + (f" (reduced at {'the last' if plan.sync == 'last' else 'each'})" if plan.microbatches > 1 else ""),
        table(("parameter", "shape", "dtype", "stored", "gradient", "optimizer"), _leaf_rows(plan.placements)),
        table(("unit", "leaves", "elements", "param", "grad", "gathered"), _unit_rows(plan), right=5),
        *([_stages(plan, plan.pipeline)] if plan.pipeline else []),
        ("Per rank: " if len(plan.views) == 1 else "Per rank, at most: ") + "   ".join(_memory(plan)),
        *([_live(plan)] if plan.live_bytes is not None else []),
        f"Payload per step{_untold(plan)}: "
        + ("   ".join(f"{axis} {size(sent)}" for axis, sent in plan.payload().items()) or "none"),
    ]
    own = {axis: max((sent.get(axis, 0) for sent in plan.optimizer_payload or ()), default=0) for axis in plan.sizes}
    if any(own.values()):
        told = "   ".join(f"{axis} {size(most)}" for axis, most in own.items() if most)
        parts.append(f"Of it, the optimizer's own: {told}")
    if plan.owned:
        sent = plan.payload(owned=True)
        parts.append(
            f"Once {plan.owned.by} sums by itself: {'   '.join(f'{axis} {size(n)}' for axis, n in sent.items())}"
        )
    if plan.gathers():
        how = (
            "as traced"
            if plan.touches is not None or plan.traces is not None
            else "taking each unit once forward and once backward"
        )
        parts.append(f"Gathers per micro-batch: {len(plan.gathers())} ({how})")
        if unused := _unused(plan):
            parts.append(unused)
    if plan.log:
        parts.append("\n".join(plan.log))
    return "\n\n".join(parts)


def _unused(plan: Plan) -> str:
    """A sentence on units that could be gathered, and that the traced batch did not use."""
    sharded = {bucket.unit for bucket in plan.buckets if bucket.param_level}
    idle = [unit for unit in plan.units if unit in sharded and unit not in plan.gathers()]
    if not idle:
        return ""
    return (
        f"Not used by the traced batch: {', '.join(unit or '(top)' for unit in idle)}. What any rank uses all ranks "
        "gather, so a rank that uses one adds its gathers to every rank's payload"
    )


def _title(plan: Plan) -> str:
    if plan.pipeline is None or plan.home is None:
        return "Plan"
    return f"Plan of the ranks at {plan.pipeline.axis}={plan.home}"


def _untold(plan: Plan) -> str:
    return " (what passes between stages not traced)" if plan.pipeline and plan.traces is None else ""


def _stages(plan: Plan, pipeline: Pipeline) -> str:
    """One row per coordinate along the pipeline's axis: its stages, and what its ranks hold."""
    schedule, rows = pipeline.schedule, []
    held = peak_in_flight(schedule)
    for home, view in enumerate(plan.everywhere.views):
        spans = [pipeline.spans[stage] for stage in schedule.stages_of(home)]
        spent = view.optimizer_bytes
        rows.append(
            (
                f"{pipeline.axis}={home}",
                ", ".join(map(str, schedule.stages_of(home))),
                ", ".join(f"{start}…{stop - 1}" if stop - start > 1 else str(start) for start, stop in spans),
                count(sum(math.prod(shape) for bucket in view.buckets for shape in bucket.shapes)),
                size(view.bytes("param")),
                size(view.bytes("grad")),
                "-" if spent is None else size(max(spent)),
                str(held[home]),
            )
        )
    header = ("rank", "stages", "blocks", "elements", "param", "grad", "optimizer", "micro-batches held")
    bubble = f"{schedule.name}: a bubble of {simulate(schedule).bubble:.1%} of the work where F = I = W"
    return f"{table(header, rows, right=5)}\n\n{bubble}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> str:
    """Aligned columns; the last ``right`` of them to the right."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    left = len(header) - right

    def line(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(padded).rstrip()

    return "\n".join([line(lines[0]), "  ".join("─" * width for width in widths), *map(line, lines[1:])])


def count(number: int) -> str:
    for scale, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= scale:
            return f"{number / scale:.4g}{letter}"
    return str(number)


def size(number: int) -> str:
    """Bytes in decimal units, as the papers print them."""
    for scale, letter in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= scale:
            return f"{number / scale:.4g} {letter}"
    return f"{number} B"


def _memory(plan: Plan) -> list[str]:
    told = [f"parameters {size(plan.bytes('param'))}", f"gradients {size(plan.bytes('grad'))}"]
    told.append(
        "optimizer (not given)" if plan.optimizer_bytes is None else f"optimizer {size(plan.bytes('optimizer'))}"
    )
    told += [f"errors {size(plan.bytes('comm'))}"] if plan.errors else []
    told += [f"buffers {size(plan.bytes('buffers'))}"] if plan.buffers else []
    return [*told, f"in all {size(plan.bytes('total'))}"]


def _live(plan: Plan) -> str:
    """What a micro-batch takes beside, and what that comes to."""
    live = plan.live_bytes or 0
    return (
        f"Beside them, at most: activations of a micro-batch, and what is gathered for it, {size(live)}   "
        f"with these {size(plan.bytes('total') + live)}"
    )


def _leaf_rows(placements: Sequence[Placement]) -> list[tuple[str, ...]]:
    """One row per leaf; leaves that differ only in an index (layers) share a row."""
    rows: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for placement in placements:
        pattern = re.sub(r"(?<=/)\d+(?=/|$)|^\d+(?=/)", "#", placement.path)
        numbers = tuple(int(found) for found in re.findall(r"(?<=/)\d+(?=/|$)|^\d+(?=/)", placement.path))
        shape = "×".join(map(str, placement.param.shape)) or "scalar"
        tied = f" (tied: {', '.join(placement.aliases)})" if placement.aliases else ""
        cells = (
            pattern + tied,
            shape,
            str(placement.param.dtype).removeprefix("torch."),
            _spec(placement.param.spec),
            _spec(placement.grad.spec) if placement.grad else "frozen",
            _spec(placement.optimizer.spec) if placement.optimizer else "-",
        )
        rows.setdefault(cells, []).append(numbers)
    return [(_merge(cells[0], numbers), *cells[1:]) for cells, numbers in rows.items()]


def _spec(spec: object) -> str:
    return "whole" if repr(spec) == "P()" else repr(spec)


def _merge(pattern: str, numbers: list[tuple[int, ...]]) -> str:
    """``blocks/#/weight`` with indices 0..7 -> ``blocks/0…7/weight``."""
    for column in range(len(numbers[0])):
        values = sorted({row[column] for row in numbers})
        whole = values == list(range(values[0], values[-1] + 1))
        told = (
            str(values[0]) if len(values) == 1 else f"{values[0]}…{values[-1]}" if whole else ",".join(map(str, values))
        )
        pattern = pattern.replace("#", told, 1)
    return pattern


def _unit_rows(plan: Plan) -> list[tuple[str, ...]]:
    """One row per run of units that look alike."""
    rows: list[tuple[list[str], tuple[str, ...]]] = []
    gathers = plan.gathers()
    for unit in plan.units:
        buckets = [bucket for bucket in plan.buckets if bucket.unit == unit]
        elements = sum(math.prod(shape) for bucket in buckets for shape in bucket.shapes)
        param = sum(bucket.size(bucket.param_level) * bucket.dtype.itemsize for bucket in buckets)
        grad = sum(
            bucket.size(bucket.grad_level) * bucket.reduce_dtype.itemsize for bucket in buckets if bucket.trainable
        )
        whole = sum(bucket.size(0) * bucket.dtype.itemsize for bucket in buckets)
        times = gathers.count(unit)
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
