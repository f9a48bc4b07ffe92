"""The checkpoint of a block, by the policy that a plan names."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardlib.common._compat import FUSED_ATTENTIONS, pytree, scaled_product, transformed
from shardlib.execute.activations.names import RECOMPUTE_MODES, contexts, noting
from shardlib.execute.activations.statistics import Draws, decided_once, updated_once
from shardlib.execute.handles import Handle
from shardlib.plan.recompute import Recompute


def checkpointed(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    how: Recompute,
    names: set[str],
    draws: Draws,
    updates: Collection[str],
) -> Any:
    """``fn(*args, **kwargs)``, which backward computes again, with the same draws and decisions.

    Args:
        names: the names of values, which are added to where the policy keeps some by name.
        updates: see `updated_once`.

    Forward mode and `torch.func` keep everything: a recomputation would have neither their tangents nor their levels.
    """
    if transformed():
        with noting(names):
            return fn(*args, **kwargs)
    compiles = torch.compiler.is_compiling()  # torch's own way to keep generators' states is known to its compiler
    fn = fn if compiles else decided_once(updated_once(draws.repeated(fn), updates), RECOMPUTE_MODES)
    leaves, shape = pytree.tree_flatten((args, kwargs))
    # A checkpoint sees the tensors among its arguments alone: those in pytrees are given to it one by one.
    seen = [isinstance(leaf, torch.Tensor) and not isinstance(leaf, Handle) for leaf in leaves]
    others = [None if tensor else leaf for tensor, leaf in zip(seen, leaves)]

    def call(others: list[Any], *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        whole = [next(given) if tensor else other for tensor, other in zip(seen, others)]
        args, kwargs = pytree.tree_unflatten(whole, shape)
        return fn(*args, **kwargs)

    tensors = [leaf for tensor, leaf in zip(seen, leaves) if tensor]
    del args, kwargs, leaves  # what is kept elsewhere must not be kept here
    policy = _policy(how, names, compiles)
    return checkpoint(call, others, *tensors, use_reentrant=False, preserve_rng_state=compiles, **policy)


def policy_of(how: Recompute) -> Callable[..., CheckpointPolicy | bool] | None:
    """What decides by operation whether a result is kept; None where inputs of blocks and named values alone are."""
    if how.policy == "full":
        return None
    return _keep_dots if how.policy == "dots" else how.policy  # type: ignore[return-value]


def _policy(how: Recompute, names: set[str], compiles: bool) -> dict[str, Any]:
    if how.save:
        return {"context_fn": partial(contexts, how.save, names)}
    keeps = policy_of(how)
    if keeps is None:
        return {}

    def made() -> tuple[Any, Any]:
        first, again = create_selective_checkpoint_contexts(keeps)
        return first, again if compiles else _Once(again)

    return {"context_fn": made}


class _Once:
    """A policy's context for recomputation, which gives away what it kept: a further one computes everything.

    The second derivative of a block recomputes it a second time.
    """

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self._context, self._entered = context, nullcontext()  # type: AbstractContextManager[Any], AbstractContextManager[Any]

    def __enter__(self) -> None:
        self._entered, self._context = self._context, nullcontext()
        self._entered.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)


DOTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    scaled_product,
    *FUSED_ATTENTIONS,
}


def _keep_dots(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in DOTS else CheckpointPolicy.PREFER_RECOMPUTE
