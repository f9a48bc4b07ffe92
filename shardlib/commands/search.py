"""The search for a GPT's quickest plan: `shardlib plan --search`."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardlib import optim
from shardlib.commands import model, pictures
from shardlib.commands.arguments import PLANNED, WrongArguments, natural, positive, wrong_arguments
from shardlib.mesh.launch import launch
from shardlib.mesh.mesh import Mesh
from shardlib.models import gpt
from shardlib.models.gpt import GPTConfig
from shardlib.plan.machine import Machine
from shardlib.plan.tables import table
from shardlib.search import Choice, Search, Space, search_plan
from shardlib.shard import shard
from shardlib.train import make_train_step

_STEPS = 3  # by which a choice is verified, after a first one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search: of all meshes and transforms, in place of --mesh and sharding")
    group.add_argument("--search", action="store_true", help="find the quickest plan that fits a machine")
    group.add_argument("--machine", type=Path, help="JSON file, which `shardlib doctor --measure --out` writes")
    group.add_argument("--ranks", type=positive, default=8, help="of all hosts; --batch has rows of each")
    group.add_argument(
        "--verify", type=natural, default=0, metavar="N", help="run the best N for a few steps on ranks here"
    )
    group.add_argument("--front", type=Path, help="PNG file for a drawing of time against memory")


def run(args: argparse.Namespace) -> int:
    if args.machine is None:
        raise WrongArguments(
            "--search needs a machine: --machine FILE, which `shardlib doctor --measure --out FILE` writes"
        )
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
        pictures.draw(print, "front", args.front, lambda: found.draw(args.front))
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
