"""How the layers of a model run at a step that leaves out some of them, or some of their tokens.

The layers that a step leaves out are neither gathered nor computed, and their gradients, which are zero, are not sent.
What is left out is left out of the trace of the exchanges (`shardlib.execute.collective_order`), so that must be of all
layers. While the ranks have none and agree on each exchange, which is in the first micro-batch of a process, layers that
are left out are computed for the sake of their exchanges, and the results ignored; what they send are zeros, with no
residual. (Progressive layer drop leaves out nothing at step 0, so this concerns runs that are resumed.)
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import optree
import torch

from shardlib.common._compat import differentiated, pytree
from shardlib.errors import LossError, ShardlibError
from shardlib.execute.handles import Handle
from shardlib.execute.layer_blocks import LayerBlocks, name_of
from shardlib.execute.losses import wants
from shardlib.execute.token_subset import Subset, drawn_tokens
from shardlib.nn.blocks import Gate, Runner
from shardlib.plan.drops import DropPlan, Visit
from shardlib.plan.plan import Plan
from shardlib.rng import restore_generators, states_of_generators
from shardlib.tree import leaves_of, tree_map

_log = logging.getLogger("shardlib.execute")


class Layers:
    """The layers of one micro-batch.

    Args:
        plan: of the stage.
        device: the device that the rank computes on.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._device = device
        self._blocks = LayerBlocks(plan)
        self._drops: DropPlan | None = None
        self._computes = False
        self._tokens = 0  # that layers have seen
        self._told = False  # of what is cut beside the residual stream

    def begin(self, drops: DropPlan | None, computes: bool) -> None:
        """Begin a micro-batch.

        Args:
            drops: what the step leaves out; None for nothing.
            computes: whether what is left out is computed for the sake of its exchanges.
        """
        self._drops, self._computes, self._tokens = drops, computes, 0
        self._blocks.forget()

    def know(self, leaves: list[Any]) -> None:
        """Know the leaves that stand for the parameters of the micro-batch, in the order of the pytree."""
        if self._drops is not None:
            self._blocks.know(leaves)

    def end(self) -> int:
        """End the micro-batch, and let go of its leaves; returns the number of tokens that its layers saw together."""
        self._blocks.forget()
        seen, self._tokens = self._tokens, 0
        return seen

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], run: Runner) -> Any:
        """The value of a block, which ``run`` computes.

        Raises:
            LossError: a block with parameters of several layers; one whose result does not take the residual stream's place.
        """
        if self._drops is None:
            return run(fn, args, kwargs)
        with self._blocks.entered(fn, args, kwargs) as layer:
            return self._visited(fn, args, kwargs, run, self._drops.visits[layer]) if layer else run(fn, args, kwargs)

    def run_within(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], run: Runner) -> Any:
        """The value of a block within a block, which ``run`` computes: a part of the layer that the other one is.

        Raises:
            LossError: the block is another layer.
        """
        if self._drops is not None:
            self._blocks.require_no_layer(fn, args, kwargs)
        return run(fn, args, kwargs)

    def require_all(self) -> None:
        """Refuse a function in which a layer of the stage was no block, or layers ran in another order than the plan's.

        Raises:
            LossError: see above; names the layers.
        """
        if self._drops is not None:
            self._blocks.require_all()

    def _visited(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], run: Runner, visit: Visit
    ) -> Any:
        """The value of a layer."""
        gated, streams = _takes_gate(fn), self._streams(args, kwargs)
        if visit.tokens is not None or (visit.keep is not None and not gated):
            self._require_one(fn, streams)
        if visit.runs:
            return self._kept(fn, args, kwargs, run, visit, gated, _first(streams))
        result = fn(*args, **kwargs, gate=Gate(visit.keep, open=False)) if gated else _first(streams)
        if not self._computes:
            return result
        draws = states_of_generators(self._device)
        computed = run(fn, args, kwargs)
        restore_generators(draws)
        return _ignoring(computed, result)

    def _kept(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Runner,
        visit: Visit,
        gated: bool,
        whole: Any,
    ) -> Any:
        """The value of a layer that runs on the residual stream ``whole``."""
        subset = self._subset(visit, whole)
        if subset is None:
            return self._gated(fn, args, kwargs, run, Gate(visit.keep), gated, whole)
        self._tell_of_cuts(subset.beside((args, kwargs), whole, self._aside), fn)
        vectors = subset.vectors((args, kwargs), self._aside)
        args, kwargs = subset.of((args, kwargs), self._aside)
        try:
            gate, carry = Gate(visit.keep, tokens=subset.index), _first(self._streams(args, kwargs))
            result = self._gated(fn, args, kwargs, run, gate, gated, carry)
        except RuntimeError as error:
            if not vectors or isinstance(error, ShardlibError):
                raise
            raise LossError(
                f"{name_of(fn)} failed on the {subset.index.shape[1]} tokens that random_ltd keeps, beside "
                f"{_form(vectors)}, a vector per row. Give values per token as (B, tokens, 1) ({error})"
            ) from error
        return subset.back(whole, result)

    def _gated(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Runner,
        gate: Gate,
        gated: bool,
        carry: Any,
    ) -> Any:
        """The value of a layer that runs, scaled."""
        if gated:
            return run(fn, args, {**kwargs, "gate": gate})
        result = run(fn, args, kwargs)
        return result if gate.keep is None else self._between(gate, carry, result, fn)

    def _aside(self, leaf: Any) -> bool:
        """Whether an argument's leaf is a parameter, which is never cut."""
        return isinstance(leaf, Handle) or self._blocks.is_param(leaf)

    def _tell_of_cuts(self, beside: list[torch.Tensor], fn: Callable[..., Any]) -> None:
        """Log, once, that layers have floats beside the residual stream which are taken as values of its tokens."""
        if beside and not self._told:
            self._told = True
            _log.warning(
                "random_ltd cuts what %s takes beside the residual stream, %s, to the tokens that the layer keeps, as values "
                "for each token. If it is another sequence, of an encoder, that is only as long, pass it with one more "
                "dimension: (B, 1, tokens, width)",
                name_of(fn),
                _form(beside),
            )

    def _subset(self, visit: Visit, carry: Any) -> Subset | None:
        """The tokens of the residual stream that a layer sees; None for all. Counts them."""
        stream = next(leaf for leaf in leaves_of(carry) if _floats(leaf))
        rows, length = stream.shape[:2] if stream.dim() > 2 else (0, 0)
        count = length if visit.tokens is None else min(visit.tokens, length)
        self._tokens += rows * count
        if visit.tokens is not None and not length:
            raise LossError(
                f"random_ltd leaves out tokens of a stream (B, tokens, width), and this one is {list(stream.shape)}"
            )
        if count == length:
            return None
        assert visit.key is not None
        return Subset(drawn_tokens(visit.key, rows, length, count, stream.device), length)

    def _streams(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int | str, Any]]:
        """The arguments with floating tensors beside the parameters: those by position, or else those by keyword. The first
        is the residual stream, of which the block's result takes the place."""

        def among(given: Iterable[tuple[int | str, Any]]) -> list[tuple[int | str, Any]]:
            return [(place, value) for place, value in given if self._may_be_stream(leaves_of(value))]

        return among(enumerate(args)) or among(kwargs.items())

    def _may_be_stream(self, leaves: list[Any]) -> bool:
        return not any(map(self._blocks.is_param, leaves)) and any(map(_floats, leaves))

    def _require_one(self, fn: Callable[..., Any], streams: list[tuple[int | str, Any]]) -> None:
        """Refuse a layer whose residual stream might be another argument, which has the same form."""
        if len(streams) < 2:
            return
        stream, form = streams[0][1], _form_of(streams[0][1])
        alike = [(place, value) for place, value in streams if _form_of(value) == form]
        if any(value is not stream for _, value in alike):
            names = " and ".join(_argument(fn, place) for place, _ in alike)
            raise LossError(
                f"{name_of(fn)} takes {names} of one form, {_form(leaves_of(stream))}. Pass the residual stream by "
                "position, others by keyword (sl.sequential: give carry and batch different forms)"
            )

    def _between(self, gate: Gate, carry: Any, result: Any, fn: Callable[..., Any]) -> Any:
        """The result of a layer that was kept, scaled."""
        before, after = (optree.tree_flatten(tree, none_is_leaf=True) for tree in (carry, result))
        kinds = [[_kind(leaf) for leaf in leaves] for leaves in (before[0], after[0])]
        if before[1] != after[1] or kinds[0] != kinds[1]:
            structures = "" if before[1] == after[1] else f", in the structures {before[1]} and {after[1]}"
            raise LossError(
                f"{name_of(fn)}, a layer that can be left out, takes {_form(before[0])} and returns "
                f"{_form(after[0])}{structures}. Return the residual stream alone, take a gate (sl.nn.Gate), or name "
                "the layers, layers=[...]"
            )
        return tree_map(lambda one, other: gate.between(one, other) if _floats(one) else other, carry, result)


def _first(streams: list[tuple[int | str, Any]]) -> Any:
    """The residual stream."""
    if not streams:
        raise LossError("a layer that can be left out takes a floating tensor, the residual stream")
    return streams[0][1]


def _takes_gate(fn: Callable[..., Any]) -> bool:
    """Whether a block scales its branches itself. Wrappers, which may be made for one call, are not remembered."""
    return _wants_gate(inspect.unwrap(fn, stop=lambda wrapper: hasattr(wrapper, "__signature__")))


@lru_cache(maxsize=512)
def _wants_gate(fn: Callable[..., Any]) -> bool:
    return wants(fn, "gate")


def _floats(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, Handle) and leaf.is_floating_point()


def _kind(leaf: Any) -> Any:
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None


def _form_of(tree: Any) -> Any:
    """What two arguments have in common that may be mistaken for each other."""
    leaves, shape = optree.tree_flatten(tree, none_is_leaf=True)
    return shape, [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]


def _argument(fn: Callable[..., Any], place: int | str) -> str:
    """The name of an argument, for messages."""
    if isinstance(place, str):
        return place
    try:
        return list(inspect.signature(fn).parameters)[place]
    except (TypeError, ValueError, IndexError):
        return f"argument {place}"


def _form(leaves: list[Any]) -> str:
    return "(" + ", ".join(str(list(leaf.shape)) if isinstance(leaf, torch.Tensor) else "-" for leaf in leaves) + ")"


def _ignoring(computed: Any, result: Any) -> Any:
    """``result``, with gradients of zero for ``computed``."""
    extra = [leaf for leaf in leaves_of(computed) if isinstance(leaf, torch.Tensor) and differentiated(leaf)]
    leaves, shape = pytree.tree_flatten(result)
    at = next(number for number, leaf in enumerate(leaves) if _floats(leaf))
    leaves[at] = _Ignoring.apply(leaves[at], *extra)
    return pytree.tree_unflatten(leaves, shape)


class _Ignoring(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, *computed: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.like = [(each.shape, each.dtype, each.device) for each in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like)
        return grad, *zeros

    @staticmethod
    def jvp(ctx: Any, x: torch.Tensor | None, *_: Any) -> torch.Tensor | None:
        return None if x is None else x.view_as(x)
