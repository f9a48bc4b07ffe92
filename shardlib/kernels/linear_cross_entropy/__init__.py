"""Σ_i loss(x_i Wᵀ, t_i), the cross entropy of an output layer, with the logits of one chunk of tokens in memory at a time.

For token i with logits z = x_i Wᵀ over V words, l = log Σ_v e^z_v and label smoothing s:

- loss_i = l − (1 − s)·z_t − s·mean(z), 0 if t is ignored.
- dz = softmax(z) − (1 − s)·onehot(t) − s/V;  dx_i = dz·W;  dW = Σ_i dzᵀ·x_i.

If gradients are needed, the forward pass computes dx and dW too: dz is computed from the same logits and replaces them.
That is three matrix products, as with all logits in memory; computing logits again in backward would be four. Backward
multiplies dx and dW by the gradient of the loss. (torch 2.13's chunked ``F.linear_cross_entropy`` does so too; `torch.func`
and `torch.compile` refuse it, and on CPU it was slower than all logits at once.)

x is ``[tokens, width]``, W ``[V, width]``, in fp32, bf16 or fp16 (float64 by plain torch); softmax, losses and the sum of
dW over chunks are in fp32. Memory besides the gradients: one chunk of logits, 2^24 numbers on CPU and 2^27 on CUDA (at least
one token's), where plain torch stores tokens·V numbers three times. Operations: 6·tokens·V·width. The kernel here computes
losses from logits and replaces these by dz: it reads them three times and writes them once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from shardlib.common._compat import differentiated
from shardlib.common.thresholds import Threshold, threads
from shardlib.kernels.common import native, rows
from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.dispatch import Plain, on, serving
from shardlib.kernels.common.flops import counted
from shardlib.kernels.common.operators import autocast_as_a_product, differentiable

__all__ = ["linear_cross_entropy"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("triton",)}
_CHUNK = {"cpu": Threshold(1 << 24), "cuda": Threshold(1 << 27)}  # logits; every chunk adds a pass over dW


class Aim(NamedTuple):
    """The targets of some tokens, and how they count.

    Attributes:
        targets: ``[tokens]``, int64: the number of a word for each token.
        ignore_index: a target whose token has no loss.
        label_smoothing: the share of a target that is spread over all words.
    """

    targets: torch.Tensor
    ignore_index: int
    label_smoothing: float


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    using: str | None = None,
) -> torch.Tensor:
    """``F.cross_entropy(F.linear(x, weight), targets, ...)``, a scalar in fp32 at least. Autocast as in `F.linear`.

    Args:
        x: ``[..., width]``.
        weight: ``[V, width]``, of the dtype of ``x``.
        targets: ``[...]``, int64. Targets equal to ``ignore_index`` are left out of the loss.
        label_smoothing: the share of the target that is spread over all words, in [0, 1].
        reduction: "mean" over the targets that are not ignored, or "sum".

    Raises:
        ValueError: shapes, ``reduction`` or ``label_smoothing`` do not fit.
        IndexError: a target is none of the words, on the CPU.
    """
    check_options("linear_cross_entropy", reduction, label_smoothing, ("mean", "sum"))
    check_tensors(
        "linear_cross_entropy", {"x": x, "weight": weight, "targets": targets}, exactly={"targets": torch.int64}
    )
    check_layer("linear_cross_entropy", x, weight)
    check_targets("linear_cross_entropy", targets, x.shape[:-1], f"x of shape {tuple(x.shape)}")
    x, weight = autocast_as_a_product(x, weight)
    wanted = torch.is_grad_enabled() and (differentiated(x) or differentiated(weight))
    flat = targets.flatten()
    aim = Aim(flat, ignore_index, float(label_smoothing))
    (total,) = _total(x.flatten(0, -2), weight, *aim, wanted, using)
    if reduction == "sum":
        return total
    count = (flat != ignore_index).sum()
    return torch.where(
        count > 0, total / count.clamp(min=1), torch.nan
    )  # no target: NaN with gradients of 0, as in torch


def check_options(function: str, reduction: str, label_smoothing: float, reductions: tuple[str, ...]) -> None:
    """Refuses options that ``function`` does not have.

    Raises:
        ValueError: ``reduction`` is none of ``reductions``, or ``label_smoothing`` is outside [0, 1].
    """
    if reduction not in reductions:
        allowed = f"{', '.join(map(repr, reductions[:-1]))} or {reductions[-1]!r}"
        raise ValueError(f"{function}(reduction={reduction!r}): use {allowed}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{function}(label_smoothing={label_smoothing}): give a share of the target, in [0, 1]")


def check_layer(function: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Refuses activations and an output layer's weight that cannot be multiplied.

    Raises:
        ValueError: the shapes do not fit, or the dtypes differ.
    """
    alike = x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type)
    if x.dim() < 1 or weight.dim() != 2 or not len(weight) or x.shape[-1] != weight.shape[1] or not alike:
        raise ValueError(
            f"{function}: x is {x.dtype} {tuple(x.shape)} and weight {weight.dtype} {tuple(weight.shape)}: they must be "
            "[..., width] and [V, width], of one dtype"
        )


def check_targets(function: str, targets: torch.Tensor, shape: torch.Size, of: str) -> None:
    """Refuses targets that are not one number of a word per row of ``of``.

    Raises:
        ValueError: the targets have another shape than ``shape``.
    """
    if targets.shape != shape:
        raise ValueError(f"{function}: targets have shape {tuple(targets.shape)}, and {of} asks for {tuple(shape)}")


def refuse_unknown(targets: torch.Tensor, words: int, ignore_index: int) -> None:
    """Refuses targets outside the vocabulary.

    Raises:
        IndexError: a target is none of the words, and not ignored.
    """
    if bool(((targets != ignore_index) & ((targets < 0) | (targets >= words))).any()):
        raise IndexError(f"a target lies outside the {words} words, and is not ignore_index ({ignore_index})")


def widened(scores: torch.Tensor) -> torch.Tensor:
    """``scores`` in fp32 at least: a sum over a whole vocabulary in 16 bits would lose too many digits."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _forward(x: torch.Tensor, weight: torch.Tensor, aim: Aim, wanted: bool, using: str | None) -> list[torch.Tensor]:
    size = max(1, _CHUNK.get(x.device.type, _CHUNK["cpu"])() // len(weight))
    wide = torch.promote_types(x.dtype, torch.float32)
    losses = torch.zeros((), dtype=wide, device=x.device)
    dx, dweight = _gradients(x, weight, wanted)
    total = torch.zeros_like(dweight, dtype=wide)
    with on(x.device):
        kernel = serving("linear_cross_entropy", x, using)
        for first in range(0, len(x), size):
            chunk, chunk_aim = x[first : first + size], aim._replace(targets=aim.targets[first : first + size])
            logits = chunk @ weight.t()
            losses += kernel.losses_(logits, chunk_aim, wanted).sum()
            if wanted:  # losses_ has replaced the logits by their gradients
                torch.mm(logits, weight, out=dx[first : first + size])
                if wide == chunk.dtype:
                    total.addmm_(logits.t(), chunk)
                else:
                    total += logits.t() @ chunk
    return [losses, dx, dweight.copy_(total)]


def _forward_fake(x, weight, aim, wanted, using):
    return [x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32)), *_gradients(x, weight, wanted)]


def _gradients(x: torch.Tensor, weight: torch.Tensor, wanted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return (x.new_empty(x.shape), weight.new_empty(weight.shape)) if wanted else (x.new_empty(0), weight.new_empty(0))


def _backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    aim: Aim,
    dx: torch.Tensor,
    dweight: torch.Tensor,
    dtotal: torch.Tensor,
) -> list[torch.Tensor]:
    return [dx * dtotal.to(dx.dtype), dweight * dtotal.to(dweight.dtype)]


_total = differentiable(
    "linear_cross_entropy",
    forward=_forward,
    forward_fake=_forward_fake,
    backward=_backward,
    backward_fake=lambda x, weight, *_: [x.new_empty(x.shape), weight.new_empty(weight.shape)],
    backward_reference=lambda x, weight, aim, dx, dweight, dtotal: reference.backward(x, weight, aim, dtotal),
    keep=lambda inputs, outputs: (*inputs[:5], *outputs[1:]),
    backward_only=2,
)


def _products(x, weight, targets, ignore_index, label_smoothing, wanted, *_, **__):
    return (6 if wanted else 2) * x[0] * x[1] * weight[0]


counted("linear_cross_entropy", forward=_products, backward=lambda *_, **__: 0)


class reference(Plain):
    """In plain torch."""

    @staticmethod
    def losses_(logits: torch.Tensor, aim: Aim, gradients: bool) -> torch.Tensor:
        """The loss of each row; replaces ``logits`` by their gradients if ``gradients`` are asked for."""
        z = rows.wide(logits)
        options = {"ignore_index": aim.ignore_index, "label_smoothing": aim.label_smoothing}
        losses = F.cross_entropy(z, aim.targets, **options, reduction="none")  # type: ignore[arg-type]
        if gradients:
            logits.copy_(_slope(z, aim))
        return losses

    @staticmethod
    def backward(x: torch.Tensor, weight: torch.Tensor, aim: Aim, dtotal: torch.Tensor) -> list[torch.Tensor]:
        """The gradients of x and W, computed with all logits in memory."""
        dz = (dtotal * _slope(rows.wide(x @ weight.t()), aim)).to(x.dtype)
        return [dz @ weight, dz.t() @ x]


def _slope(z: torch.Tensor, aim: Aim) -> torch.Tensor:
    targets, ignore_index, label_smoothing = aim
    counts = (targets != ignore_index)[:, None]
    onehot = F.one_hot(targets.where(counts[:, 0], 0), z.shape[1]).to(z.dtype)  # integers would be scaled in fp32
    return (torch.softmax(z, -1) - (1 - label_smoothing) * onehot - label_smoothing / z.shape[1]) * counts


class cpu(native.Compiled, cross_entropy="piplfillpi"):
    """By linear_cross_entropy.cpp."""

    @staticmethod
    def losses_(logits: torch.Tensor, aim: Aim, gradients: bool) -> torch.Tensor:
        z = native.readable(logits)
        losses = torch.empty(len(z))
        where = (*z.shape, losses, threads())
        targets, *options = aim
        cpu.library().cross_entropy(z, native.DTYPES[z.dtype], targets.contiguous(), *options, gradients, *where)
        if losses.isnan().any():
            refuse_unknown(targets, z.shape[1], aim.ignore_index)
        if gradients and z is not logits:
            logits.copy_(z)
        return losses
