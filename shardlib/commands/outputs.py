"""What a training command shows and writes of its run: options of the commands, and what they make."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shardlib.commands.arguments import WrongArguments, above_zero
from shardlib.mesh.mesh import Mesh
from shardlib.optim.schedules.base import Schedule
from shardlib.optim.train_state import TrainState
from shardlib.plan.plan import Plan
from shardlib.report.html import HtmlWriter
from shardlib.report.log import CsvWriter, JsonlWriter, TensorBoardWriter, WandbWriter, Writer, require_packages
from shardlib.report.profile import profile
from shardlib.report.progress import Progress
from shardlib.report.rates import StepRates
from shardlib.report.watch import Watch

_WRITERS: dict[str, Callable[[Path, int], Writer]] = {
    "csv": lambda out, start: CsvWriter(out / "metrics.csv", start=start),
    "jsonl": lambda out, start: JsonlWriter(out / "metrics.jsonl", start=start),
    "tensorboard": lambda out, start: TensorBoardWriter(out, start=start),
    "wandb": lambda out, start: WandbWriter(project="shardlib"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--metrics", nargs="*", default=["csv"], choices=_WRITERS, help="further outputs of metrics")
    parser.add_argument("--watch", action="store_true", help="show loss, rates and memory live in the terminal")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="HTML page of the run, with a profile of its last step"
    )
    parser.add_argument(
        "--peak", type=above_zero, metavar="FLOPS", help="of a device, for model FLOPs utilisation; known of some GPUs"
    )
    parser.add_argument("--price", type=above_zero, metavar="P", help="of a rank for an hour, for the report's cost")


def require_outputs(args: argparse.Namespace) -> None:
    """Refuse what cannot be written, before anything else is done."""
    for name in args.metrics:
        require_packages(name)
    if args.price is not None and args.report is None:
        raise WrongArguments("--price is for the cost in a report: give --report FILE")


class Outputs:
    """What the options make for a run.

    Args:
        tokens: of a step, over all ranks.
        page: further arguments of `HtmlWriter`.

    Attributes:
        rates: what the steps reach.
    """

    def __init__(
        self, args: argparse.Namespace, mesh: Mesh, plan: Plan, rate: Schedule, tokens: int, **page: Any
    ) -> None:
        self._args, self._mesh, self._plan, self._tokens = args, mesh, plan, tokens
        self.rates: StepRates = StepRates(tokens, rate, plan=plan, peak=args.peak)
        written = {"plan": plan, "ranks": mesh.size, "price": args.price, "unknown": self.rates.unknown, **page}
        first = mesh.rank == 0 and args.report
        self._page = HtmlWriter(args.report, tokens_per_step=tokens, **written) if first else None

    def progress(self, steps: int, start: int) -> Any:
        """What shows the steps after ``start`` in the terminal."""
        shown = partial(Watch, unknown=self.rates.unknown) if self._args.watch else Progress
        return shown(steps, self._tokens, start=start, rank=self._mesh.rank)

    def writers(self, start: int) -> list[Writer]:
        """The files, which go on after step ``start``; none but on rank 0."""
        files = [_WRITERS[name](self._args.out, start) for name in self._args.metrics] if self._mesh.rank == 0 else []
        return [*files, *([] if self._page is None else [self._page])]

    def compare(self, rows: Sequence[tuple[str, str, str]]) -> None:
        """Put what was predicted and measured into the page."""
        if self._page is not None:
            self._page.compare(rows)

    def close(self, step: Any, state: TrainState, batch: Callable[[], Any], say: Callable[[str], None]) -> None:
        """End the page with a profile of three more steps, whose results are not kept. Every rank must call it."""
        if not self._args.report:
            return
        found = profile(step, state, batch(), steps=3, plan=self._plan)
        if self._page is not None:
            predicted, measured = (f"{1e3 * each:.2f} ms" for each in (found.predicted.total, found.seconds))
            self._page.compare([("seconds of a step", predicted, measured)])
            self._page.add("A step", found)
            self._page.close()
        say(f"report: {self._args.report}")
