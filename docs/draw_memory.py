"""The README's picture: `python docs/draw_memory.py` writes docs/memory.png, what ranks hold over the time of a step.

Everything drawn is the plan's: state and traces give bytes, the schedule gives the order, counted operations give durations.
Nothing runs.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import shardlib as sl
from shardlib.common.optional import new_figure, save_figure
from shardlib.models import gpt
from shardlib.schedules import Costs, Kind, Timeline, simulate

# Okabe and Ito's colours, which stay apart in every common kind of colour blindness and in grey.
COLOURS = {
    "parameters": "#0072B2",
    "optimizer": "#56B4E9",
    "gradients": "#009E73",
    "activations of micro-batches in flight": "#F0E442",
    "the micro-batch being computed": "#D55E00",
}


def planned(config: gpt.GPTConfig, rows: int, ranks: dict[str, int], microbatches: int) -> Any:
    """The plan of a GPT in stages, of ``rows`` rows a rank."""
    shape = (rows, config.sequence)
    return sl.make_plan(
        gpt.to_blocks(gpt.init(config, device="meta")),
        sl.abstract_mesh(**ranks),
        sl.chain(sl.pipeline("1f1b", microbatches), sl.zero(1), sl.precision("bf16")),
        loss_fn=gpt.make_sequential(config),
        batch={name: torch.empty(shape, dtype=torch.int64, device="meta") for name in ("tokens", "targets")},
        optimizer=sl.optim.adamw(3e-4),
    )


def clock(plan: Any) -> Timeline:
    """When each action runs, by the operations that the traces count; 1 is the longest stage's forward."""
    forward = [trace.flops[0] for trace in plan.traces]
    half = [trace.flops[1] / 2 for trace in plan.traces]
    unit = max(forward)
    costs = Costs([each / unit for each in forward], [each / unit for each in half], [each / unit for each in half])
    return simulate(plan.stages.schedule, costs)


def held(plan: Any, timeline: Timeline) -> Iterator[list[tuple[float, tuple[int, ...]]]]:
    """For each stage's rank: (time, bytes of each of `COLOURS`) from that time on."""
    for stage, events in enumerate(timeline.events):
        rank, trace, flying = plan.at({"pipe": stage}), plan.traces[stage], 0
        state = tuple(rank.bytes(role) for role in ("param", "optimizer", "grad"))
        points = [(0.0, (*state, 0, 0))]
        for (_, kind, _), start, end in events:
            during = flying - (kind is not Kind.F)  # the one that is computed is counted with what computes it
            points.append((start, (*state, during * trace.kept, trace.live)))
            flying = during + (kind is Kind.F)
            points.append((end, (*state, flying * trace.kept, 0)))
        yield [*points, (timeline.makespan, points[-1][1])]


def draw(plan: Any, path: Path) -> None:
    """A panel for each stage's ranks."""
    timeline = clock(plan)
    figure = new_figure(10, 5.6)
    panels = figure.subplots(len(timeline.events), sharex=True, sharey=True)
    for stage, (axes, points) in enumerate(zip(panels, held(plan, timeline))):
        times = [time for time, _ in points]
        layers = [[values[layer] / 1e9 for _, values in points] for layer in range(len(COLOURS))]
        axes.stackplot(times, layers, step="post", colors=COLOURS.values(), labels=COLOURS, linewidth=0)
        peak = plan.at({"pipe": stage}).peak_bytes / 1e9
        axes.axhline(peak, color="#333333", linewidth=0.9, linestyle=(0, (4, 3)))
        axes.annotate(f"peak {peak:.2f} GB", (timeline.makespan, peak), (0, 3), textcoords="offset points", ha="right")
        axes.set_ylabel(f"stage {stage}\nGB per rank", fontsize=9)
        axes.set_xlim(0, timeline.makespan)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(0, 1.25 * max(view.peak_bytes for view in plan.views) / 1e9)
    panels[-1].set_xlabel(
        "time within a step, by counted operations (1 = the longest stage's forward of a micro-batch)"
    )
    sizes = " × ".join(f"{axis}={size}" for axis, size in plan.sizes.items())
    figure.suptitle(
        f"Planned memory of a GPT of {plan.parameters / 1e9:.1f} billion parameters, {sizes}, 1F1B, ZeRO-1, bf16"
    )
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    save_figure(figure, path)


if __name__ == "__main__":
    config = gpt.GPTConfig(vocab=50257, layers=24, width=2048, heads=16, sequence=1024)
    draw(planned(config, 8, {"data": 8, "pipe": 4}, 8), Path(__file__).with_name("memory.png"))
