"""Print what a GPT would hold and send on a mesh, without running it."""

from __future__ import annotations

import argparse

import torch

from shardlib import optim
from shardlib.commands import model
from shardlib.mesh import abstract_mesh
from shardlib.models import gpt
from shardlib.preview import make_plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mesh", default="data=8", help="axes and sizes, such as data=8")
    parser.add_argument("--batch", type=int, default=8, help="rows per rank")
    model.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    config = model.config(args)
    tokens = torch.zeros((args.batch, config.sequence), dtype=torch.int64)
    plan = make_plan(
        gpt.init(config, device="meta"),
        abstract_mesh(**parse_mesh(args.mesh)),
        model.transform(args),
        loss_fn=gpt.make_loss(config),
        batch={"tokens": tokens, "targets": tokens},
        optimizer=optim.adamw(1e-3),
    )
    print(plan)
    return 0


def parse_mesh(text: str) -> dict[str, int]:
    """``"data=4,model=2"`` -> ``{"data": 4, "model": 2}``.

    Raises:
        SystemExit: not of that form.
    """
    try:
        return {name.strip(): int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise SystemExit(f"--mesh {text!r}: write axes and sizes like data=4 or data=4,node=2") from None
