"""Floating-point operations of operators, by the shapes of their arguments.

A multiplication and an addition are two operations. Counted are matrix products, also those inside of fused operators.
Torch's own table is extended by the operators that it leaves out or miscounts, and shardlib's operations add theirs where
they are defined (`shardlib.kernels.common.operators.counted`). Causal attention counts in full, as is the convention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


class Flops(NamedTuple):
    """The floating-point operations of one operator.

    Attributes:
        done: how many it does.
        again: how many of these compute what was computed before: the scores of fused attention, in backward.
    """

    done: int
    again: int = 0


def flops_of(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Flops | None:
    """The operations of a dispatched operator; None if it contains no product."""
    packet = _IN_PLACE.get(operator.overloadpacket, operator.overloadpacket)
    if further := _FURTHER.get(packet):
        done = further(*args)
    elif count := flop_registry.get(packet):
        done = count(*args, **kwargs, out_val=result)
    else:
        return None
    return Flops(
        done, _scores_again(operator, args, done) if attends(operator) and "backward" in operator.name() else 0
    )


def attends(operator: Any) -> bool:
    """Whether an operator is fused attention."""
    return "attention" in operator.name()


def _scores_again(operator: Any, args: Sequence[Any], done: int) -> int:
    """The first of the five products of fused attention's backward computes the scores again: three have the width of
    queries, and two that of values."""
    if operator.namespace != "aten":
        return done // 5
    _, query, _, value, *_ = args
    width = query.shape[-1]
    return done * width // (3 * width + 2 * value.shape[-1])


def _scores(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _scores_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> int:
    return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)


def _grouped(a: torch.Tensor, b: torch.Tensor, *_: Any) -> int:
    """``[R, k] · [E, k, n]``, ``[m, R] · [R, n]`` or ``[E, m, k] · [k, R]`` by ranges of R, or ``[E, m, k] · [E, k, n]``."""
    own = a.shape[0] if a.dim() > b.dim() else 1  # each column of the second meets one matrix of the first
    return 2 * a.numel() * b.shape[-1] // own


def _scaled(a: torch.Tensor, b: torch.Tensor, *_: Any) -> int:
    return 2 * a.numel() * b.shape[-1]


def _by_vector(matrix: torch.Tensor, *_: Any) -> int:
    return 2 * matrix.numel()


def _onto_by_vector(_: Any, matrix: torch.Tensor, *__: Any) -> int:
    return 2 * matrix.numel()


def _outer_sum(_: Any, a: torch.Tensor, b: torch.Tensor, *__: Any) -> int:
    return 2 * a.numel() * b.shape[-1]


def _outer(_: Any, a: torch.Tensor, b: torch.Tensor, *__: Any) -> int:
    return 2 * math.prod((*a.shape, *b.shape))


def _convolution_backward(gradient: torch.Tensor, inp: torch.Tensor, weight: torch.Tensor, *more: Any) -> int:
    """Forward's product for each gradient that is asked for. Torch's table takes the weight of a group for that of all."""
    transposed, (of_input, of_weight, _) = more[4], more[7]
    rows, _, *positions = (inp if transposed else gradient).shape  # each meets every element of the weight
    return 2 * rows * math.prod(positions) * weight.numel() * (of_input + of_weight)


def _recurrent(inp: torch.Tensor, of_input: torch.Tensor, of_state: torch.Tensor, *_: Any) -> int:
    """A layer's products by the weights of its input and of its state, at every step of every row."""
    return 2 * math.prod(inp.shape[:-1]) * (of_input.numel() + of_state.numel())


def _recurrent_backward(*args: Any) -> int:
    return 2 * _recurrent(*args)


_FURTHER: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _scores,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _scores_backward,
    aten._scaled_dot_product_fused_attention_overrideable: _scores,
    aten._scaled_dot_product_fused_attention_overrideable_backward: _scores_backward,
    aten._grouped_mm: _grouped,
    aten._scaled_mm_v2: _scaled,
    aten.mv: _by_vector,
    aten.dot: _by_vector,
    aten.vdot: _by_vector,
    aten.addmv: _onto_by_vector,
    aten.addbmm: _outer_sum,
    aten.addr: _outer,
    aten.convolution_backward: _convolution_backward,
    aten.mkldnn_rnn_layer: _recurrent,
    aten.mkldnn_rnn_layer_backward: _recurrent_backward,
}
# The table has no operators that add to their first argument in place: they count as those that do not.
_IN_PLACE = {getattr(aten, f"{name}_"): getattr(aten, name) for name in ("addmm", "baddbmm", "addmv", "addbmm", "addr")}
