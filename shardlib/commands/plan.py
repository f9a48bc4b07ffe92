"""Print the plan of a GPT on a mesh, without running it."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from shardlib import optim, schedules
from shardlib.commands import model, pictures
from shardlib.make_plan import make_plan
from shardlib.mesh.mesh import abstract_mesh
from shardlib.report.timeline import draw_timeline, timeline_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mesh", default="data=8", help="axes and sizes, such as data=4,model=2")
    parser.add_argument("--batch", type=int, default=8, help="rows per rank")
    parser.add_argument("--timeline", type=Path, help="PNG file for a drawing of the pipeline's schedule")
    model.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    config = model.config(args)
    shape = model.parse_mesh(args.mesh)
    tokens = torch.zeros((args.batch, config.sequence), dtype=torch.int64)
    plan = make_plan(
        model.init(args, shape, device="meta"),
        abstract_mesh(**shape),
        model.transform(args, shape),
        loss_fn=model.loss(config, shape),
        batch={"tokens": tokens, "targets": tokens},
        optimizer=optim.adamw(1e-3),
    )
    print(plan)
    if plan.stages.axes:
        timeline = schedules.simulate(plan.stages.schedule)
        print(f"\n{timeline_text(timeline)}")
        if args.timeline:
            print()
            pictures.draw(print, "timeline", args.timeline, lambda: draw_timeline(timeline, args.timeline))
    elif args.timeline:
        raise SystemExit("--timeline draws a pipeline's schedule: give the mesh an axis pipe, such as --mesh pipe=4")
    return 0
