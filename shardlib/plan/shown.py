"""A plan in a notebook and in a terminal: the mesh drawn, bytes as bars, leaves folded by block, messages, stages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from shardlib.common.display.colours import GREY, ROLES
from shardlib.common.display.panels import Fold, Grid, Panel, Paragraph, Picture, Title
from shardlib.common.display.svg import bar_chart
from shardlib.common.tensors import dtype_name
from shardlib.common.thresholds import Threshold
from shardlib.mesh.memories import MEMORIES
from shardlib.mesh.picture import mesh_picture
from shardlib.plan.memory import ROLE_NAMES, held_bytes, memory_peaks
from shardlib.plan.program import payload
from shardlib.plan.tables import count, shortened, size
from shardlib.plan.text import AlikeLeaves, alike, blocks_of, leaf_cells, memories_beside, message_rows, summary
from shardlib.plan.value import PlanValue

_BLOCKS, _ROWS = 60, 40  # of a tree, and of a block, that are shown; what is left out is counted
_NAME = 80  # characters of a path
_BUCKETS = Threshold(2000)  # whose messages are counted


def plan_panels(plan: PlanValue) -> Iterator[Panel]:
    """What a plan shows."""
    yield Title(summary(plan))
    yield mesh_picture(plan.sizes)
    yield bytes_picture(plan)
    yield from leaf_folds(plan, "param")
    if len(plan.buckets) > _BUCKETS():
        yield Paragraph(
            f"The messages of {len(plan.buckets):,} buckets are not counted here: plan.payload() counts them"
        )
        return
    sent = [(axis, str(plan.sizes[axis]), size(number)) for axis, number in payload(plan).items()]
    if sent:
        yield Grid(("axis", "ranks", "a rank sends"), sent, 2, "Payload per step")
    for moves, line in ((False, "Messages"), (True, "Copies between memories")):
        header, rows = message_rows(plan, moves)
        if rows:
            yield Fold(f"{line} ({len(rows)} kinds)", [Grid(header, rows, 2)])
    if plan.stages.axes and plan.part is None:
        yield from plan.stages.schedule.shown()
    if plan.claims and plan.claims.log:
        lines = [shortened(line, 300) for line in plan.claims.log[:_ROWS]]
        yield Fold("What each transform wrote", [Paragraph("\n".join(lines), code=True)])


def bytes_picture(plan: PlanValue) -> Picture:
    """Bytes of a rank as bars: of the state in each memory, and at the peak of a step if the plan was traced."""
    rows: dict[str, dict[str, float]] = {}
    for memory in ("device", *memories_beside(plan)):
        rows[f"state, {memory}"] = {
            name: held_bytes(plan, role, memory)
            for role, name in ROLE_NAMES.items()
            if role != "optimizer" or plan.needs is not None
        }
    if plan.traces is not None and plan.needs is not None:
        for memory in MEMORIES:
            peaks = [peaks[memory] for peaks in map(memory_peaks, plan.views) if memory in peaks]
            if peaks:
                highest = max(peaks, key=lambda peak: peak.bytes)
                rows[f"peak, {memory}"] = {name: float(held) for name, held in highest.parts.items()}
    rows = {name: parts for name, parts in rows.items() if sum(parts.values())}
    names = dict.fromkeys(name for parts in rows.values() for name in parts if parts[name])
    colours = {name: ROLES.get(name, ROLES["live"] if "activations" in name else GREY) for name in names}
    colours |= {name: GREY for parts in rows.values() for name in parts if name not in names}
    title = "Bytes of a rank" if len(plan.views) == 1 else "Bytes of a rank, at most"
    lines = [f"{title} by memory"]
    for name, parts in rows.items():
        held = "   ".join(f"{part} {size(int(number))}" for part, number in parts.items() if number)
        lines.append(f"{name}: {size(int(sum(parts.values())))}   ({held})")
    svg = bar_chart(rows, colours, f"{title} by memory", value_format=lambda number: size(round(number)))
    return Picture(svg, "\n".join(lines), {name: colours[name] for name in names})


def leaf_folds(plan: PlanValue, role: str, *, local: bool = False) -> Iterator[Panel]:
    """The leaves in ``role`` ("param", or "grad" for the optimizer's layout), folded by block.

    Args:
        local: shows the shapes of this rank's shards, in place of those of whole leaves.
    """
    here = [p for p in plan.placements if p.bucket in plan.bucket_of and (role == "param" or p.optimizer)]
    found = blocks_of(alike(here))
    staged = plan.stages.axes and plan.part is None
    holds = "one rank of every stage, together:" if staged else "a rank holds"
    for name, leaves in list(found.items())[:_BLOCKS]:
        leaf_count = sum(len(each.members) for each in leaves)
        elements = sum(math.prod(each.first.param.shape) * len(each.members) for each in leaves)
        held = sum(_held(plan, each, role) for each in leaves)
        line = (
            f"{shortened(name, _NAME) or '(top)'}: {leaf_count:,} {'leaves' if leaf_count != 1 else 'leaf'}, "
            f"{count(elements)} elements, {holds} {size(held)}"
        )
        specs = dict.fromkeys(leaf_cells(each)[3] for each in leaves)
        grid = _leaf_grid(plan, leaves[:_ROWS], name, role, local, len(leaves) - _ROWS)
        yield Fold(line, [grid], hint=f"stored {', '.join(list(specs)[:4])}")
    if len(found) > _BLOCKS:
        left = list(found.values())[_BLOCKS:]
        held = sum(_held(plan, each, role) for leaves in left for each in leaves)
        leaves_left = sum(len(each.members) for leaves in left for each in leaves)
        yield Paragraph(f"… and {leaves_left:,} leaves in {len(left):,} further blocks, {holds} {size(held)}")


def _leaf_grid(plan: PlanValue, leaves: Sequence[AlikeLeaves], block: str, role: str, local: bool, more: int) -> Grid:
    rows, hints = [], []
    for each in leaves:
        path, shape, dtype, stored, grad, optimizer = leaf_cells(each)
        if local:
            shape = "×".join(map(str, plan.local_shape(each.first, role))) or "scalar"
            dtype = dtype_name(plan.bucket_of[each.first.bucket].dtype)
        name = path.removeprefix(f"{block}/")
        times = f"{len(each.members):,} ×" if len(each.members) > 1 else ""
        spec = stored if role == "param" else optimizer
        rows.append((shortened(name, _NAME), times, shape, dtype, spec, size(_held(plan, each, role))))
        hints.append(f"{shortened(path, 200)}: stored {stored}; gradient {grad}; optimizer {optimizer}")
    header = ("leaf", "", "shard" if local else "shape", "dtype", "spec", "bytes")
    return Grid(header, rows, 1, hints=hints, more=max(more, 0))


def _held(plan: PlanValue, leaves: AlikeLeaves, role: str) -> int:
    """Bytes that a rank holds of some leaves, as stored."""
    bucket = plan.bucket_of[leaves.first.bucket]
    return len(leaves.members) * math.prod(plan.local_shape(leaves.first, role)) * bucket.dtype.itemsize
