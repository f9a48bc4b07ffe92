"""Functions that handle sliced parameters, and are plain PyTorch for whole ones; and `Mean`, as which a loss may be
returned, with its arithmetic."""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

from shardlib.common.environment import environment
from shardlib.common.thresholds import Threshold
from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.linear_cross_entropy import check_layer, check_options, check_targets, widened
from shardlib.kernels.linear_cross_entropy import linear_cross_entropy as chunked_cross_entropy
from shardlib.nn.sequence import shard_sequence, sum_sequence

Scalar: TypeAlias = torch.Tensor | float

# The number of logits from which they are computed in chunks and not kept. Below it plain operations are as fast, and their
# backward can be split for zero-bubble schedules.
_MANY = Threshold(1 << 24)


class Mean(NamedTuple):
    """A mean as a total and a weight, both scalars. Totals and weights are summed over micro-batches and ranks.

    ``sl.Mean(losses.sum(), mask.sum())`` is the right loss for masked tokens. Weights are at least 0, and a loss's weight may
    not depend on parameters (detach it). The weight may be 0 on some ranks or micro-batches: ``sl.Mean(0, 0)`` where a metric
    has nothing to count. Where all weights are 0 there is no mean: a train step refuses the batch or skips it
    (``nonfinite``), `value_and_grad` returns a loss and gradients of 0, and a metric is NaN if others have a weight.

    >>> loss = sl.Mean(torch.tensor([1.0, 2.0, 0.0]).sum(), torch.tensor([1.0, 1.0, 0.0]).sum())
    >>> float(loss.total / loss.weight)
    1.5

    Means are added and subtracted, with scalars too, each of which is a mean of weight 1, and multiplied by scalars. A sum of
    means is a `Means`, in which each keeps its own weight over ranks and micro-batches: right for a loss over tokens plus one
    over sequences.

    >>> sl.Mean(torch.tensor(6.0), 3) + 0.1 * sl.Mean(torch.tensor(4.0), 2)
    Means(terms=(Mean(total=tensor(6.), weight=3), Mean(total=tensor(0.4000), weight=2)))
    """

    total: Any
    weight: Any

    def __add__(self, other: Addend) -> Mean | Means:  # type: ignore[override]
        return _added(self, other)

    def __radd__(self, other: Addend) -> Mean | Means:
        return _added(other, self)

    def __sub__(self, other: Addend) -> Mean | Means:
        return _added(self, _scaled(other, -1))

    def __rsub__(self, other: Addend) -> Mean | Means:
        return _added(other, _scaled(self, -1))

    def __neg__(self) -> Mean:
        return _scaled(self, -1)

    def __mul__(self, factor: Scalar) -> Mean:  # type: ignore[override]
        return _scaled(self, _number(factor))

    def __rmul__(self, factor: Scalar) -> Mean:  # type: ignore[override]
        return _scaled(self, _number(factor))

    def __truediv__(self, divisor: Scalar) -> Mean:
        return _scaled(self, 1 / _number(divisor))


class Means(NamedTuple):
    """A sum of means: the sum of its terms' quotients, in each of which total and weight are summed over micro-batches and
    ranks first. A term of weight 0 adds nothing.

    >>> sum(sl.Mean(torch.tensor(total), 1) for total in (1.0, 2.0)).terms
    (Mean(total=tensor(1.), weight=1), Mean(total=tensor(2.), weight=1))
    """

    terms: tuple[Mean, ...]

    def __add__(self, other: Addend) -> Mean | Means:  # type: ignore[override]
        return _added(self, other)

    def __radd__(self, other: Addend) -> Mean | Means:
        return _added(other, self)

    def __sub__(self, other: Addend) -> Mean | Means:
        return _added(self, _scaled(other, -1))

    def __rsub__(self, other: Addend) -> Mean | Means:
        return _added(other, _scaled(self, -1))

    def __neg__(self) -> Mean | Means:
        return _scaled(self, -1)

    def __mul__(self, factor: Scalar) -> Mean | Means:  # type: ignore[override]
        return _scaled(self, _number(factor))

    def __rmul__(self, factor: Scalar) -> Mean | Means:  # type: ignore[override]
        return _scaled(self, _number(factor))

    def __truediv__(self, divisor: Scalar) -> Mean | Means:
        return _scaled(self, 1 / _number(divisor))


for _means in (Mean, Means):
    setattr(_means, "__array_ufunc__", None)  # noqa: B010  # NumPy's scalars would take a mean for a tuple

Addend: TypeAlias = Mean | Means | Scalar
Loss: TypeAlias = torch.Tensor | Mean | Means
# What a loss function may return: a loss, also with aux; with buffers either of these comes first.
LossResult: TypeAlias = Loss | tuple[Loss, Any] | tuple[tuple[Loss, Any], Any]


def _terms(value: Any) -> tuple[Mean, ...]:
    if isinstance(value, Means):
        return value.terms
    if isinstance(value, Mean):
        return (value,)
    return () if isinstance(value, Real) and value == 0 else (Mean(_number(value), 1.0),)


def _added(one: Any, other: Any) -> Mean | Means:
    terms = (*_terms(one), *_terms(other))
    return terms[0] if len(terms) == 1 else Means(terms)


def _scaled(value: Any, factor: Any) -> Any:
    if not isinstance(value, (Mean, Means)):
        return factor * value
    terms = tuple(Mean(factor * total, weight) for total, weight in _terms(value))
    return terms[0] if len(terms) == 1 else Means(terms)


def _number(value: Any) -> Any:
    if isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return value
    raise TypeError(
        f"sl.Mean with {type(value).__name__}: means are added to means and scalars, and multiplied by scalars. Its parts "
        "are mean.total and mean.weight"
    )


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """The cross entropy of an output layer: ``F.cross_entropy(F.linear(x, weight), targets)``, summed in fp32 or wider.

    Where `tensor_slicing` gives ``weight`` the style "vocab", each rank scores its own words and the logits are never
    gathered. Instead, three numbers per token are exchanged: the largest score is gathered and two sums are all-reduced.

    Args:
        x: (..., width). Under a sequence plan (batch, sequence part, ..., width); the loss is still that of the whole
            sequence, on every rank.
        weight: (vocabulary, width).
        targets: (...), int64, of the whole sequence; targets equal to ``ignore_index`` are left out.
        label_smoothing: the share of the target that is spread over all words, in [0, 1]; as in ``F.cross_entropy``.
        reduction: "mean" over the targets that are not ignored, "sum", or "none" ((...), zero where ignored).

    Raises:
        ValueError: another reduction, a smoothing outside [0, 1], or shapes that do not fit.
        TypeError: arguments that are not tensors, or of unsupported dtypes.

    >>> x, weight, targets = torch.zeros(2, 5, 8), torch.ones(16, 8), torch.zeros(2, 5, dtype=torch.int64)
    >>> sl.nn.linear_cross_entropy(x, weight, targets)  # ln 16
    tensor(2.7726)
    """
    function = "linear_cross_entropy"
    check_options(function, reduction, label_smoothing, ("mean", "sum", "none"))
    check_tensors(function, {"x": x, "weight": weight, "targets": targets}, exactly={"targets": torch.int64})
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if has_torch_function((weight,)):
        given = (x, weight, targets)
        return handle_torch_function(linear_cross_entropy, (weight,), *given, **options, reduction=reduction)

    check_layer(function, x, weight)

    def losses(targets: torch.Tensor, reduction: str) -> torch.Tensor:
        if reduction != "none" and targets.numel() * len(weight) > _MANY():
            return chunked_cross_entropy(x, weight, targets, **options, reduction=reduction)
        scores = widened(F.linear(x, weight)).flatten(0, -2)
        result = F.cross_entropy(scores, targets.flatten(), **options, reduction=reduction)
        return result.view(targets.shape) if reduction == "none" else result

    parts = environment().parts
    if parts is None:
        check_targets(function, targets, x.shape[:-1], f"x of shape {tuple(x.shape)}")
        return losses(targets, reduction)
    return parts.loss(losses, x, targets, ignore_index, reduction)


def distillation(
    student: torch.Tensor,
    teacher: torch.Tensor,
    *,
    temperature: float = 1.0,
    mask: torch.Tensor | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """The divergence of a student's predictions q from a teacher's p, ``τ² · Σ_v p_v · (ln p_v − ln q_v)`` per token.

    p and q are the softmax of logits divided by the temperature τ, in fp32 or wider; with τ² gradients do not shrink as τ
    grows (arXiv 1503.02531, section 2). It is 0 where both predict the same. The teacher gets no gradient.

    Args:
        student, teacher: logits ``(..., vocabulary)``; under a sequence plan of this rank's part. The loss is that of the
            whole sequence.
        mask: ``(...)``, bool: the tokens that count; by default all.
        reduction: "mean" over these tokens, or "sum".

    Raises:
        ValueError: logits of different shapes, a temperature that is not positive, or another reduction.

    >>> same = torch.tensor([[1.0, 2.0]])
    >>> float(sl.nn.distillation(same, same)), float(sl.nn.distillation(same, torch.tensor([[2.0, 1.0]])))
    (0.0, 0.4621...)
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"distillation: the student's logits are {tuple(student.shape)} and the teacher's {tuple(teacher.shape)}; both "
            "must have one shape"
        )
    if not temperature > 0 or reduction not in ("mean", "sum"):
        raise ValueError(f"distillation({temperature=}, {reduction=}): use a positive temperature, 'mean' or 'sum'")
    dtype = torch.promote_types(student.dtype, torch.float32)
    ours = (student.to(dtype) / temperature).log_softmax(-1)
    theirs = (teacher.detach().to(dtype) / temperature).log_softmax(-1)
    # Where p is 0, as of a masked token with a logit of -inf, the term is 0, its limit.
    terms = (theirs.exp() * (theirs - ours)).masked_fill(theirs == -torch.inf, 0)
    losses = terms.sum(-1) * temperature**2
    counts = torch.ones_like(losses) if mask is None else mask.to(dtype)
    total = sum_sequence((losses * counts).sum())
    return total if reduction == "sum" else total / sum_sequence(counts.sum()).clamp(min=1)


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``F.embedding(ids, weight)``; under a sequence plan the embeddings of this rank's sequence part, along dimension 1.

    ``ids`` (batch, sequence) are of the whole sequence. Where `tensor_slicing` cuts the vocabulary over the sequence's axis,
    each rank looks up all ids in its rows, and the results are reduce-scattered; otherwise each rank looks up its part's ids.

    >>> sl.nn.embedding(torch.tensor([[1, 0, 1]]), torch.ones(2, 4)).shape
    torch.Size([1, 3, 4])
    """
    if has_torch_function((weight,)):
        return handle_torch_function(embedding, (weight,), ids, weight)
    return F.embedding(shard_sequence(ids), weight)


def local_slice(weight: torch.Tensor) -> torch.Tensor:
    """This rank's slice of ``weight`` (all of it unless `tensor_slicing` cut it), for code that runs on sliced
    activations."""
    return handle_torch_function(local_slice, (weight,), weight) if has_torch_function((weight,)) else weight


def slice_of(weight: torch.Tensor, dim: int = 0) -> tuple[int, int]:
    """The index along ``dim`` at which this rank's slice of ``weight`` begins, and the whole weight's size along ``dim``."""
    if has_torch_function((weight,)):
        return handle_torch_function(slice_of, (weight,), weight, dim)
    return 0, weight.shape[dim]
