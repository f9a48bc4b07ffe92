"""transformers' Trainer, whose loop, callbacks, logs and evaluation stay, and whose step is the library's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from shardlib.checkpoint.restore import restore
from shardlib.checkpoint.safetensors import import_safetensors
from shardlib.checkpoint.save import save
from shardlib.common.optional import require
from shardlib.errors import CheckpointError, IllegalComposition, MigrationError, listing
from shardlib.evaluate import make_eval_step
from shardlib.integrations.filling import empty, fill, whole_weights
from shardlib.integrations.waiting import Waiting
from shardlib.mesh.mesh import Mesh, make_mesh
from shardlib.migration import Migration, training_arguments
from shardlib.models.from_module import from_module
from shardlib.nn.functional import Mean
from shardlib.optim.base import GradientTransformation
from shardlib.optim.train_state import TrainState
from shardlib.plan.transform import Transform, chain, members_of
from shardlib.sharded.tree import Sharded
from shardlib.sharding import shard
from shardlib.train import make_train_step
from shardlib.transforms.freeze import freeze
from shardlib.transforms.remat import Remat
from shardlib.transforms.zero import Zero

__all__ = ["Trainer"]

_Trainer: Any = require("transformers", "shardlib.integrations.transformers", "transformers", "hf").Trainer

_log = logging.getLogger("shardlib.integrations")

_STATE = "shardlib"  # the folder of a train state in a checkpoint of Trainer's

# Arguments without an equal in a chain that Trainer's own code serves here too; and those that an optimizer stands for.
_SERVED = ("label_smoothing_factor", "neftune_noise_alpha", "train_sampling_strategy")
_OPTIMIZERS = ("optim", "optim_args", "weight_decay", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")

_OWN_OPTIMIZER = (
    "Trainer: optimizers of torch and their schedulers step on whole parameters (optimizers=, optimizer_cls_and_kwargs=, "
    "a subclass's create_optimizer or create_scheduler). Give optimizer=, which sl.optim.from_torch makes of torch's"
)


class Trainer(_Trainer):
    """A ``transformers.Trainer`` that trains on sharded parameters: the same arguments, datasets, callbacks, logs, evaluation
    and folders, with a chain of transforms.

    `shardlib.migrate` reads the arguments: rate and schedule, ``optim``, weight decay, clipping, precision and accumulation
    become transforms and an optimizer. ``compute_loss`` of a subclass and ``compute_loss_func`` are called as ever. A loss
    that is divided by the number of its tokens is averaged over the tokens of all ranks and micro-batches; of others the mean
    is of micro-batches, as Trainer's.

    While it trains the model's parameters have no values, since the shards have them; when `train` returns they are the
    trained ones, whole on each rank, on the CPU (in 16 bits where `sl.precision` keeps them so, whose fp32 masters are in the
    train state). Checkpoints have the files that Trainer's have, for ``from_pretrained``, and the train state, which resumes
    on any number of ranks.

    Args:
        transforms: the chain, such as ``sl.zero(3)``, without what the arguments say; by default ``sl.zero(0)``.
        mesh: by default every rank that torchrun started, on one axis "data".
        optimizer: in place of what the arguments say; with the rate and the clipping in it.

    Attributes:
        train_state: the last state; None before `train`.

    Raises:
        MigrationError: arguments that have no equal here; says which, and what to do.
        IllegalComposition: DeepSpeed, FSDP or several devices of one process, which would shard as well.

    >>> from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
    >>> from shardlib.integrations.transformers import Trainer
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2))
    >>> rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 16
    >>> args = TrainingArguments("out", max_steps=2, report_to="none", disable_tqdm=True, use_cpu=True, save_strategy="no")
    >>> trainer = Trainer(model, args, train_dataset=rows, transforms=sl.zero(3))
    >>> trainer.train().global_step
    2
    """

    def __init__(
        self,
        *args: Any,
        transforms: Transform | None = None,
        mesh: Mesh | None = None,
        optimizer: GradientTransformation | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer: torch.optim.Optimizer | None
        self.lr_scheduler: Any
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            other = "deepspeed" if self.is_deepspeed_enabled else "fsdp"
            raise IllegalComposition(
                f"Trainer: the arguments' {other} would shard the model too. Leave it out, and give transforms=sl.zero(3), "
                "or what sl.migrate makes of it"
            )
        if self.args.n_gpu > 1:
            raise IllegalComposition(
                f"Trainer: one process has {self.args.n_gpu} devices. Start one process a device, by torchrun"
            )
        if self.optimizer is not None or self.lr_scheduler is not None or self.optimizer_cls_and_kwargs is not None:
            raise IllegalComposition(_OWN_OPTIMIZER)
        self.train_state: TrainState | None = None
        self._transforms, self._optimizer = transforms, optimizer
        self._stepped: torch.optim.Optimizer | None = None  # what Trainer's loop steps, and its rates
        self._rates: LambdaLR | None = None
        self._emptied: nn.Module | None = None  # the model, while its values lie in the state
        self._evaluated: tuple[Migration, Sharded, Mapping[str, Any]] | None = None  # otherwise, while it is evaluated
        self._mesh = mesh
        self._waiting = Waiting(self.args.gradient_accumulation_steps)
        self._norm: torch.Tensor | None = None

    # --- what is trained ------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # The model stays as it is: neither copied to a device nor wrapped for gradients that it will not have.
        self.accelerator.prepare_model = lambda model, *args, **kwargs: model

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        pass

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        return contextlib.ExitStack()  # precision is the chain's

    def train(self, *args: Any, **kwargs: Any) -> Any:
        result = super().train(*args, **kwargs)
        self._fill()
        return result

    def _fill(self) -> None:
        """Give the model the state's values, which it lacks while it trains, and after an error in training."""
        if self._emptied is not None:
            fill(self._emptied, self._trained)
            self._emptied = None

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """What Trainer's loop steps: nothing, as `training_step` has updated the parameters. Its rate is what is logged."""
        if self.optimizer is None:
            self.optimizer = self._stepped = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the state and the step, now that their number is known, and what tells the rate of each step."""
        if self.lr_scheduler is None:
            schedule = self._start(num_training_steps)
            self._rates = LambdaLR(self.create_optimizer(), lambda _: float(schedule(self._trained.step)))
            self.lr_scheduler, self._created_lr_scheduler = self._rates, True
        return self.lr_scheduler

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._require_own_optimizer()
        return prepared

    def _require_own_optimizer(self) -> None:
        """Refuse an optimizer or a scheduler that a subclass makes, or that were set: the loop would step them in vain."""
        if (
            getattr(self.optimizer, "optimizer", self.optimizer) is not self._stepped
            or self.lr_scheduler is not self._rates
        ):
            raise IllegalComposition(_OWN_OPTIMIZER)

    def _start(self, steps: int) -> Any:
        """Make the state and the step. Returns the schedule of the rate."""
        self._fill()
        self._waiting = Waiting(self.args.gradient_accumulation_steps)
        asked, params, buffers = self._sharded(steps)
        optimizer = self._optimizer or asked.optimizer
        self.train_state, self._step = make_train_step(self._loss, params, optimizer, buffers=buffers, **asked.options)
        empty(self.model)
        self._emptied = self.model
        return asked.schedule or (lambda step: self.args.learning_rate)

    def _sharded(self, steps: int) -> tuple[Migration, Sharded, Mapping[str, Any]]:
        """What the arguments ask for, and the model's parameters and buffers as they are, for `_evaluate_batch`."""
        mesh = self._mesh = self._mesh or make_mesh(self.args.device.type)
        asked = self._migrated(mesh.size, steps)
        self._apply, params, buffers, frozen = from_module(self.model, buffers=True, frozen=True)
        transform = _chain(self._transforms, asked.chain)
        if frozen:
            transform = chain(transform, freeze(frozen))
        sharded = shard(params, mesh, transform)
        self._evaluate_batch = make_eval_step(self._predicted, sharded)
        return asked, sharded, buffers

    def _migrated(self, ranks: int, steps: int) -> Migration:
        decayed = {name.replace(".", "/") for name in self.get_decay_parameter_names(self.model)}
        asked: Migration = training_arguments.convert(self.args, ranks, None, steps, decayed)
        served = {*_SERVED, *(_OPTIMIZERS if self._optimizer is not None or not self.is_in_train else ())}
        refused = [f"{entry.key} = {entry.value!r}: {entry.note}" for entry in asked.refused if entry.key not in served]
        if refused:
            raise MigrationError(f"Trainer: these arguments have no equal here:\n{listing(refused)}\nChange them.")
        return asked

    @property
    def _trained(self) -> TrainState:
        assert self.train_state is not None
        return self.train_state

    # --- a step ---------------------------------------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of the next step."""
        if left := self._waiting.clear():
            _log.warning(
                "%d micro-batches are left out, since their epoch ended before gradient_accumulation_steps of them made a "
                "step. A dataset that has a length ends with a step of what is left.",
                left,
            )
        return super().get_batch_samples(*args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Update the parameters, with the last micro-batch of a step; those before it wait for it. Returns the loss, 0 for
        those that wait."""
        self.model.train()
        self._waiting.add(dict(self._prepare_inputs(inputs)))
        if not self.accelerator.gradient_state.sync_gradients:
            return torch.zeros((), device=self.args.device)
        self.train_state, metrics = self._step(self._trained, self._waiting.batch())
        self._norm = metrics["grad_norm"]
        return metrics["loss"].detach()

    def _loss(self, params: Any, buffers: Any, batch: tuple[bool, dict[str, Any]]) -> Any:
        counts, inputs = batch
        return self._apply(params, buffers, inputs, method=self._loss_of) if counts else (Mean(0, 0), buffers)

    def _loss_of(self, model: nn.Module, inputs: dict[str, Any]) -> Mean:
        averages = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False  # the mean is over all ranks as it is
        try:
            tokens = self._get_num_items_in_batch([inputs], self.args.device)
            divisor = None if tokens is None else tokens.clamp(min=1)
            loss = self.compute_loss(model, inputs, num_items_in_batch=divisor)
        finally:
            self.args.average_tokens_across_devices = averages
        by_tokens = self.loss_is_scaled_for_ga
        if by_tokens is None:
            by_tokens = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if by_tokens and tokens is not None:
            return Mean(loss * divisor, tokens)
        return Mean(loss, 1)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self._norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._norm

    # --- evaluation -----------------------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluated = None  # the model may have changed since
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self._evaluated = None

    def prediction_step(
        self, model: nn.Module, inputs: Mapping[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        if self._emptied is not None:
            params, self._buffers = self._trained.params, self._trained.buffers
        else:  # what the model has, in shards
            if self._evaluated is None:
                self._evaluated = self._sharded(max(self.args.max_steps, 1))
            _, params, self._buffers = self._evaluated
        inputs = dict(self._prepare_inputs(inputs))
        return self._evaluate_batch(params, inputs, prediction_loss_only, ignore_keys)

    def _predicted(self, params: Any, inputs: Mapping[str, Any], loss_only: bool, ignored: Any) -> tuple[Any, Any, Any]:
        predict = partial(super().prediction_step, prediction_loss_only=loss_only, ignore_keys=ignored)
        return self._apply(params, self._buffers, inputs, method=predict, training=False)[0]

    # --- files ----------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as Trainer does. Every rank must call it; the first gathers the weights, to write them."""
        if self._emptied is None:
            super().save_model(output_dir, _internal_call)
            return
        adapters = hasattr(self.model, "peft_config")  # of which files have what is trained
        weights = whole_weights(self.model, self._trained, kept=self.args.should_save, trained=adapters)
        self._save(output_dir or self.args.output_dir, state_dict=weights)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save(Path(output_dir) / _STATE, self._trained)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._require_own_optimizer()
            self._restore(checkpoint)
            self.lr_scheduler.optimizer.step()  # nothing is stepped, but torch warns where nothing was
            self.lr_scheduler.step()  # to the rate of the state's next step

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not (Path(resume_from_checkpoint) / _STATE).is_dir():
            raise CheckpointError(
                f"{resume_from_checkpoint} has no {_STATE}/, the state to resume from: it has a model alone, or is another "
                "Trainer's. Load its weights by from_pretrained, and train without resume_from_checkpoint."
            )

    def _load_best_model(self) -> None:
        folder = self.state.best_model_checkpoint
        if (Path(folder) / _STATE).is_dir():
            self._restore(folder)
        else:  # save_only_model
            import_safetensors(folder, self._trained.params, module=self.model, buffers=self._trained.buffers)

    def _restore(self, folder: str) -> None:
        self.train_state = restore(Path(folder) / _STATE, self._trained)


def _chain(given: Transform | None, asked: Transform) -> Transform:
    """The transforms that are given, with what the arguments ask for; `Trainer` has the model recompute itself."""
    left = (Remat,) if given is None else (Remat, Zero)
    return chain(
        *([] if given is None else [given]), *(each for each in members_of(asked) if not isinstance(each, left))
    )
