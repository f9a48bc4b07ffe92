"""How the layers of a model run at a step that leaves out some of them, or some of their tokens.

The layers that a step leaves out are neither gathered nor computed, and their gradients, which are zero, are not sent. What
is left out is left out of the trace of the exchanges (see `shardlib.execute.gathering`), so that must be of all layers. While
the ranks have none and agree on each exchange, which is in the first micro-batch of a process, layers that are left out are
computed for the sake of their exchanges, and the results ignored; what they send are zeros, with no residual. (Progressive
layer drop leaves out nothing at step 0, so this concerns runs that are resumed.)
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import optree
import torch

from shardlib.common._compat import pytree
from shardlib.errors import LossError, ShardlibError
from shardlib.execute.handles import Handle
from shardlib.execute.losses import wants
from shardlib.execute.subset import Subset, drawn_tokens
from shardlib.nn.blocks import Runner
from shardlib.nn.gate import Gate
from shardlib.plan.plan import Plan
from shardlib.plan.thinning import Thinned, Visit
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
        layers = plan.step.layers
        here = {path for bucket in plan.buckets for path in bucket.paths}
        self._paths = [
            next((layer for layer in layers if path.startswith(f"{layer}/")), "") for path in plan.shape.paths
        ]
        held = zip(self._paths, plan.leaves, strict=True)
        self._expected = sorted({layer for layer, leaf in held if layer and leaf.path in here})
        self._thinned: Thinned | None = None
        self._computes = False
        self._tokens = 0  # that layers have seen
        self._told = False  # of what is cut beside the residual stream
        self._layer_of: dict[int, str] = {}  # identity of a leaf that stands for a parameter -> layer
        self._leaves: list[Any] = []  # these leaves: identities are of what is alive
        self._ran = False

    def begin(self, thinned: Thinned | None, computes: bool) -> None:
        """Begin a micro-batch.

        Args:
            thinned: what the step leaves out; None for nothing.
            computes: whether what is left out is computed for the sake of its exchanges.
        """
        self._thinned, self._computes, self._ran, self._tokens = thinned, computes, False, 0
        self._layer_of, self._leaves = {}, []

    def know(self, leaves: list[Any]) -> None:
        """Know the leaves that stand for the parameters of the micro-batch, in the order of the pytree."""
        if self._thinned is None:
            return
        self._leaves = leaves
        for layer, leaf in zip(self._paths, leaves, strict=True):
            if leaf is not None:  # a leaf that several layers share tells nothing
                shared = self._layer_of.get(id(leaf), layer) != layer
                self._layer_of[id(leaf)] = "" if shared else layer

    def end(self) -> int:
        """End the micro-batch, and let go of its leaves; returns the number of tokens that its layers saw together."""
        self._layer_of, self._leaves = {}, []
        seen, self._tokens = self._tokens, 0
        return seen

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], run: Runner) -> Any:
        """The value of a block, which ``run`` computes."""
        visit = self._visit(args, kwargs)
        if visit is None:
            return run(fn, args, kwargs)
        self._ran = True
        gated = _takes_gate(fn)
        if visit.runs:
            return self._kept(fn, args, kwargs, run, visit, gated)
        result = fn(*args, **kwargs, gate=Gate(visit.keep, open=False)) if gated else self._carry(args, kwargs)
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
    ) -> Any:
        """The value of a layer that runs."""
        whole = self._carry(args, kwargs)
        subset = self._subset(visit, whole)
        if subset is None:
            return self._gated(fn, args, kwargs, run, Gate(visit.keep), gated)
        self._tell_of_cuts(subset.beside((args, kwargs), whole, self._aside), fn)
        vectors = subset.vectors((args, kwargs), self._aside)
        args, kwargs = subset.of((args, kwargs), self._aside)
        try:
            result = self._gated(fn, args, kwargs, run, Gate(visit.keep, tokens=subset.index), gated)
        except RuntimeError as error:
            if not vectors or isinstance(error, ShardlibError):
                raise
            raise LossError(
                f"{_name(fn)} failed on the {subset.index.shape[1]} tokens that random_ltd keeps, beside {_form(vectors)}, "
                "which as a matrix of floats is a vector for each row and is not cut: values for each token are "
                f"(B, tokens, 1) ({error})"
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
    ) -> Any:
        """The value of a layer that runs, scaled."""
        if gated:
            return run(fn, args, {**kwargs, "gate": gate})
        result = run(fn, args, kwargs)
        return result if gate.keep is None else self._between(gate, self._carry(args, kwargs), result, fn)

    def _aside(self, leaf: Any) -> bool:
        """Whether an argument's leaf is a parameter, which is never cut."""
        return isinstance(leaf, Handle) or id(leaf) in self._layer_of

    def _tell_of_cuts(self, beside: list[torch.Tensor], fn: Callable[..., Any]) -> None:
        """Log, once, that layers have floats beside the residual stream which are taken as values of its tokens."""
        if beside and not self._told:
            self._told = True
            _log.warning(
                "random_ltd cuts what %s takes beside the residual stream, %s, to the tokens that the layer keeps, as values "
                "for each token. If it is another sequence, of an encoder, that is only as long, pass it with one more "
                "dimension: (B, 1, tokens, width)",
                _name(fn),
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
                f"random_ltd leaves out tokens of a residual stream (B, tokens, width), and this one is {list(stream.shape)}"
            )
        if count == length:
            return None
        assert visit.key is not None
        return Subset(drawn_tokens(visit.key, rows, length, count, stream.device), length)

    def require_some(self) -> None:
        """Refuse a function in which none of the stage's layers was a block.

        Raises:
            LossError: see above.
        """
        if self._thinned is not None and self._expected and not self._ran:
            raise LossError(
                f"the plan leaves out parts of layers ({self._expected[0]} … {self._expected[-1]}), and none of them "
                "ran as a block, which can be left out: mark the layers' function with sl.block, called with a layer's "
                "parameters, or make the loss sl.sequential([...]); for transformers' decoders sl.from_module(model, "
                "blocks=sl.models.huggingface.decoder_blocks(model))"
            )

    def _visit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Visit | None:
        """What the layer does whose parameters are among these arguments; None if it is no layer of the plan's."""
        if self._thinned is None:
            return None
        layer = next(filter(None, (self._layer_of.get(id(leaf)) for leaf in leaves_of((args, kwargs)))), None)
        return None if layer is None else self._thinned.visits.get(layer)

    def _carry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first argument beside the parameters with a floating tensor: what the block's result takes the place of."""
        for value in (*args, *kwargs.values()):
            leaves = leaves_of(value)
            if any(_floats(leaf) for leaf in leaves) and not any(id(leaf) in self._layer_of for leaf in leaves):
                return value
        raise LossError(
            "a layer that can be left out takes a floating tensor beside its parameters: the residual stream"
        )

    def _between(self, gate: Gate, carry: Any, result: Any, fn: Callable[..., Any]) -> Any:
        """The result of a layer that was kept, scaled."""
        before, after = (optree.tree_flatten(tree, none_is_leaf=True) for tree in (carry, result))
        kinds = [[_kind(leaf) for leaf in leaves] for leaves in (before[0], after[0])]
        if before[1] != after[1] or kinds[0] != kinds[1]:
            raise LossError(
                f"{_name(fn)} is a layer that can be left out, so its result must have the form of "
                f"what it takes the place of: {_form(before[0])}, and it returns {_form(after[0])}. Return the residual "
                "stream alone, or give the block a parameter gate (see sl.nn.Gate) "
                "and let it return what it returns when it is left out"
            )
        return tree_map(lambda one, other: gate.between(one, other) if _floats(one) else other, carry, result)


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


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__qualname__", fn))


def _form(leaves: list[Any]) -> str:
    return "(" + ", ".join(str(list(leaf.shape)) if isinstance(leaf, torch.Tensor) else "-" for leaf in leaves) + ")"


def _ignoring(computed: Any, result: Any) -> Any:
    """``result``, with gradients of zero for ``computed``."""
    extra = [leaf for leaf in leaves_of(computed) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    leaves, shape = pytree.tree_flatten(result)
    at = next(number for number, leaf in enumerate(leaves) if _floats(leaf))
    leaves[at] = _Ignoring.apply(leaves[at], *extra)
    return pytree.tree_unflatten(leaves, shape)


class _Ignoring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *computed: torch.Tensor) -> torch.Tensor:
        ctx.like = [(each.shape, each.dtype, each.device) for each in computed]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like)
        return grad, *zeros
