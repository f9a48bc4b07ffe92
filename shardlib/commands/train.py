"""Train a byte-level GPT on text, on every rank torchrun started."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardlib import checkpoint, optim
from shardlib.commands import model
from shardlib.data.bytes import batch_at, load_bytes, split, windows
from shardlib.mesh import Mesh, make_mesh
from shardlib.models import gpt
from shardlib.optim.shards import sum_over
from shardlib.plan import Plan
from shardlib.plan_text import size, table
from shardlib.preview import make_plan
from shardlib.report.ngram import ngram_losses
from shardlib.report.plot import plot_losses
from shardlib.report.progress import Progress
from shardlib.sharded import shard, unshard
from shardlib.train import TrainState, make_eval_step, make_train_step
from shardlib.tree import leaves_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mesh", help="axes and sizes, such as data=2,model=2; by default every rank on axis data")
    parser.add_argument("--data", help="a text file or folder; by default the source of Python's standard library")
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="folder for checkpoints and the plot")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16, help="rows per step, over all ranks")
    parser.add_argument("--lr", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=100, help="steps of warm-up")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validate-every", type=int, default=200, help="steps between validations")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--fresh", action="store_true", help="do not go on from a checkpoint")
    model.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    shape: dict[str, Any] = model.parse_mesh(args.mesh) if args.mesh else {}
    mesh = make_mesh(**shape)
    say: Callable[[str], None] = print if mesh.rank == 0 else lambda text: None
    job = Job(args, mesh)
    say(f"{len(job.train):,} bytes to train on, {len(job.validation):,} to validate on")
    say(str(job.plan))
    bars = ngram_losses(job.train, job.validation)
    say("\nModels of the bytes, nats per byte: " + ", ".join(f"order {k} {bar:.3f}" for k, bar in enumerate(bars)))
    state, history = job.resume(say)
    with Progress(args.steps, args.batch * args.sequence, start=state.step, rank=mesh.rank) as progress:
        state = job.train_to(args.steps, state, history, progress)
    final = history["validation"][-1][1]
    verdict = "below" if final < bars[-1] else "not below"
    say(f"validation loss {final:.4f} nats per byte ({final / np.log(2):.3f} bits), {verdict} order 2's {bars[-1]:.4f}")
    text = job.sample(state)  # every rank takes part
    say(f"\nA sample:\n{text}")
    if mesh.rank == 0:
        picture = args.out / "loss.png"
        plot_losses(picture, history["train"], history["validation"], bars, title="Byte-level GPT")
        say(f"\nloss plot: {picture}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


class Job:
    """The pieces of the main job, made from its arguments.

    Attributes:
        train, validation: the text's two parts, bytes.
        plan: what each rank holds and sends.
    """

    def __init__(self, args: argparse.Namespace, mesh: Mesh) -> None:
        self._args, self._mesh = args, mesh
        self._share, self._shares = mesh.coords["data"], mesh.shape["data"]
        self.config = model.config(args)
        self.train, self.validation = split(load_bytes(args.data))
        optimizer = optim.chain(
            optim.clip_by_global_norm(args.clip),
            optim.adamw(
                optim.warmup_cosine_decay_schedule(
                    0.0, args.lr, min(args.warmup, args.steps - 1), args.steps, args.lr / 10
                ),
                b2=0.95,
                weight_decay=args.weight_decay,
            ),
        )
        loss_fn = model.loss(args, mesh.shape)
        transform = model.transform(args, mesh.shape)
        params = shard(lambda: model.init(args, mesh.shape, seed=args.seed), mesh, transform)
        self.plan: Plan = make_plan(
            model.init(args, mesh.shape, device="meta"),
            mesh,
            transform,
            loss_fn=loss_fn,
            batch=self._batch(0),
            optimizer=optimizer,
        )
        self._state, self._step = make_train_step(loss_fn, params, optimizer, rng=args.seed)
        self._evaluate = make_eval_step(loss_fn, params)

    def _batch(self, step: int) -> dict[str, torch.Tensor]:
        mesh, args = self._mesh, self._args
        batch = batch_at(
            self.train, args.batch, args.sequence, seed=args.seed, step=step, rank=self._share, ranks=self._shares
        )
        return {name: tensor.to(mesh.device) for name, tensor in batch.items()}

    def resume(self, say: Callable[[str], None]) -> tuple[TrainState, dict[str, Any]]:
        """The state to start from, and the losses so far: of an interrupted run if there is one."""
        state = self._state
        history: dict[str, Any] = {"train": [], "validation": []}
        found = None if self._args.fresh else checkpoint.latest(self._args.out)
        if found is None:
            return state, history
        if int(found.name.removeprefix("step-")) >= self._args.steps:
            say(f"{found} is of a finished run; starting a new one")
            return state, history
        state = checkpoint.restore(found, state)
        say(f"going on from {found}")
        return state, torch.load(found / "history.pt")

    def train_to(self, steps: int, state: TrainState, history: dict[str, Any], progress: Progress) -> TrainState:
        args, first = self._args, state.step
        for step in range(first, steps):
            self._mesh.traffic.reset()
            state, metrics = self._step(state, self._batch(step))
            loss = float(metrics["loss"])
            history["train"].append((step + 1, loss))
            progress.update(step + 1, loss)
            if step == first + 1:
                progress.note(self._measured(state))
            if (step + 1) % args.validate_every == 0 or step + 1 == steps:
                history["validation"].append((step + 1, self.validate(state)))
                progress.note(f"step {step + 1}: validation loss {history['validation'][-1][1]:.4f}")
            if (step + 1) % args.save_every == 0 or step + 1 == steps:
                self._save(state, history)
        return state

    def validate(self, state: TrainState) -> float:
        """Mean loss over validation windows, in nats per byte; the ranks share them."""
        mesh, args = self._mesh, self._args
        rows = max(1, args.batch // self._shares)
        batches = []
        for index, batch in enumerate(windows(self.validation, rows, args.sequence, limit=16 * self._shares)):
            if index % self._shares == self._share:
                batches.append({name: tensor.to(mesh.device) for name, tensor in batch.items()})
        total = sum(float(self._evaluate(state, batch)) for batch in batches[: self._rounds(rows)])
        mean = torch.tensor([total / min(len(batches), self._rounds(rows)) / self._shares], device=mesh.device)
        sum_over(mesh, ("data",), mean)
        return float(mean)

    def _rounds(self, rows: int) -> int:
        """Validation batches that every rank has: evaluation is collective, so none may do one more."""
        windows_there = (len(self.validation) - 1) // self._args.sequence
        return max(1, min(16, windows_there // rows // self._shares))

    def sample(self, state: TrainState) -> str:
        params = unshard(state.params)
        if isinstance(params, list):
            params = gpt.from_blocks(params)
        prompt = torch.tensor([list(b"def ")], device=self._mesh.device)
        tokens = gpt.generate(self.config, params, prompt, 300, 0.7)[0].tolist()
        return bytes(tokens).decode("utf-8", errors="replace")

    def _save(self, state: TrainState, history: dict[str, Any]) -> None:
        checkpoint.save(self._args.out, state, extra={"history.pt": history})

    def _measured(self, state: TrainState) -> str:
        """Predicted against measured bytes of this rank, after a step that followed a traced one."""
        plan, traffic = self.plan, self._mesh.traffic
        rows = [
            ("parameters", plan.bytes("param"), _held(state.params.buffers)),
            ("optimizer", plan.bytes("optimizer"), _held(state.opt)),
            *((f"sent on {axis}", sent, traffic.payload.get(axis, 0)) for axis, sent in plan.payload().items()),
        ]
        told = [(name, size(planned), size(measured)) for name, planned, measured in rows]
        return "\n" + table(("rank 0", "predicted", "measured"), told, right=2) + "\n"


def _held(tree: Any) -> int:
    """Bytes of the distinct storages behind a pytree's tensors, counters aside."""
    storages = {
        leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes()
        for leaf in leaves_of(tree)
        if isinstance(leaf, torch.Tensor) and leaf.dim()
    }
    return sum(storages.values())
