"""From a loss function and sharded parameters to a train step: state in, state out."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Protocol, TypeVar, cast, overload

import torch

from shardlib.collectives import primitives
from shardlib.common.boundaries import untransformed
from shardlib.errors import IllegalComposition, TreeError
from shardlib.execute.buffers import BufferKinds
from shardlib.execute.context import casting_losses
from shardlib.execute.graph.runner import GraphPipe, GraphStage
from shardlib.execute.stages.pipe import runner_of
from shardlib.execute.step import LossStep, require_usable
from shardlib.execute.values.around import Around, plain_value_and_grad
from shardlib.mesh.transport.activity import in_step
from shardlib.nn.functional import Loss, LossResult
from shardlib.optim.axis_owner.owned_exchange import OwnedExchange
from shardlib.optim.base import GradientTransformation, require_unpacked
from shardlib.optim.combine import require_transformations
from shardlib.optim.shards import MeshShards
from shardlib.optim.state_storage import interrupted_after, restore_on_failure
from shardlib.optim.train_state import Metrics, TrainState, TrainStep, copied, rescaled
from shardlib.optim.updates import Updates
from shardlib.optim.wrappers.inject import injected, settings
from shardlib.optim.wrappers.unused import skips_unused
from shardlib.plan.build import with_owner
from shardlib.plan.loss_scale import LossScale
from shardlib.rng import Key, restore_generators, states_of_generators
from shardlib.sharded.checksum import checksums
from shardlib.sharded.given import given_params, require_no_graph, require_order
from shardlib.sharded.shard import at_rest
from shardlib.sharded.tree import Sharded
from shardlib.sharding import Lifting, lift
from shardlib.tree import T, tree_map

A = TypeVar("A")  # what a loss function returns beside the loss
B = TypeVar("B")  # its buffers
V = TypeVar("V", covariant=True)  # the value of a loss function


class GradFunction(Protocol[V]):
    """``grad_fn(params, batch) -> (loss, grads)``, as `value_and_grad` makes it."""

    @overload
    def __call__(
        self, params: Sharded[T], batch: Any, *, buffers: Any = None, rng: Key | None = None, step: int | None = None
    ) -> tuple[V, Sharded[T]]: ...
    @overload
    def __call__(
        self, params: T, batch: Any, *, buffers: Any = None, rng: Key | None = None, step: int | None = None
    ) -> tuple[V, T]: ...


@overload
def value_and_grad(
    loss_fn: Callable[..., Loss], *, buffer_kinds: Mapping[str, str] | None = None
) -> GradFunction[torch.Tensor]: ...
@overload
def value_and_grad(
    loss_fn: Callable[..., tuple[Loss, A]], *, buffer_kinds: Mapping[str, str] | None = None
) -> GradFunction[tuple[torch.Tensor, A]]: ...
@overload
def value_and_grad(
    loss_fn: Callable[..., tuple[tuple[Loss, A], B]], *, buffer_kinds: Mapping[str, str] | None = None
) -> GradFunction[tuple[tuple[torch.Tensor, A], B]]: ...
def value_and_grad(loss_fn: Callable[..., Any], *, buffer_kinds: Mapping[str, str] | None = None) -> Any:
    """Make ``grad_fn(params, batch, *, buffers=None, rng=None, step=None) -> (loss, grads)``.

    ``params`` is `Sharded`, or a plain pytree (one device). ``loss`` has the form that the loss function returns: the mean
    over the global batch, ``(loss, aux)``, or with ``buffers`` ``(loss, buffers)`` or ``((loss, aux), buffers)``. If the
    global batch has weight 0 (see `Mean`), loss and gradients are 0.
    ``grads`` are `Sharded` in the optimizer's layout, ready for ``tx.update``, or a plain pytree. ``step`` is the number of
    the step and ``rng`` its key, for plans that leave out parts of layers (`progressive_layer_drop`). ``buffer_kinds`` is as
    for `make_train_step`.

    Under ``precision("fp16")`` the loss is scaled before backward and the gradients are divided by the scale. Where they
    overflow, loss and gradients are computed again with lower scales, down to the least; the next call begins with what was
    found. Gradients that are not finite at any scale are returned as they are.

    Raises:
        LossError: a loss that is not a scalar or depends on no parameter, or losses of ranks or micro-batches that differ
            in form.
        BatchError: a batch that does not fit the plan.
        TreeError: the parameters are no parameters, or come second.

    >>> loss_fn = lambda params, batch: (params["w"] * batch).sum()
    >>> loss, grads = sl.value_and_grad(loss_fn)({"w": torch.ones(2)}, torch.tensor([3.0, 4.0]))
    >>> float(loss), grads["w"]
    (7.0, tensor([3., 4.]))
    """
    bound, what = _Bound(), "value_and_grad's function"

    def around(params: Any, batch: Any, *, buffers: Any = None, rng: Key | None = None, step: int | None = None) -> Any:
        require_order(what, "params, batch", params, batch)
        params = given_params(what, params)
        if isinstance(params, Sharded):
            found = Around(loss_fn, params.plan, params.mesh, what, trained=True)
            value, aux, grads = found.value_and_grad(params, batch, buffers, rng)
        else:
            value, aux, grads = plain_value_and_grad(loss_fn, params, batch, rng)
        return value if aux is None else (value, aux), grads

    @untransformed(what, around)
    def grad_fn(
        params: Any, batch: Any, *, buffers: Any = None, rng: Key | None = None, step: int | None = None
    ) -> tuple[Any, Any]:
        require_order(what, "params, batch", params, batch)
        params = given_params(what, params)
        if not isinstance(params, Sharded):
            require_no_graph(f"{what}, parameters", params, TreeError, variables=True)
        lifted = bound.lifting(params)
        bound_to = lifted.plan, buffers is not None
        if bound.to != bound_to:
            bound.loss = LossStep(loss_fn, lifted.plan, lifted.mesh, buffers is not None, buffer_kinds)
            BufferKinds(buffer_kinds).require_known(buffers)
            bound.to, bound.scale = bound_to, lifted.plan.step.loss_scale
        if lifted.plan.residuals:
            raise IllegalComposition(
                "gradients are compressed with error feedback, whose residuals are in a TrainState: use sl.make_train_step, "
                "or feedback=False in onebit() and quantize()"
            )
        scale, draws = bound.scale, states_of_generators(lifted.mesh.device)
        while True:
            with casting_losses(lifted.mesh.device):
                evaluation = bound.loss(
                    lifted,
                    batch,
                    buffers,
                    rng,
                    1.0 if scale is None else scale.value,
                    step=step,
                    comm={},
                    equal={"rng": rng, "step": step, "loss scale": repr(scale)},
                )
            evaluation.landing.wait_for_all()
            lower = scale.lower() if scale is not None and not evaluation.finite else None
            if lower is None or scale is None or lower.value == scale.value or not evaluation.loss.isfinite():
                break
            scale = lower
            restore_generators(draws)
        if scale is not None and evaluation.finite:
            bound.scale = scale.after(True)
        factor = evaluation.scale
        flat = evaluation.grads
        if factor is not None:
            flat = {name: _times(grad, factor) if evaluation.weight else grad.zero_() for name, grad in flat.items()}
        grads = Sharded(lifted.plan, lifted.mesh, "grad", flat)
        value: Any = evaluation.loss if evaluation.aux is None else (evaluation.loss, evaluation.aux)
        if buffers is not None:
            value = (value, evaluation.buffers)
        return value, grads if isinstance(params, Sharded) else grads.tree

    return grad_fn


class _Bound(threading.local):
    """What a function of `value_and_grad` keeps from call to call, of each rank its own: simulated ranks are threads."""

    loss: LossStep
    scale: LossScale | None  # of the next call

    def __init__(self) -> None:
        self.to: Any = None  # the plan, and whether there are buffers
        self.lifting = Lifting()


def _times(grad: torch.Tensor, factor: float) -> torch.Tensor:
    """``grad * factor``, in fp32 for fp16, which cannot hold gradients without their loss scale."""
    return (grad.float() if grad.dtype is torch.float16 else grad).mul_(factor)


@overload
def make_train_step(
    loss_fn: Callable[..., LossResult],
    params: Sharded[T],
    optimizer: GradientTransformation,
    *,
    buffers: Any = None,
    buffer_kinds: Mapping[str, str] | None = None,
    rng: Key | int = 0,
    donate: bool = True,
    nonfinite: Literal["raise", "skip"] | None = None,
    compile: bool | Literal["inductor"] = False,
) -> tuple[TrainState[T], TrainStep[T]]: ...
@overload
def make_train_step(
    loss_fn: Callable[..., LossResult],
    params: T,
    optimizer: GradientTransformation,
    *,
    buffers: Any = None,
    buffer_kinds: Mapping[str, str] | None = None,
    rng: Key | int = 0,
    donate: bool = True,
    nonfinite: Literal["raise", "skip"] | None = None,
    compile: bool | Literal["inductor"] = False,
) -> tuple[TrainState[T], TrainStep[T]]: ...
def make_train_step(
    loss_fn: Callable[..., LossResult],
    params: Any,
    optimizer: GradientTransformation,
    *,
    buffers: Any = None,
    buffer_kinds: Mapping[str, str] | None = None,
    rng: Key | int = 0,
    donate: bool = True,
    nonfinite: Literal["raise", "skip"] | None = None,
    compile: bool | Literal["inductor"] = False,
) -> tuple[TrainState, TrainStep]:
    """Make the initial state, and ``train_step(state, batch) -> (state, metrics)``.

    ``metrics`` holds ``loss`` (mean over the global batch), ``grad_norm`` (global, before clipping; if the optimizer takes
    gradients unreduced, the root mean square of the ranks' norms), ``finite``, and ``aux`` if the loss function returns it;
    where the plan leaves out parts of layers ``layer_tokens``, the tokens of the global batch that layers saw, summed over
    layers; under ``offload(speculate=True)`` also ``undone``, the number of this rank's buckets whose update was in vain.
    A `Mean` in ``aux`` is averaged over all ranks and micro-batches (NaN for a weight of 0). Other leaves are those of the
    last micro-batch on this rank, or with several stages on the rank with the last stage. Tensors are detached; parameters
    among them are whole, with the values that they had in the loss.

    Args:
        loss_fn: ``loss_fn(params, batch)``, plain PyTorch; see docs/training.md for its forms. ``batch`` is a pytree: NumPy
            arrays in it become tensors, and leaves other than arrays and tensors are not changed. If batches are cut into
            micro-batches, tensors with dimensions must have one row per sample; lists with an entry per sample, and objects
            that hold tensors, are refused.
            At ZeRO stage 3 the function is called twice in a step in which ranks turn out to use other parameters than
            before, so it must not have side effects.
        params: from `shard`, or a plain pytree (one device).
        buffers: a pytree that the loss function takes second and returns besides the loss. Moved to the mesh's device.
            (Batches are not moved: a batch on another device is refused, so that no step copies it unnoticed.)
        buffer_kinds: glob over the paths of buffers -> what they are to the ranks that share a batch: "averaged" after each
            step, "rank-local" (each rank goes on from its own), or "equal" (compared in the first step and every 16th, and
            refused where they differ). By default BatchNorm's (``running_mean``, ``running_var``) are averaged, other
            floating ones equal, and integers rank-local.
        rng: a key, or a seed for one, if ``loss_fn`` has a parameter ``rng``. Functions that draw from torch's own generators
            (``F.dropout``) are seeded by this key too, equally on all ranks that share a batch.
        donate: whether a step may reuse the memory of the state it is given; that state may not be used again.
        nonfinite: what to do about a loss or gradient that is not finite, or a batch of weight 0 (see `Mean`), whose loss is
            0: "raise" (the default), or "skip" the update (the default under dynamic loss scaling).
        compile: whether loss, backward and exchanges run as one graph, traced in the first step: see docs/compile.md.
            ``train_step.graph`` prints it. "inductor": torch's compiler fuses what stands in it between exchanges and the
            library's kernels, which takes seconds for each kind of block, and rounds otherwise than operations one by one.

    Ranks that share a batch must be given the same batch, and all ranks the same optimizer, buffers, rng and state. The
    arguments of `make_train_step` are compared at once; step number, rng, loss scale, injected hyper-parameters and the
    shapes of batches in every step; contents of batches in the first step and every 16th.

    Raises:
        TypeError: an optimizer that is not a gradient transformation (see `optim.from_torch` for torch's optimizers).
        IllegalComposition: an optimizer that declares no locality, on shards; ``compile`` with a plan that has no graph.
        TreeError: parameters of `torch.inference_mode`.
        RankMismatch: ranks were given different arguments; names them and the ranks. The step raises it too.

    >>> loss_fn = lambda params, batch: (batch @ params["w"]).square().mean()
    >>> state, train_step = sl.make_train_step(loss_fn, {"w": torch.ones(4, 4)}, sl.optim.sgd(0.1))
    >>> state, metrics = train_step(state, torch.ones(2, 4))
    >>> state.step, float(metrics["loss"])
    (1, 16.0)
    """
    require_transformations("make_train_step", optimizer)
    lifted = lift(params)
    if torch.is_inference_mode_enabled() or any(buffer.is_inference() for buffer in lifted.in_memory.values()):
        raise TreeError(
            "make_train_step: what is made under torch.inference_mode() cannot be trained; leave it for sl.shard "
            "and sl.make_train_step (torch.no_grad() is fine), and clone parameters that were made there: param.clone()"
        )
    plan, mesh = with_owner(lifted.plan, optimizer), lifted.mesh
    lifted = at_rest(lifted.under(plan))
    if compile not in (False, True, "inductor"):
        raise ValueError(f"compile={compile!r}: use True, 'inductor', or False")
    policy = nonfinite or ("skip" if plan.step.loss_scale else "raise")
    if policy not in ("raise", "skip"):
        raise ValueError(f"nonfinite={nonfinite!r}: use 'raise' or 'skip'")
    optimizer.require_locality(lifted)
    graphs: Any = partial(GraphPipe if plan.stages.axes else GraphStage, fuses=compile == "inductor")
    loss_step = LossStep(loss_fn, plan, mesh, buffers is not None, buffer_kinds, graphs if compile else runner_of)
    BufferKinds(buffer_kinds).require_known(buffers)
    updates = Updates(optimizer, plan, mesh, donate)
    owned = OwnedExchange(plan, mesh) if plan.reductions.owner else None
    key = rng if isinstance(rng, Key) else Key(rng)
    sums = {f"buffers/{path}" if path else "buffers": checksum for path, checksum in checksums(buffers).items()}
    primitives.require_equal(
        mesh,
        "train steps",
        settings(optimizer, mesh.size)
        | sums
        | {"rng": key, "nonfinite": policy, "buffer_kinds": buffer_kinds, "compile": compile},
        "Call make_train_step with the same optimizer, buffers, rng and options on every rank.",
    )

    files = None if lifted.on_disk is None else lifted.on_disk.files
    remedy = "restore a checkpoint" if updates.alone else "make the step with donate=False to keep old states"

    def left_unreduced(inner: Any) -> tuple[str, ...]:
        owns = optimizer.owns
        return (owns.axis,) if owns is not None and owns.unreduced(inner) else ()

    @untransformed("a train step")
    @in_step
    @restore_on_failure
    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        try:
            with casting_losses(mesh.device):
                return stepped(state, batch)
        finally:
            updates.end()

    def stepped(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        opt, params = state.settled().opt, state.params
        if params.plan is not plan and params.plan != plan:
            raise TreeError(
                "this state was sharded by another plan than the train step was made for; make a step for it"
            )
        params = at_rest(params, files)
        scale = state.scale.value if state.scale else 1.0
        unreduced = left_unreduced(opt.inner)
        follower = updates.begin(params, opt, loss_step.expected_scale(scale))
        evaluation = loss_step(
            params,
            batch,
            state.buffers,
            state.rng.fold_in(state.step),
            scale,
            step=state.step,
            comm=state.comm,
            unreduced=unreduced,
            reached=set() if skips else None,
            equal=injected(opt) | {"step": state.step, "rng": state.rng, "loss scale": repr(state.scale)},
            land=lambda: updates.landing(unreduced, follower),
        )
        metrics: Metrics = {"loss": evaluation.loss, "grad_norm": evaluation.norm, "finite": evaluation.finite}
        if evaluation.layer_tokens is not None:
            metrics["layer_tokens"] = evaluation.layer_tokens
        if evaluation.aux is not None:
            metrics["aux"] = evaluation.aux
        if policy == "raise":
            require_usable(evaluation, plan, mesh, state.step)
        taken = evaluation.finite and evaluation.weight != 0
        comm, old_buffers = state.comm, state.buffers
        after = state.scale
        # A weight of 0, or one that is not finite, says nothing about overflow.
        if after is not None and math.isfinite(evaluation.weight) and evaluation.weight != 0:
            after = after.after(evaluation.finite)
        new = params.under(plan).next()
        step, state_rng = state.step + 1, state.rng
        made = None
        try:
            with interrupted_after():
                if donate:
                    state.take("the step after it", f"the state that train_step returned, or {remedy}")
                elif updates.changes(opt, taken):
                    new = Sharded(plan, mesh, "param", copied(new.buffers))
                opt = updates.apply(
                    new,
                    opt,
                    evaluation.grads,
                    MeshShards(plan, mesh, unreduced, owned, evaluation.residuals),
                    taken=taken,
                    scale=evaluation.scale,
                    squares=evaluation.squares,
                    landing=evaluation.landing,
                    used=evaluation.used,
                )
                if taken:
                    comm = evaluation.residuals.after
                if follower is not None:
                    metrics["undone"] = updates.undone
                if after is not None and after.value != scale:
                    comm = rescaled(plan, comm, after.value / scale)
                kept = evaluation.buffers if taken else old_buffers
                made = TrainState(step, new, opt, comm, kept, after, state_rng).fitting()
        except KeyboardInterrupt:
            if donate and made is not None:
                state.go_on_as(made)
            raise
        return made, metrics

    opt = updates.init(lifted)
    require_unpacked(plan, opt.inner)
    skips = skips_unused(opt.inner)
    state = TrainState(
        step=0,
        params=lifted,
        opt=opt,
        comm={name: kept for channel in plan.channels for name, kept in channel.start(mesh.device).items()},
        buffers=tree_map(lambda leaf: leaf.to(mesh.device) if isinstance(leaf, torch.Tensor) else leaf, buffers),
        scale=plan.step.loss_scale,
        rng=key,
    )
    train_step.graph = loss_step.runner if compile else None  # type: ignore[attr-defined]
    return state.fitting(), cast(TrainStep, train_step)


def unused_params(
    loss_fn: Callable[..., LossResult],
    params: Any,
    batch: Any,
    *,
    buffers: Any = None,
    buffer_kinds: Mapping[str, str] | None = None,
    rng: Key | int = 0,
) -> tuple[str, ...]:
    """Paths of the trained parameters that the loss does not use: parameters whose ``.grad`` would stay None in torch.

    Torch's optimizers do not change such parameters. Here, as in optax, their gradient is zero, and weight decay shrinks
    them. Of those that some steps use `optim.skip_unused` makes what torch does. To keep the rest unchanged, freeze them,
    which saves their optimizer state too::

        unused = sl.unused_params(loss_fn, sl.shard(params, mesh, parallel), batch)
        params = sl.shard(params, mesh, sl.chain(parallel, sl.freeze(unused)))

    Computes the loss and its gradients once. A parameter counts as used if any rank uses it in any micro-batch of ``batch``.

    Args:
        loss_fn, params, buffers, buffer_kinds, rng: as for `make_train_step`.
        batch: this rank's share of a batch.

    >>> params = {"w": torch.ones(2), "head": torch.ones(3)}
    >>> sl.unused_params(lambda params, batch: (params["w"] * batch).sum(), params, torch.ones(2))
    ('head',)
    """
    lifted = lift(params)
    plan, mesh = lifted.plan, lifted.mesh
    comm = {name: kept for channel in plan.channels for name, kept in channel.start(mesh.device).items()}
    key = rng if isinstance(rng, Key) else Key(rng)
    used = LossStep(loss_fn, plan, mesh, buffers is not None, buffer_kinds)(
        lifted, batch, buffers, key, step=0, comm=comm, reached=set(), equal={"rng": key}
    ).used
    assert used is not None
    return tuple(path for path in plan.numbering.infos if path not in used)
