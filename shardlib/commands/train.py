"""Train a byte-level GPT on text, on every rank that torchrun started."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardlib import checkpoint, optim
from shardlib.commands import job, model, outputs
from shardlib.commands.arguments import WrongArguments, above_zero, draw_picture, natural, positive, wrong_arguments
from shardlib.common._compat import storage_id
from shardlib.errors import CheckpointError, TreeError
from shardlib.mesh.launch.supervised import INTERRUPT, STOPPING, exit_code
from shardlib.mesh.mesh import Mesh
from shardlib.optim.train_state import TrainState
from shardlib.plan.plan import Plan
from shardlib.plan.tables import size, table
from shardlib.report.log import Log
from shardlib.report.ngram import byte_scores, ngram_losses
from shardlib.report.plot import plot_losses
from shardlib.tree import leaves_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # About a minute on two cores, after which the loss is below that of the 2-gram model.
    parser.add_argument("--steps", type=positive, default=500, help="steps of the whole run")
    parser.add_argument("--lr", type=above_zero, default=3e-3, help="peak learning rate; see shardlib lr-range-test")
    parser.add_argument("--warmup", type=natural, default=50, help="steps of warm-up")
    parser.add_argument("--validate-every", type=positive, default=100, help="steps between validations")
    parser.add_argument("--save-every", type=positive, default=100, help="steps between checkpoints")
    parser.add_argument("--fresh", action="store_true", help="do not resume from a checkpoint")
    outputs.add_arguments(parser)
    job.add_arguments(parser, "runs/train")


def run(args: argparse.Namespace) -> int:
    outputs.require_outputs(args)
    mesh = model.running_mesh(args)
    found = _require_own_folder(args)
    say: Callable[[str], None] = print if mesh.rank == 0 else lambda text: None
    rate = optim.warmup_cosine_decay_schedule(0.0, args.lr, min(args.warmup, args.steps - 1), args.steps, args.lr / 10)
    work = job.Job(args, mesh, rate)
    work.require_validation()
    say(f"{len(work.train):,} bytes to train on, {len(work.validation):,} to validate on")
    say(str(work.plan))
    bars = ngram_losses(work.train, work.validation)
    say("\nModels of the bytes, nats per byte: " + ", ".join(f"order {k} {bar:.3f}" for k, bar in enumerate(bars)))
    state, curves = _resume(args, mesh, work.state, found, say)
    shown = outputs.Outputs(
        args, mesh, work.plan, rate, args.batch * args.sequence,
        title=f"Byte-level GPT, {args.steps:,} steps on {mesh!r}", unit="nats per byte",
        levels={f"order {order}": bar for order, bar in enumerate(bars)},
        earlier={"loss": curves.train, "validation/loss": curves.validation},
    )  # fmt: skip
    try:
        state = _train(args, mesh, work, state, curves, shown)
    except SystemExit as end:
        if end.code in set(map(exit_code, (*STOPPING, INTERRUPT))) and (saved := checkpoint.latest(args.out)):
            again = _again(mesh.size, sys.argv[1:], args.steps)
            say(f"stopped at step {checkpoint.step_of(saved)}; go on with\n{again}")
        raise
    scores = byte_scores(curves.validation[-1][1])
    verdict = "below" if scores["loss"] < bars[-1] else "not below"
    say(
        f"validation loss {scores['loss']:.4f} nats per byte ({scores['bits_per_byte']:.3f} bits, perplexity "
        f"{scores['perplexity']:.2f}), {verdict} order 2's {bars[-1]:.4f}"
    )
    text = work.sample(state, b"def ", 300)  # every rank takes part
    say(f"\nA sample:\n{text}")
    if mesh.rank == 0:
        picture = args.out / "loss.png"
        losses = (curves.train, curves.validation, bars)
        draw_picture(say, "loss plot", picture, lambda: plot_losses(picture, *losses, title="Byte-level GPT"))
    shown.close(work.train_step, state, lambda: work.batch(state.step), say)
    say(f"\nTo continue training to step {2 * args.steps}:\n{_again(mesh.size, sys.argv[1:], 2 * args.steps)}")
    return 0


def _again(ranks: int, words: Sequence[str], steps: int) -> str:
    """A shell command that resumes this run from its last checkpoint, to step ``steps`` (on one host)."""
    kept = [
        word
        for word, previous in zip(words, ("", *words))
        if word != "--fresh" and previous != "--steps" and not word.startswith("--steps")
    ]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return shlex.join([sys.executable, *launcher, "-m", "shardlib.commands", *kept, "--steps", str(steps)])


class Curves:
    """A writer that collects losses as (step, nats per byte), for the plot and for checkpoints."""

    train: list[tuple[int, float]]
    validation: list[tuple[int, float]]

    def __init__(self, train: list[tuple[int, float]], validation: list[tuple[int, float]]) -> None:
        self.train, self.validation = train, validation

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.train.append((step, values["loss"]))
        if "validation/loss" in values:
            self.validation.append((step, values["validation/loss"]))

    def close(self) -> None:
        """Does nothing: the losses stay in memory."""


def _require_own_folder(args: argparse.Namespace) -> Path | None:
    """The newest checkpoint in the folder of the run, or None. One of another model, or not of this command, is refused: it
    is neither gone on from nor removed."""
    latest = checkpoint.latest(args.out)
    if latest is None or args.fresh:
        return latest
    remedy = "give another --out, or --fresh to start anew in its place"
    with wrong_arguments():
        notes = checkpoint.read_notes(latest)
    if not notes.keys() >= {"train", "validation"}:
        raise WrongArguments(f"{latest} was not saved by shardlib train: {remedy}")
    if other := model.other_sizes(args, notes.get("model", vars(args))):
        raise WrongArguments(f"{latest} is of a model of {model.as_options(other)}: give these, {remedy[5:]}")
    return latest


def _resume(
    args: argparse.Namespace, mesh: Mesh, state: TrainState, latest: Path | None, say: Callable[[str], None]
) -> tuple[TrainState, Curves]:
    """The state and the losses so far: those of an interrupted run if there is one, otherwise ``state`` and none."""
    if latest is None:
        return state, Curves([], [])
    if args.fresh or checkpoint.step_of(latest) >= args.steps:
        say(f"{latest} belongs to {'an earlier' if args.fresh else 'a finished'} run; starting a new one in its place")
        for earlier in checkpoint.complete(args.out) if mesh.rank == 0 else ():
            checkpoint.remove(earlier)
        return state, Curves([], [])
    with wrong_arguments(CheckpointError, TreeError):
        state = checkpoint.restore(latest, state)
    say(f"resuming from {latest}")
    notes = checkpoint.read_notes(latest)
    return state, Curves(notes["train"], notes["validation"])


def _train(
    args: argparse.Namespace,
    mesh: Mesh,
    work: job.Job,
    state: TrainState,
    curves: Curves,
    shown: outputs.Outputs,
) -> TrainState:
    """Trains from ``state`` to the last step and returns the last state."""
    first = state.step
    progress = shown.progress(args.steps, first)
    saving = checkpoint.Manager(args.out, keep=2, every=args.save_every, interrupt=True)
    notes = vars(curves) | {"model": {name: getattr(args, name) for name in model.SIZES}}
    with Log(progress, curves, *shown.writers(first)) as log, saving as manager:
        for step in range(first + 1, args.steps + 1):
            mesh.traffic.reset()
            state, metrics = work.step(state)
            log.write(step, metrics)
            log.write(step, shown.rates(state))
            if step == first + 2:
                rows = _measured(work, mesh, state)
                progress.note("\n" + table(("rank 0", "predicted", "measured"), rows, right=2) + "\n")
                shown.compare(rows)
            if step % args.validate_every == 0 or step == args.steps:
                scores = work.validate(state)
                log.write(step, {"validation": scores})
                text = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in scores.items())
                progress.note(f"step {step}: validation {text}")
            if step % args.save_every == 0:
                log.flush()
            manager.step(state, notes=notes)
        if args.steps % args.save_every:
            log.flush()
            manager.save(state, notes=notes)
    return state


def _measured(work: job.Job, mesh: Mesh, state: TrainState) -> list[tuple[str, str, str]]:
    """Predicted and measured bytes of this rank, after the second step (the first one is traced). What is on disk
    is measured by its files, of which memory holds a window."""
    plan, traffic = work.plan, mesh.traffic
    on_disk = plan.bytes("optimizer", "disk")
    rows = [
        ("parameters", plan.bytes("param"), _held(state.params.buffers)),
        ("optimizer on disk", on_disk, _in_files(plan, mesh))
        if on_disk
        else ("optimizer", plan.bytes("optimizer"), _held(state.opt)),
        *((f"sent on {axis}", sent, traffic.payload.get(axis, 0)) for axis, sent in plan.payload().items()),
    ]
    return [(name, size(planned), size(measured)) for name, planned, measured in rows]


def _held(tree: Any) -> int:
    """Bytes that a pytree's tensors have of their storages, without 0-d ones (counters): pinned ones are whole pages."""
    storages: dict[int, int] = {}
    for leaf in leaves_of(tree):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            key = storage_id(leaf.untyped_storage())
            storages[key] = max(storages.get(key, 0), int(leaf.storage_offset() + leaf.numel()) * leaf.itemsize)
    return sum(storages.values())


def _in_files(plan: Plan, mesh: Mesh) -> int:
    """Bytes of this rank's files of states on disk."""
    folders = map(Path, plan.claims.location("optimizer").folders if plan.claims else ())
    return sum(path.stat().st_size for folder in folders for path in folder.glob(f"rank-{mesh.rank}-of-*.data"))
