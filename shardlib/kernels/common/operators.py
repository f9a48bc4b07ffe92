"""Definitions of differentiable operations whose gradients agree however they are asked for.

An operation is two opaque custom operators of `torch.library`, forward and backward: `torch.compile` sees each as one node
and never looks inside, `torch.func.vmap` calls them once per element of the batch. Each operator is called by an
autograd.Function: the forward one's backward applies the backward one, whose own backward differentiates a plain-torch
version of the backward pass. So first derivatives run kernels under `autograd.grad`, `torch.func.grad` and `torch.compile`
alike, and higher ones are right, at the speed of plain torch. Forward mode transposes the plain backward pass, which is
linear in the gradients. (`torch.library.register_autograd` does not support `torch.func.grad`. `torch.func.grad` inside a
compiled function is refused here, since the compiler then drops the autograd.Function.)

Where nothing but autograd looks on (no compiler, transform, mode or profiler) and tensors are ordinary ones, kernels are
called at once, by an autograd.Function of the older form: operators and `setup_context` cost more than a small kernel.

An operator of torch takes only tensors and numbers. A function may take a record (a NamedTuple, possibly nested), and its
operator takes the record's fields, in order. So the arguments of a kernel are stated once, as a record that all of its
functions take.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.overrides import handle_torch_function, has_torch_function

from shardlib.common._compat import (
    applying,
    autocasts,
    below_autograd,
    dispatch_modes,
    forward_level,
    func_transform,
    is_zero_tensor,
    jit_trace,
    no_autocast,
    profiling,
    transformed,
)
from shardlib.kernels.common.records import layout_of
from shardlib.kernels.common.saved import can_hook

# A pass takes tensors and constants and returns tensors.
Pass = Callable[..., list[torch.Tensor]]
Operator = TypeVar("Operator", bound=Callable[..., torch.Tensor | list[torch.Tensor]])
PerInput = Callable[[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]], Sequence[torch.Tensor | None]]
Keep = Callable[[tuple[Any, ...], tuple[torch.Tensor, ...]], tuple[Any, ...]]

# The autograd.Functions of backward operators, by name: inside a backward, the compiler finds such a class only in globals.
_backwards: dict[str, type[torch.autograd.Function]] = {}


def opaque(name: str, function: Operator, fake: Callable[..., Any]) -> Operator:
    """``function`` as an operator without gradients.

    Args:
        name: ``"<namespace>::<operator>"`` becomes ``torch.ops.<namespace>.<operator>``; a name without ``::`` is in
            shardlib's namespace.
        function: annotated and without defaults, as the operator's schema is made from its signature. Returns a new,
            contiguous tensor, or a list of them, and changes none of its arguments.
        fake: returns empty tensors of the shapes and dtypes that ``function`` returns, given tensors without values.

    >>> def fused(x: torch.Tensor, factor: float) -> list[torch.Tensor]:
    ...     return [x * factor]  # a kernel of your own
    >>> scale = sl.kernels.common.opaque("mylib::scale", fused, lambda x, factor: [torch.empty_like(x)])
    >>> scale(torch.ones(2), 3.0)
    [tensor([3., 3.])]
    """
    qualified = qualified_name(name)
    torch.library.define(qualified, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(qualified, "CompositeExplicitAutograd")(_without_autocast(function))
    torch.library.register_fake(qualified, fake)
    namespace, operation = qualified.split("::")
    operator = getattr(getattr(torch.ops, namespace), operation).default
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
    backward_only: int = 0,
    per_input: PerInput = lambda computed, incoming: computed,
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A function of ``forward``'s arguments, by position, that returns its outputs as a tuple.

    ``forward``, ``backward``, the fakes and the reference may take records (NamedTuples of tensors and numbers). ``keep``,
    ``per_input`` and callers of the returned function pass a record's fields instead, one by one.

    Args:
        name: of the forward operator, as in `opaque`; the backward operator is ``<name>_backward``.
        forward: ``forward(*inputs)``; see `opaque`.
        forward_fake: the ``fake`` of `opaque` for ``forward``.
        backward: ``backward(*kept, *gradients)``, with contiguous gradients of the outputs: returns one gradient for each
            floating-point tensor among the inputs, in their order and of their shapes, asked for or not. The gradient of
            an output that nothing used is zeros.
        backward_fake: the ``fake`` of `opaque` for ``backward``.
        backward_reference: ``backward`` in plain torch, which higher derivatives differentiate. It computes from inputs
            and returned outputs alone, not from outputs that are ``backward_only``.
        keep: the tensors and constants that the backward needs, from inputs and outputs.
        backward_only: the number of outputs, the last ones, that are kept for the backward and not returned; they have no
            gradients.
        per_input: the gradients of the inputs, from what ``backward`` returned and the gradients that came in, where these
            differ from the former: the two terms of a sum share one gradient, a constant has None.

    >>> def square(x: torch.Tensor) -> list[torch.Tensor]:
    ...     return [x * x]  # a kernel of your own
    >>> def slope(x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    ...     return [2 * x * dy]  # another one
    >>> def like(x, *_):
    ...     return [torch.empty_like(x)]
    >>> squared = sl.kernels.common.differentiable(
    ...     "mylib::square",
    ...     forward=square,
    ...     forward_fake=like,
    ...     backward=slope,
    ...     backward_fake=like,
    ...     backward_reference=slope,
    ... )
    >>> torch.func.grad(lambda x: squared(x)[0].sum())(torch.tensor([1.0, 2.0]))
    tensor([2., 4.])
    """
    inputs_layout, kept_layout = layout_of(forward), layout_of(backward)
    forward_kernel, backward_kernel = inputs_layout.spread(forward), kept_layout.spread(backward)
    forward_pass = opaque(name, forward_kernel, inputs_layout.spread(forward_fake))
    backward_pass = opaque(f"{name}_backward", backward_kernel, kept_layout.spread(backward_fake))
    forward_kernel, backward_kernel = _without_autocast(forward_kernel), _without_autocast(backward_kernel)
    plain_backward = kept_layout.spread(backward_reference)

    class Backward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*kept: Any) -> tuple[torch.Tensor, ...]:
            return _computed(backward_pass, kept)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
            _save(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            kept, _ = _saved(ctx)
            positions, pull = _pull_of(plain_backward, kept)
            return _replaced((None,) * len(kept), positions, pull(gradients))

    class Forward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
            return _computed(forward_pass, inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
            if backward_only:
                ctx.mark_non_differentiable(*output[-backward_only:])
            ctx.count, ctx.positions = len(inputs), _floats(inputs)
            _save(ctx, keep(inputs, output), output[: len(output) - backward_only])

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            gradients = tuple(gradient.contiguous() for gradient in gradients[: len(gradients) - backward_only])
            values = (*_saved(ctx)[0], *gradients)
            if not torch.is_grad_enabled() and _seen_by_none(values):
                computed = tuple(backward_kernel(*values))
            # Seldom does anything differentiate a gradient, and applying the Function takes as long as a small kernel.
            elif _without_derivatives():
                computed = _computed(backward_pass, values)
            else:
                computed = (PushedBackward if transformed() else _backwards[name]).apply(*values)
            return _replaced((None,) * ctx.count, ctx.positions, per_input(computed, gradients))

    # The compiler, torch.func and forward mode take no Function whose forward takes a context.
    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
            outputs = tuple(forward_kernel(*inputs))
            if backward_only:
                ctx.mark_non_differentiable(*outputs[-backward_only:])
            ctx.count, ctx.positions = len(inputs), _floats(inputs)
            _save(ctx, keep(inputs, outputs))
            return outputs

        backward = staticmethod(Forward.backward)

    # Apart, as the compiler takes no Function with a jvp.
    class PushedBackward(Backward):
        @staticmethod
        def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
            kept, outputs = _saved(ctx)
            positions, pull = _pull_of(plain_backward, kept)
            return _pushed(lambda *gradients: pull(gradients), outputs, [tangents[i] for i in positions])

    class PushedForward(Forward):
        @staticmethod
        def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            kept, outputs = _saved(ctx)

            def pull(*gradients: torch.Tensor) -> Sequence[torch.Tensor | None]:
                return per_input(tuple(plain_backward(*kept, *gradients)), gradients)

            return (*_pushed(pull, outputs, [tangents[i] for i in ctx.positions]), *(None,) * backward_only)

    _backwards[name], direct = Backward, applying(Direct)
    # The compiler counts a forward's parameters to decide whether it takes a context.
    for function, layout in ((Forward, inputs_layout), (Backward, kept_layout)):
        function.forward.__signature__ = inspect.Signature(layout.parameters)  # type: ignore[attr-defined]

    def call(*inputs: Any) -> tuple[torch.Tensor, ...]:
        if has_torch_function(inputs):  # an autograd.Function does not ask handles for their tensors
            return handle_torch_function(call, inputs, *inputs)
        if _seen_by_none(inputs):
            outputs = direct(*inputs) if torch.is_grad_enabled() else forward_kernel(*inputs)
        elif _without_derivatives():
            outputs = _computed(forward_pass, inputs)
        else:
            outputs = (PushedForward if transformed() else Forward).apply(*inputs)
        return outputs[: len(outputs) - backward_only]

    call.__name__ = call.__qualname__ = name.split("::")[-1]
    return call


def qualified_name(name: str) -> str:
    """An operator's name with its namespace, by default the library's."""
    return name if "::" in name else f"shardlib::{name}"


_ORDINARY = {torch.Tensor, torch.nn.Parameter}
_CONSTANTS = {type(None), bool, int, float, str}


def _seen_by_none(values: Sequence[Any]) -> bool:
    """Whether nothing but autograd sees what is computed now, and a kernel may read the tensors by their addresses."""
    if torch.compiler.is_compiling() or func_transform() is not None or forward_level() >= 0:
        return False
    if dispatch_modes() or profiling() or jit_trace() is not None:
        return False
    for value in values:
        kind = type(value)
        if kind in _ORDINARY:
            if value.is_meta or value.is_neg() or is_zero_tensor(value):
                return False
        elif kind not in _CONSTANTS and isinstance(value, torch.Tensor):
            return False
    return True


def _without_derivatives() -> bool:
    """Whether nothing can differentiate what is computed now, in any mode, and no compiler traces it."""
    return not torch.is_grad_enabled() and can_hook() and forward_level() < 0


def _computed(operator: Pass, values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """The operator's outputs. Where no gradient can be lost, `_refusing_gradients`, which takes microseconds, is skipped."""
    if not _without_derivatives():
        return tuple(operator(*values))
    with below_autograd():
        return tuple(operator(*values))


def autocast_as_a_product(*factors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The factors of a matrix product in the dtype that `torch.autocast` gives them, for operators that contain products."""
    device = factors[0].device.type
    if not torch.is_autocast_enabled(device):
        return factors
    dtype = torch.get_autocast_dtype(device)
    return tuple(factor if factor.dtype == torch.float64 else factor.to(dtype) for factor in factors)


def _without_autocast(function: Operator) -> Operator:
    """``function`` with autocast off: an operator computes in the dtypes that it chooses."""

    @functools.wraps(function)
    def kernel(*values: Any) -> Any:
        if not autocasts():
            return function(*values)
        with no_autocast():
            return function(*values)

    return kernel  # type: ignore[return-value]


def _refusing_gradients(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator for calls that did not come through its autograd.Function: torch would silently return zero gradients."""

    def kernel(*values: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values):
            raise RuntimeError(
                f"{name}: torch.func.grad inside torch.compile loses this operation's gradient; compile the loss and "
                "differentiate it by torch.autograd.grad"
            )
        with below_autograd():
            return operator(*values)

    return kernel


def _one_by_one(operator: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """A batching rule that is right for every operator, as each call reduces gradients over one element of the batch."""

    def rule(info: Any, dims: tuple[int | None, ...], *values: Any) -> tuple[Any, Any]:
        results = [
            operator(*[value if dim is None else value.select(dim, i) for value, dim in zip(values, dims)])
            for i in range(info.batch_size)
        ]
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        outputs = [torch.stack(each) for each in zip(*results)]
        return outputs, [0] * len(outputs)

    return rule


def _floats(values: Sequence[Any]) -> list[int]:
    """Positions of the tensors that can have gradients."""
    return [i for i, value in enumerate(values) if isinstance(value, torch.Tensor) and value.is_floating_point()]


def _replaced(values: Sequence[Any], positions: Sequence[int], new: Sequence[Any]) -> tuple[Any, ...]:
    """``values`` with ``new`` ones at ``positions``."""
    result = list(values)
    for i, value in zip(positions, new, strict=True):
        result[i] = value
    return tuple(result)


def _save(ctx: Any, values: tuple[Any, ...], outputs: tuple[torch.Tensor, ...] = ()) -> None:
    """Saves tensors by autograd, which notices changes in place, and constants on ``ctx``."""
    tensors, saved, constants = [], [], list(values)
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            tensors.append(i)
            saved.append(value)
            constants[i] = None
    if (
        outputs and transformed()
    ):  # one list for both, as torch.func.vmap keeps the batch dimensions of the last one alone
        saved += outputs
        ctx.save_for_forward(*saved)
    ctx.save_for_backward(*saved)
    ctx.tensors, ctx.constants = tensors, constants


def _saved(ctx: Any) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
    """What `_save` saved, and the outputs, where forward mode asks."""
    count, saved = len(ctx.tensors), ctx.saved_tensors  # asked for once: a checkpoint gives them once
    return _replaced(ctx.constants, ctx.tensors, saved[:count]), saved[count:]


def _pull_of(function: Pass, values: tuple[Any, ...]) -> tuple[list[int], Callable[..., Any]]:
    """Positions of the floating-point tensors among ``values``, and from the gradients of ``function(*values)`` to theirs."""
    positions = _floats(values)

    def plain(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(function(*_replaced(values, positions, tensors)))

    return positions, torch.func.vjp(plain, *[values[i] for i in positions])[1]


def _pushed(
    pull: Callable[..., Sequence[torch.Tensor | None]],
    outputs: tuple[torch.Tensor, ...],
    tangents: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, ...]:
    """The tangents of outputs, from those of inputs; ``pull`` is linear, from gradients of outputs to those of inputs."""
    known: list[torch.Tensor] = []

    def moving(*gradients: torch.Tensor) -> list[torch.Tensor]:
        pulled = [(each, tangent) for each, tangent in zip(pull(*gradients), tangents, strict=True) if each is not None]
        known[:] = [torch.zeros_like(each) if tangent is None else tangent for each, tangent in pulled]
        return [each for each, _ in pulled]

    push = torch.func.vjp(moving, *map(torch.zeros_like, outputs))[1]
    return tuple(tangent.contiguous() for tangent in push(known))  # laid out as outputs are
