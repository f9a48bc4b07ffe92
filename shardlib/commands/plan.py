"""Print the plan of a GPT on a mesh, without running it; or search for the quickest plan on a machine."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardlib import optim, schedules
from shardlib.commands import model
from shardlib.commands.arguments import (
    PLANNED,
    WrongArguments,
    draw_picture,
    natural,
    positive,
    size,
    wrong_arguments,
)
from shardlib.errors import ShardlibError
from shardlib.mesh.launch import launch
from shardlib.mesh.mesh import Mesh, abstract_mesh
from shardlib.models import gpt
from shardlib.models.gpt import GPTConfig
from shardlib.plan.machine import Machine
from shardlib.plan.tables import table
from shardlib.planning import make_plan
from shardlib.report.timeline import draw_timeline, timeline_text
from shardlib.search import Choice, Search, Space, search_plan
from shardlib.sharding import shard
from shardlib.train import make_train_step

_STEPS = 3  # by which a choice is verified, after a first one
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
    group = parser.add_argument_group("search: of all meshes and transforms, in place of --mesh and sharding")
    group.add_argument("--search", action="store_true", help="find the quickest plan that fits a machine")
    group.add_argument("--machine", type=Path, help="JSON file, which `shardlib doctor --measure --out` writes")
    group.add_argument("--ranks", type=positive, default=8, help="of all hosts; --batch has rows of each")
    group.add_argument(
        "--verify", type=natural, default=0, metavar="N", help="run the best N for a few steps on ranks here"
    )
    group.add_argument("--front", type=Path, help="PNG file for a drawing of time against memory")
    model.add_arguments(parser)
    parser.set_defaults(left={name: parser.get_default(name) for name in (*_PLANNED, *_SEARCHED)})


def run(args: argparse.Namespace) -> int:
    if unused := [name for name in (_PLANNED if args.search else _SEARCHED) if getattr(args, name) != args.left[name]]:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        why = "--search chooses the mesh and the sharding" if args.search else "without --search nothing is searched"
        raise WrongArguments(f"{why}: leave out {options}")
    if args.search:
        return _search(args)
    if args.remat == "auto" and args.device_memory is None:
        raise WrongArguments(
            "--remat auto recomputes as few blocks as fit: give --device-memory, such as 24GiB, or --remat for all blocks"
        )
    config = model.config(args)
    try:
        shape = model.parse_mesh(args.mesh)
        plan = make_plan(
            model.init(args, shape, device="meta"),
            abstract_mesh(**shape),
            model.transform(args, shape),
            loss_fn=model.loss(config, shape),
            batch=_batch(config, args.batch, "cpu"),
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
            draw_picture(print, "timeline", args.timeline, lambda: draw_timeline(timeline, args.timeline))
    elif args.timeline:
        raise WrongArguments("--timeline draws a pipeline's schedule: give the mesh an axis pipe: --mesh pipe=4")
    return 0


def _search(args: argparse.Namespace) -> int:
    if args.machine is None:
        raise WrongArguments("--search needs a machine: --machine FILE, of shardlib doctor --measure --out FILE")
    config = model.config(args)
    with wrong_arguments():
        machine = _machine(args)
    with wrong_arguments(*PLANNED):
        found = search_plan(
            gpt.make_sequential(config),
            gpt.to_blocks(gpt.init(config, device="meta")),
            machine,
            _batch(config, args.batch * args.ranks, "meta"),
            optimizer=optim.adamw(1e-3),
            ranks=args.ranks,
            rules=gpt.slicing_rules(config, blocks=True),
            space=Space() if machine.disk is None else Space(offloads=(*Space().offloads, "disk")),
        )
    print(found)
    if not found.front:
        return 1
    if args.front:
        draw_picture(print, "front", args.front, lambda: found.draw(args.front))
    if args.verify:
        print(f"\n{_verified(config, found, args.verify)}")
    return 0


def _machine(args: argparse.Namespace) -> Machine:
    """The machine of the file, with the limits of the arguments where these are given."""
    given = {
        "memory": args.device_memory,
        "host_memory": args.host_memory,
        "disk": args.disk,
        "ranks_per_host": args.ranks_per_host,
    }
    return replace(Machine.read(args.machine), **{name: value for name, value in given.items() if value is not None})


def _verified(config: GPTConfig, found: Search, best: int) -> str:
    """Predicted and measured seconds of a step, of the best choices."""
    rows = []
    for each in found.front[:best]:
        measured = launch(_measured, config, each.choice, mesh=each.choice.mesh)[0]
        rows.append((f"{each.seconds:.4g} s", f"{measured:.4g} s", f"{each.seconds / measured:.2f}", str(each.choice)))
    return table(("predicted", "measured", "ratio", "choice"), rows)


def _measured(mesh: Mesh, config: GPTConfig, choice: Choice) -> float:
    """Seconds of a step on ranks, the median of some."""
    parallel = choice.transform(gpt.slicing_rules(config, blocks=True))
    params = shard(lambda: gpt.to_blocks(gpt.init(config)), mesh, parallel)
    state, step = make_train_step(gpt.make_sequential(config), params, optim.adamw(1e-3))
    batch = _batch(config, choice.rows * choice.microbatches, mesh.device)
    seconds = []
    for _ in range(1 + _STEPS):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        metrics["loss"].item()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _batch(config: GPTConfig, rows: int, device: Any) -> dict[str, torch.Tensor]:
    tokens = torch.zeros((rows, config.sequence), dtype=torch.int64, device=device)
    return {"tokens": tokens, "targets": tokens}
