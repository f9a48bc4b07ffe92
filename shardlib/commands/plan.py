"""Print the plan of a GPT on a mesh, without running it; or search for the quickest plan on a machine."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from shardlib import optim, schedules
from shardlib.commands import model, pictures, search
from shardlib.errors import ShardlibError
from shardlib.make_plan import make_plan
from shardlib.mesh.mesh import abstract_mesh
from shardlib.plan.tables import parse_size
from shardlib.report.timeline import draw_timeline, timeline_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mesh", default="data=8", help="axes and sizes, such as data=4,model=2")
    parser.add_argument("--batch", type=model.positive, default=8, help="rows per rank")
    memory = parser.add_argument_group("limits: a plan that needs more is refused, with the cheapest change that fits")
    memory.add_argument("--device-memory", type=_size, metavar="SIZE", help="of each rank's device, such as 24GiB")
    memory.add_argument("--host-memory", type=_size, metavar="SIZE", help="of a host, which its ranks share")
    memory.add_argument("--disk", type=_size, metavar="SIZE", help="of a host, for offloaded states")
    memory.add_argument(
        "--ranks-per-host", type=model.positive, metavar="N", help="ranks that share a host; by default all"
    )
    parser.add_argument("--timeline", type=Path, help="PNG file for a drawing of the pipeline's schedule")
    search.add_arguments(parser)
    model.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.search:
        return search.run(args)
    config = model.config(args)
    tokens = torch.zeros((args.batch, config.sequence), dtype=torch.int64)
    try:
        shape = model.parse_mesh(args.mesh)
        plan = make_plan(
            model.init(args, shape, device="meta"),
            abstract_mesh(**shape),
            model.transform(args, shape),
            loss_fn=model.loss(config, shape),
            batch={"tokens": tokens, "targets": tokens},
            optimizer=optim.adamw(1e-3),
            device_memory=args.device_memory,
            host_memory=args.host_memory,
            disk=args.disk,
            ranks_per_host=args.ranks_per_host,
        )
    except ShardlibError as refusal:
        limited = any((args.device_memory, args.host_memory, args.disk))
        note = "\nWhat begins with sl. is Python, for sl.make_plan and sl.shard" if limited else ""
        raise SystemExit(f"shardlib plan: {refusal}{note}") from None
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


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
