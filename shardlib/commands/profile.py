"""Show where the time, the operations and the memory of a training step go, on every rank that torchrun started."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from shardlib import optim
from shardlib.commands import job, model
from shardlib.commands.arguments import draw_picture, positive
from shardlib.report.profile import Profile, profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=positive, default=5, help="recorded steps, after two others")
    job.add_arguments(parser, "runs/profile")


def run(args: argparse.Namespace) -> int:
    mesh = model.running_mesh(args)
    work = job.Job(args, mesh, optim.constant_schedule(1e-4))
    found = profile(work.train_step, work.state, work.batch(0), steps=args.steps, plan=work.plan)
    if mesh.rank == 0:
        print(found, found.comm, found.memory, sep="\n\n")
        _write(args, found)
    return 0


def _write(args: argparse.Namespace, found: Profile) -> None:
    """Writes the trace and the pictures."""
    trace = args.out / "trace.json"
    found.trace(trace)
    print(f"\ntrace, for ui.perfetto.dev: {trace}")
    drawings: dict[str, Callable[..., None]] = {
        "profile": found.plot,
        "exchanges": found.comm.plot,
        "memory": found.memory.plot,
    }
    for name, draw in drawings.items():
        path = args.out / f"{name}.png"
        draw_picture(print, name, path, lambda draw=draw, path=path: draw(path))  # type: ignore[misc]
