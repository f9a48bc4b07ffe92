"""A strategy of Lightning, whose Trainer, loops, logs and callbacks stay, and whose step is the library's."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardlib import optim
from shardlib.checkpoint.restore import restore
from shardlib.checkpoint.save import save
from shardlib.common.optional import require
from shardlib.errors import CheckpointError, IllegalComposition, LossError
from shardlib.evaluate import make_eval_step
from shardlib.integrations.belongings import Belongings
from shardlib.integrations.filling import empty, fill, whole_weights
from shardlib.integrations.waiting import Waiting
from shardlib.mesh.mesh import Mesh, make_mesh
from shardlib.models.from_module import from_module
from shardlib.nn.functional import Mean
from shardlib.optim.base import GradientTransformation
from shardlib.optim.train_state import TrainState
from shardlib.plan.transform import Transform, chain
from shardlib.sharding import shard
from shardlib.train import make_train_step
from shardlib.transforms import accumulate, freeze, zero
from shardlib.tree import tree_map

__all__ = ["ShardedStrategy"]

_lightning: Any = require("lightning.pytorch", "shardlib.integrations.lightning", "lightning", "lightning")
_metrics: Any = require("torchmetrics", "shardlib.integrations.lightning", "torchmetrics", "lightning")
_Strategy: Any = _lightning.strategies.DDPStrategy
_Module: Any = _lightning.LightningModule
_FITTING: Any = _lightning.trainer.states.TrainerFn.FITTING

# Hooks that make, change or read gradients, which the module's parameters have none of.
_OF_GRADIENTS = ("backward", "configure_gradient_clipping", "on_after_backward", "on_before_optimizer_step")

# Arguments of torch's optimizers that say how torch runs them; the rate is followed step by step.
_HOW = ("lr", "foreach", "fused", "capturable", "differentiable")


class ShardedStrategy(_Strategy):
    """A strategy of ``lightning.pytorch.Trainer`` that trains on sharded parameters, from one device to many hosts:
    ``Trainer(strategy=ShardedStrategy(sl.zero(3)), devices=2)``.

    The module is an ordinary ``LightningModule`` with one optimizer, which is elementwise. ``training_step``, ``self.log``,
    validation, callbacks and schedulers of the rate work as ever. The update is `shardlib.optim.from_torch`'s of the
    optimizer that ``configure_optimizers`` returns, group by group, at the rate that its schedulers set.
    ``gradient_clip_val`` clips by the global norm. ``accumulate_grad_batches`` batches are the micro-batches of a step, whose
    loss is the mean of those that there are, where an epoch's last step has fewer.

    While it fits, the module's parameters have no values, since the shards have them; afterwards they are the
    trained ones, whole on each rank, on the CPU. A checkpoint is Lightning's file, for ``load_from_checkpoint``, and beside
    it a folder ``<file>.shardlib`` with the train state, from which ``fit(ckpt_path=)`` goes on, on any number of ranks.

    Args:
        transform: the chain, such as ``sl.zero(3)``; by default ``sl.zero(0)``.
        mesh: by default all ranks on one axis "data".
        options: of Lightning's ``DDPStrategy``.

    Raises:
        IllegalComposition: several optimizers, manual optimization, an optimizer that is not elementwise, a precision
            (`shardlib.precision` is a transform), clipping by value, or a scheduler that changes more than the rate.

    >>> import lightning.pytorch as pl
    >>> from shardlib.integrations.lightning import ShardedStrategy
    >>> class Line(pl.LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.line = torch.nn.Linear(2, 1)
    ...     def training_step(self, batch, index):
    ...         return self.line(batch).square().mean()
    ...     def configure_optimizers(self):
    ...         return torch.optim.AdamW(self.parameters(), lr=0.1)
    >>> quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    >>> trainer = pl.Trainer(strategy=ShardedStrategy(sl.zero(3)), accelerator="cpu", devices=1, max_epochs=1, **quiet)
    >>> trainer.fit(Line(), torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2))
    >>> trainer.strategy.train_state.step
    2
    """

    train_state: TrainState | None

    def __init__(self, transform: Transform | None = None, mesh: Mesh | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.train_state = None
        self._transform, self._mesh = transform or zero(0), mesh
        self._fits = False  # whether the values lie in the state, not in the module
        self._steps = False  # whether the optimizer's step runs
        self._waiting = Waiting(1)  # arguments of training_step
        self._returned: dict[str, Any] = {}  # what the last micro-batch's returned
        self._restored: Path | None = None
        self._options: list[dict[str, Any]] = []  # of the optimizer's groups, as they were made

    # --- what is trained ------------------------------------------------------------------------------------------

    def model_to_device(self) -> None:
        if self.lightning_module.trainer.state.fn != _FITTING:
            super().model_to_device()

    def configure_ddp(self) -> None:
        pass  # nothing wraps the module

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        module = self.lightning_module
        if len(self.optimizers) != 1 or not module.automatic_optimization:
            raise IllegalComposition(
                f"ShardedStrategy steps one optimizer: configure_optimizers returned {len(self.optimizers)}, with "
                f"automatic_optimization={module.automatic_optimization}. Return one, or train without Lightning"
            )
        overridden = _lightning.utilities.model_helpers.is_overridden
        parts = [module, *trainer.callbacks]
        if found := [
            f"{type(part).__name__}.{hook}" for part in parts for hook in _OF_GRADIENTS if overridden(hook, part)
        ]:
            raise IllegalComposition(
                f"{', '.join(found)}: the step makes gradients, clips and applies them, so that these hooks would find none. "
                "Leave them out: gradient_clip_val clips by the global norm, and what a loss does belongs into training_step"
            )
        if trainer.precision not in ("32-true", "64-true"):
            raise IllegalComposition(
                f"precision={trainer.precision!r}: give it to the strategy, ShardedStrategy(sl.chain(sl.zero(3), "
                "sl.precision('bf16')))"
            )
        self._start(trainer)

    def _start(self, trainer: Any) -> None:
        module, mesh = self.lightning_module, self._mesh or make_mesh(self.root_device.type)
        seed = self.broadcast(torch.initial_seed() % 2**31)
        for tensor in [*module.parameters(), *module.buffers()]:  # ranks without a seed have drawn others
            torch.distributed.broadcast(tensor.detach(), 0)
        self._belongings = Belongings(module, _Module, (_metrics.Metric, _metrics.MetricCollection))
        with self._belongings.put_aside():
            self._apply, params, buffers, frozen = from_module(module, buffers=True, frozen=True)
        count = trainer.accumulate_grad_batches
        self._waiting = Waiting(count)
        cut = [accumulate(count)] if count > 1 else []
        transform = chain(self._transform, *cut, *([freeze(frozen)] if frozen else []))
        tx = self._update(module, trainer)
        self.train_state, self._step = make_train_step(
            self._loss, shard(params, mesh, transform), tx, buffers=buffers, rng=seed
        )
        self._evaluate = make_eval_step(self._evaluated, self.train_state.params)
        new, self._fits = empty(module), True
        for group in self.optimizers[0].param_groups:
            group["params"] = [new[id(leaf)] for leaf in group["params"]]

    def _update(self, module: Any, trainer: Any) -> GradientTransformation:
        """The optimizer as a transformation, at the rate that it has in each step."""
        optimizer = self.optimizers[0]
        arguments = inspect.signature(type(optimizer)).parameters.keys() - {"params", *_HOW}
        self._options = [{name: group[name] for name in arguments & group.keys()} for group in optimizer.param_groups]
        group_of = {id(leaf): str(n) for n, group in enumerate(optimizer.param_groups) for leaf in group["params"]}
        labels = {name.replace(".", "/"): group_of.get(id(leaf), "") for name, leaf in module.named_parameters()}
        trained = [name.replace(".", "/") for name, leaf in module.named_parameters() if leaf.requires_grad]
        if left := [path for path in trained if not labels[path]]:
            raise IllegalComposition(f"the optimizer lacks {left[0]} ({len(left)} in all): give it all, or freeze them")

        def made(number: int, options: Mapping[str, Any]) -> GradientTransformation:
            # A schedule that asks: the scheduler has set the rate before the step.
            return optim.from_torch(type(optimizer), lr=lambda _: optimizer.param_groups[number]["lr"], **options)

        groups = {str(number): made(number, options) for number, options in enumerate(self._options)}
        tx = groups["0"] if len(groups) == 1 else optim.partition(groups, lambda path, shape: labels[path])
        if trainer.gradient_clip_val is None:
            return tx
        if str(trainer.gradient_clip_algorithm or "norm") != "norm":
            raise IllegalComposition("gradient_clip_algorithm='value' is not known here: take 'norm'")
        return optim.chain(optim.clip_by_global_norm(float(trainer.gradient_clip_val)), tx)

    # --- steps ----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Update the parameters, with the last micro-batch of a step; those before it wait for it."""
        trainer = self.lightning_module.trainer
        self._waiting.add(list(args))
        if trainer.fit_loop._should_accumulate():
            return torch.zeros((), device=self.root_device)
        if not self._steps:
            raise IllegalComposition(
                f"{type(self.lightning_module).__name__}.optimizer_step calls the closure without a step of the optimizer, "
                "and the closure steps: call optimizer.step(closure=closure) each time"
            )
        self._require_same_options()
        self._returned = {}
        self.train_state, metrics = self._step(self._trained, self._waiting.batch())
        loss = metrics["loss"].detach()
        return {**self._returned, "loss": loss} if self._returned else loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        self._steps = True
        try:
            return super().optimizer_step(*args, **kwargs)
        finally:
            self._steps = False

    def _require_same_options(self) -> None:
        for options, group in zip(self._options, self.optimizers[0].param_groups):
            changed = [name for name, value in options.items() if group[name] != value]
            if changed:
                raise IllegalComposition(
                    f"a scheduler changed {', '.join(changed)}, and the rate alone is followed: cycle_momentum=False of "
                    "cyclic ones leaves the others"
                )

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return closure_loss  # the step has been taken

    def _loss(self, params: Any, buffers: Any, batch: tuple[bool, list[Any]]) -> Any:
        counts, args = batch
        if not counts:
            return Mean(0, 0), buffers
        with self._belongings.put_aside():
            return self._apply(params, buffers, args, method=self._loss_of)

    def _loss_of(self, module: Any, args: Sequence[Any]) -> Mean:
        with self._belongings.lent(module):
            results = module.trainer._results  # weighs what is logged by the rows of the batch
            results.batch, results.batch_size = args[0], None
            result = module.training_step(*args)
        loss = result["loss"] if isinstance(result, Mapping) else result
        if isinstance(result, Mapping):
            self._returned = tree_map(
                lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, dict(result)
            )
        if not isinstance(loss, torch.Tensor):
            raise LossError(f"training_step returned {type(loss).__name__}: return the loss, or a dictionary with it")
        return Mean(loss, 1)

    def _evaluated(self, params: Any, method: str, args: Sequence[Any]) -> Any:
        def run(module: Any) -> Any:
            with self._belongings.lent(module):
                return getattr(module, method)(*args)

        with self._belongings.put_aside():
            return self._apply(params, self._trained.buffers, method=run, training=False)[0]

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step_of("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step_of("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step_of("predict_step", args, kwargs)

    def _step_of(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._fits:
            return self._evaluate(self._trained, method, list(args))
        return getattr(super(), method)(*args, **kwargs)

    def on_train_end(self) -> None:
        super().on_train_end()
        fill(self.lightning_module, self._trained)
        self._fits = False

    def teardown(self) -> None:
        module = self.lightning_module
        if self._fits:  # after an error: there is nothing to move
            self._lightning_module: Any = None
        super().teardown()
        self._lightning_module, self._fits = module, False

    # --- files ----------------------------------------------------------------------------------------------------

    @property
    def _trained(self) -> TrainState:
        assert self.train_state is not None
        return self.train_state

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self._fits:
            return super().lightning_module_state_dict()
        return whole_weights(self.lightning_module, self._trained, kept=self.is_global_zero)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if "optimizer_states" in checkpoint and self._is_of_state():  # not of save_weights_only
            save(_beside(filepath), self._trained)

    def _is_of_state(self) -> bool:
        """Whether the module has the state's values: while it fits, and afterwards until they are changed."""
        if self._fits or self.train_state is None:
            return self._fits
        held = self.lightning_module.state_dict()
        weights = whole_weights(self.lightning_module, self.train_state)
        return all(torch.equal(held[name].cpu(), value) for name, value in weights.items())

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._restored = _beside(os.path.realpath(checkpoint_path))  # of what last.ckpt may be a link to
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if not self._fits:
            super().load_model_state_dict(checkpoint, strict)
            return
        if self._restored is None or not self._restored.is_dir():
            raise CheckpointError(
                f"there is no {self._restored}, the state to go on from: the file has a model alone, or is another "
                "strategy's. Load its weights by load_from_checkpoint, and fit without ckpt_path"
            )
        self.train_state = restore(self._restored, self._trained)


def _beside(checkpoint: Any) -> Path:
    return Path(f"{checkpoint}.shardlib")
