"""The main job, a byte-level GPT on text: its arguments, and the steps that the commands that train it share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from shardlib import optim
from shardlib.commands import model
from shardlib.commands.arguments import PLANNED, WrongArguments, folder, positive, wrong_arguments
from shardlib.data.bytes import batch_at, load_bytes, split, windows
from shardlib.evaluate import make_eval_step
from shardlib.generating import generate
from shardlib.mesh.mesh import Mesh
from shardlib.models import gpt
from shardlib.nn.blocks import Sequential, sequential
from shardlib.nn.functional import Mean
from shardlib.optim.train_state import Metrics, TrainState, TrainStep
from shardlib.plan.plan import Plan
from shardlib.planning import make_plan
from shardlib.report.ngram import byte_scores
from shardlib.sharded.unshard import unshard
from shardlib.sharding import shard
from shardlib.train import make_train_step


def add_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    """Adds the arguments of `Job`, and ``--out`` with the default ``out``."""
    parser.add_argument("--mesh", help="axes and sizes, such as data=2,model=2; by default every rank on axis data")
    parser.add_argument("--data", help="a text file or folder; by default the source of Python's standard library")
    parser.add_argument("--out", type=folder, default=Path(out), help="folder for what the command writes")
    parser.add_argument("--batch", type=positive, default=16, help="rows per step, over all ranks")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="AdamW's")
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    parser.add_argument("--seed", type=int, default=0, help="of the initial values, batches and dropout")
    model.add_arguments(parser)


class Job:
    """The main job, made from its arguments, with the schedule ``rate`` of the learning rate.

    Attributes:
        train, validation: bytes of the text.
        plan: the plan of a training step.
        state: the initial state.
        train_step: as `make_train_step` makes it.
    """

    state: TrainState
    train_step: TrainStep
    train: np.ndarray
    validation: np.ndarray

    def __init__(
        self,
        args: argparse.Namespace,
        mesh: Mesh,
        rate: optim.Schedule,
        *,
        nonfinite: Literal["raise", "skip"] | None = None,
    ) -> None:
        self._args, self._mesh = args, mesh
        self._share, self._shares = mesh.coords["data"], mesh.shape["data"]
        config = model.config(args)
        # Evaluation has no dropout and no routers' losses, so its configuration differs from that of training.
        self.config: gpt.GPTConfig = replace(
            config, dropout=0.0, moe=config.moe and replace(config.moe, load=0.0, z=0.0)
        )
        if args.remat == "auto":
            raise WrongArguments("--remat auto is for shardlib plan, with --device-memory: give --remat device or host")
        if args.vocab < 256:
            raise WrongArguments(f"--vocab {args.vocab}: the text's tokens are bytes, 256 of them: give 256 or more")
        with wrong_arguments():
            self.train, self.validation = split(load_bytes(args.data))
            first = self.batch(0)
            optimizer = optim.chain(
                optim.clip_by_global_norm(args.clip),
                optim.adamw(rate, b2=0.95, weight_decay=args.weight_decay),
            )
        loss_fn = model.loss(config, mesh.shape)
        with wrong_arguments(*PLANNED):
            transform = model.transform(args, mesh.shape)
            params = shard(lambda: model.init(args, mesh.shape, seed=args.seed), mesh, transform)
            self.plan: Plan = make_plan(
                model.init(args, mesh.shape, device="meta"),
                mesh,
                transform,
                loss_fn=loss_fn,
                batch=first,
                optimizer=optimizer,
            )
        self.state, self.train_step = make_train_step(loss_fn, params, optimizer, rng=args.seed, nonfinite=nonfinite)
        self._evaluate = make_eval_step(_scored(model.loss(self.config, mesh.shape)), params)

    def step(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Trains on the batch of the step ``state.step``."""
        return self.train_step(state, self.batch(state.step))

    def validate(self, state: TrainState) -> dict[str, float]:
        """The scores of `byte_scores` over validation windows, which the ranks share."""
        mesh, args = self._mesh, self._args
        rows, available = self._validated
        # Evaluation is collective, so every rank takes the same number of batches.
        all_ranks = windows(self.validation, rows, args.sequence, limit=min(16, available) * self._shares)
        this_rank = (batch for index, batch in enumerate(all_ranks) if index % self._shares == self._share)
        batches = ({name: tensor.to(mesh.device) for name, tensor in batch.items()} for batch in this_rank)
        return byte_scores(float(self._evaluate.over(state, batches)["loss"]))

    def require_validation(self) -> None:
        """Refuse a text of which too little is set aside for `validate`: ranks would have no batch of their own."""
        rows, available = self._validated
        if not available:
            needed = rows * self._shares * self._args.sequence + 1
            raise WrongArguments(
                f"{len(self.validation):,} bytes are set aside for validation, a twentieth of the text, of which the ranks "
                f"need {needed:,}: use a longer text, or a smaller --batch or --sequence"
            )

    @property
    def _validated(self) -> tuple[int, int]:
        """Rows of a rank's batch of validation windows, and how many such batches there are for each rank."""
        rows = max(1, self._args.batch // self._shares)
        return rows, (len(self.validation) - 1) // self._args.sequence // rows // self._shares

    def sample(self, state: TrainState, prompt: bytes, length: int) -> str:
        """The prompt followed by ``length`` sampled bytes; every rank must call this."""
        params: Any = state.params
        if self.plan.stages.axes:  # with one token at a time stages would only wait for each other
            params = gpt.from_blocks(unshard(params))
        (new,) = generate(self.config, params, [list(prompt)], length, temperature=0.7)
        # Tokens beyond the bytes are shown as 255 is, which is no part of any UTF-8.
        return bytes([*prompt, *new.clamp(max=255).tolist()]).decode("utf-8", errors="replace")

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """This rank's share of a step's batch."""
        mesh, args = self._mesh, self._args
        batch = batch_at(
            self.train, args.batch, args.sequence, seed=args.seed, step=step, rank=self._share, ranks=self._shares
        )
        return {name: tensor.to(mesh.device) for name, tensor in batch.items()}


def _scored(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """``loss_fn`` as a function that returns ``{"loss": Mean}`` over tokens, for evaluation over several batches."""

    def scores(*args: Any) -> dict[str, Mean]:
        count = args[-1]["targets"].numel()
        result = last(*args)  # with experts a pair: their losses are 0 here, and their metrics are left out
        return {"loss": Mean((result[0] if isinstance(result, tuple) else result) * count, count)}

    *first, last = loss_fn.blocks if isinstance(loss_fn, Sequential) else [loss_fn]
    return sequential([*first, scores]) if first else scores
