"""Print the plan of a GPT on a mesh, without running it; or search for the quickest plan on a machine."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from shardlib import optim, schedules
from shardlib.commands import model, pictures, search
from shardlib.commands.arguments import WrongArguments, positive, size
from shardlib.errors import ShardlibError
from shardlib.make_plan import make_plan
from shardlib.mesh.mesh import abstract_mesh
from shardlib.report.timeline import draw_timeline, timeline_text

# Arguments of a plan alone, and of a search alone.
_PLANNED = (
    "mesh",
    "timeline",
    "stage",
    "schedule",
    "microbatches",
    "remat",
    "offload",
    "offload_params",
    "offload_folder",
    "precision",
)
_SEARCHED = ("machine", "ranks", "verify", "front")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mesh", default="data=8", help="axes and sizes, such as data=4,model=2")
    parser.add_argument("--batch", type=positive, default=8, help="rows per rank")
    memory = parser.add_argument_group(
        "limits: a plan that needs more is refused, with the cheapest change that fits; a search takes them in place of the "
        "machine's"
    )
    memory.add_argument("--device-memory", type=size, metavar="SIZE", help="of each rank's device, such as 24GiB")
    memory.add_argument("--host-memory", type=size, metavar="SIZE", help="of a host, which its ranks share")
    memory.add_argument("--disk", type=size, metavar="SIZE", help="of a host, for offloaded states")
    memory.add_argument(
        "--ranks-per-host", type=positive, metavar="N", help="ranks that share a host; by default all, or the machine's"
    )
    parser.add_argument("--timeline", type=Path, help="PNG file for a drawing of the pipeline's schedule")
    search.add_arguments(parser)
    model.add_arguments(parser)
    parser.set_defaults(left={name: parser.get_default(name) for name in (*_PLANNED, *_SEARCHED)})


def run(args: argparse.Namespace) -> int:
    if unused := [name for name in (_PLANNED if args.search else _SEARCHED) if getattr(args, name) != args.left[name]]:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        why = "--search chooses the mesh and the sharding" if args.search else "without --search nothing is searched"
        raise WrongArguments(f"{why}: leave out {options}")
    if args.search:
        return search.run(args)
    if args.remat == "auto" and args.device_memory is None:
        raise WrongArguments(
            "--remat auto recomputes as few blocks as fit: give --device-memory, such as 24GiB, or --remat "
            "for all blocks"
        )
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
        raise WrongArguments(f"{refusal}{note}") from None
    print(plan)
    if plan.stages.axes:
        timeline = schedules.simulate(plan.stages.schedule)
        print(f"\n{timeline_text(timeline)}")
        if args.timeline:
            print()
            pictures.draw(print, "timeline", args.timeline, lambda: draw_timeline(timeline, args.timeline))
    elif args.timeline:
        raise WrongArguments(
            "--timeline draws a pipeline's schedule: give the mesh an axis pipe, such as --mesh pipe=4"
        )
    return 0
