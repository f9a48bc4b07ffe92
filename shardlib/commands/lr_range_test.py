"""Find a learning rate for the main job: raise it from step to step until the loss diverges."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch

from shardlib import optim
from shardlib.commands import job, model
from shardlib.commands.arguments import WrongArguments, above_zero, draw_picture
from shardlib.report.log import CsvWriter, Log
from shardlib.report.plot import plot_range_test
from shardlib.report.range_test import has_diverged, propose_rate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200, help="at most, 10 or more")
    parser.add_argument("--min-lr", type=above_zero, default=1e-5, help="rate of the first step")
    parser.add_argument("--max-lr", type=above_zero, default=1.0, help="rate of the last step")
    job.add_arguments(parser, "runs/lr-range-test")


def run(args: argparse.Namespace) -> int:
    if not (0 < args.min_lr < args.max_lr and args.steps >= 10):
        raise WrongArguments("give 0 < --min-lr < --max-lr and --steps of 10 or more")
    mesh = model.running_mesh(args)
    say: Callable[[str], None] = print if mesh.rank == 0 else lambda text: None
    # Equal factors from step to step, not equal differences as in optim.lr_range_test_schedule: good rates differ by orders
    # of magnitude.
    rate = optim.exponential_decay(args.min_lr, args.steps - 1, args.max_lr / args.min_lr)
    work = job.Job(args, mesh, rate, nonfinite="skip")
    state = work.state
    rates: list[float] = []
    losses: list[float] = []
    with Log(*([CsvWriter(args.out / "range_test.csv")] if mesh.rank == 0 else [])) as log:
        for step in range(args.steps):
            state, metrics = work.step(state)
            losses.append(float(metrics["loss"]))  # the same on all ranks, so that they stop together
            if state.scale is not None and not metrics["finite"] and math.isfinite(losses[-1]):
                losses.pop()  # fp16's loss scale was too large: the step was skipped, and the rate does not rise
                continue
            if not metrics["finite"] or has_diverged(losses):
                say(f"step {step + 1}: diverged at a rate of {rates[-1] if rates else args.min_lr:.2e}")
                losses.pop()
                break
            rates.append(float(rate(torch.tensor(float(len(rates))))))
            log.write(step + 1, {"lr": rates[-1], "loss": losses[-1]})
    try:
        proposed = propose_rate(rates, losses)
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    say(f"{len(losses)} steps from {rates[0]:.2e} to {rates[-1]:.2e}; the loss falls fastest at {proposed:.2e}")
    say(f"proposed: --lr {proposed:.2g}")
    if mesh.rank == 0:
        picture = args.out / "range_test.png"
        draw_picture(say, "plot", picture, lambda: plot_range_test(picture, rates, losses, proposed))
    return 0
