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
    parser.add_argument("--mesh", default="data=8", help="axes and sizes, such as data=4,model=2")
    parser.add_argument("--batch", type=int, default=8, help="rows per rank")
    model.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    config = model.config(args)
    shape = model.parse_mesh(args.mesh)
    tokens = torch.zeros((args.batch, config.sequence), dtype=torch.int64)
    plan = make_plan(
        gpt.init(config, device="meta"),
        abstract_mesh(**shape),
        model.transform(args, shape),
        loss_fn=gpt.make_loss(config),
        batch={"tokens": tokens, "targets": tokens},
        optimizer=optim.adamw(1e-3),
    )
    print(plan)
    return 0
