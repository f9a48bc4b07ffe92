"""How a differentiable operation is defined, so that every way of asking for its gradient gives the same answer.

Two opaque custom operators, forward and backward, of `torch.library`: `torch.compile` sees a node each and never looks
inside, `torch.func.vmap` calls them once per element of the batch. Each stands under an autograd.Function of its own:
the forward's backward enters the backward's, whose backward differentiates a plain-torch version of it. So first
derivatives run kernels under `autograd.grad`, `torch.func.grad` and `torch.compile` alike, and further ones are right,
at the speed of plain torch. (`torch.library.register_autograd` refuses `torch.func.grad`; `torch.func.grad` inside a
compiled function is refused here, since the compiler then leaves out the autograd.Function.)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from shardlib._compat import below_autograd, forward_level, no_autocast
from shardlib.kernels.common.recompute import can_hook
from shardlib.kernels.common.records import layout_of

_NAMESPACE = "shardlib"

# Tensors and constants in, tensors out.
Pass = Callable[..., list[torch.Tensor]]
PerInput = Callable[[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]], Sequence[torch.Tensor | None]]
Keep = Callable[[tuple[Any, ...], tuple[torch.Tensor, ...]], tuple[Any, ...]]

# By name, since the compiler, inside a backward, knows such a class only where it finds it among the globals.
_backwards: dict[str, type[torch.autograd.Function]] = {}


def opaque(name: str, function: Pass, fake: Pass) -> Pass:
    """``function`` as ``torch.ops.shardlib.<name>``.

    Args:
        function: annotated and without defaults, as the operator's schema is made from that. Returns new, contiguous
            tensors, and changes nothing that it is given.
        fake: what it returns, as empty tensors, from tensors without values.
    """
    qualified = f"{_NAMESPACE}::{name}"
    torch.library.define(qualified, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(qualified, "CompositeExplicitAutograd")(_as_written(function))
    torch.library.register_fake(qualified, fake)
    operator = getattr(getattr(torch.ops, _NAMESPACE), name).default
    torch.library.register_vmap(qualified, _one_by_one(operator))
    torch.library.impl(qualified, "Autograd")(_refusing_gradients(name, operator))
    return operator


def differentiable(
    name: str,
    *,
    forward: Pass,
    forward_fake: Pass,
    backward: Pass,
    backward_fake: Pass,
    backward_reference: Pass,
    keep: Keep = lambda inputs, outputs: inputs,
    residuals: int = 0,
    per_input: PerInput = lambda found, incoming: found,
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A function of ``forward``'s arguments, by position, that returns its outputs as a tuple.

    ``forward``, ``backward`` and what stands in for them may take records (`shardlib.kernels.common.records`); all else,
    the function that is returned too, has the records' fields in their place.

    Args:
        name: of the operator; the backward's is ``<name>_backward``.
        forward: ``forward(*inputs)``; see `opaque`.
        backward: ``backward(*kept, *gradients)``, contiguous gradients of the outputs: returns one gradient for each
            floating-point tensor among the inputs, in their order and of their shapes. Gradients that are not asked for
            are computed too.
        backward_reference: the same in plain torch, which further derivatives differentiate; so it must compute from
            inputs and outputs alone, and leave residuals that it is given unused.
        keep: from inputs and outputs, what the backward needs. Tensors may be inputs or outputs.
        residuals: how many of the outputs, the last ones, are for the backward alone: they are kept without being
            returned, and have no gradients.
        per_input: from what the backward returned and the gradients that came in, the gradients of the inputs, where
            those are not the former: as of a sum's two terms, whose gradients are one, or None for a constant.

    A gradient of an output that nothing used comes in as zeros.
    """
    given, left = layout_of(forward), layout_of(backward)
    forward_pass = opaque(name, given.spread(forward), given.spread(forward_fake))
    backward_pass = opaque(f"{name}_backward", left.spread(backward), left.spread(backward_fake))
    further = left.spread(backward_reference)

    class Backward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*kept: Any) -> tuple[torch.Tensor, ...]:
            return _computed(backward_pass, kept)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
            _save(ctx, inputs)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            kept = _saved(ctx)
            where = _floats(kept)

            def plain(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
                return tuple(further(*_filled(kept, where, values)))

            pull = torch.func.vjp(plain, *[kept[i] for i in where])[1]
            return _filled((None,) * len(kept), where, pull(gradients))

    class Forward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
            return _computed(forward_pass, inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
            if residuals:
                ctx.mark_non_differentiable(*output[-residuals:])
            ctx.count, ctx.where = len(inputs), _floats(inputs)
            _save(ctx, keep(inputs, output))

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            gradients = gradients[: len(gradients) - residuals]
            gradients = tuple(gradient.contiguous() for gradient in gradients)
            found = _backwards[name].apply(*_saved(ctx), *gradients)
            return _filled((None,) * ctx.count, ctx.where, per_input(found, gradients))

    _backwards[name] = Backward
    # The compiler counts a forward's parameters to tell whether it takes a context.
    for function, layout in ((Forward, given), (Backward, left)):
        function.forward.__signature__ = inspect.Signature(layout.parameters)  # type: ignore[attr-defined]

    def call(*inputs: Any) -> tuple[torch.Tensor, ...]:
        if has_torch_function(inputs):  # an autograd.Function does not ask handles for their tensors
            return handle_torch_function(call, inputs, *inputs)
        # The Function costs as much as a small kernel.
        outputs = _computed(forward_pass, inputs) if _without_derivatives() else Forward.apply(*inputs)
        return outputs[: len(outputs) - residuals]

    call.__name__ = call.__qualname__ = name
    return call


def _without_derivatives() -> bool:
    """Whether no derivative of what is computed here can be asked for, of any kind, and no compiler looks on."""
    return not torch.is_grad_enabled() and can_hook() and forward_level() < 0


def _computed(operator: Pass, values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """What an operator returns. Where `_refusing_gradients` could refuse none it is passed by: it would cost microseconds."""
    if not _without_derivatives():
        return tuple(operator(*values))
    with below_autograd():
        return tuple(operator(*values))


def autocast_as_a_product(*factors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The factors of a matrix product as `torch.autocast` would have them, for operators that multiply by themselves."""
    device = factors[0].device.type
    if not torch.is_autocast_enabled(device):
        return factors
    dtype = torch.get_autocast_dtype(device)
    return tuple(factor if factor.dtype == torch.float64 else factor.to(dtype) for factor in factors)


def _as_written(function: Pass) -> Pass:
    """An operator's own operations in the dtypes that it chose: autocast stops at its inputs."""

    @functools.wraps(function)
    def kernel(*values: Any) -> list[torch.Tensor]:
        with no_autocast():
            return function(*values)

    return kernel


def _refusing_gradients(name: str, operator: Pass) -> Pass:
    """Gradients pass by an operator that no autograd.Function stands above, and torch would call them zero."""

    def kernel(*values: Any) -> list[torch.Tensor]:
        if torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values):
            raise RuntimeError(
                f"{name}: torch.func.grad inside torch.compile loses this operation's gradient; compile the loss and "
                "differentiate it by torch.autograd.grad, or leave torch.func.grad uncompiled"
            )
        with below_autograd():
            return operator(*values)

    return kernel


def _one_by_one(operator: Pass) -> Callable[..., tuple[list[torch.Tensor], list[int]]]:
    """The batching rule that is right for every operator: reductions of gradients are not mixed up."""

    def rule(info: Any, dims: tuple[int | None, ...], *values: Any) -> tuple[list[torch.Tensor], list[int]]:
        results = [
            operator(*[value if dim is None else value.select(dim, i) for value, dim in zip(values, dims)])
            for i in range(info.batch_size)
        ]
        outputs = [torch.stack(each) for each in zip(*results)]
        return outputs, [0] * len(outputs)

    return rule


def _floats(values: Sequence[Any]) -> list[int]:
    """Where the tensors are that can have gradients."""
    return [i for i, value in enumerate(values) if isinstance(value, torch.Tensor) and value.is_floating_point()]


def _filled(values: Sequence[Any], where: Sequence[int], new: Sequence[Any]) -> tuple[Any, ...]:
    result = list(values)
    for i, value in zip(where, new, strict=True):
        result[i] = value
    return tuple(result)


def _save(ctx: Any, values: tuple[Any, ...]) -> None:
    """Tensors by autograd, which then sees who changes them; constants beside them."""
    tensors = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
    ctx.save_for_backward(*[values[i] for i in tensors])
    ctx.tensors, ctx.constants = tensors, _filled(values, tensors, [None] * len(tensors))


def _saved(ctx: Any) -> tuple[Any, ...]:
    return _filled(ctx.constants, ctx.tensors, ctx.saved_tensors)
