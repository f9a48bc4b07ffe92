"""The loss of a student that follows a teacher's predictions."""

from __future__ import annotations

import torch

from shardlib.nn.sequence import sum_sequence


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
            "score the same tokens by the same vocabulary"
        )
    if not temperature > 0 or reduction not in ("mean", "sum"):
        raise ValueError(
            f"distillation(temperature={temperature!r}, reduction={reduction!r}): a temperature is positive, and a reduction "
            "'mean' or 'sum'"
        )
    dtype = torch.promote_types(student.dtype, torch.float32)
    ours = (student.to(dtype) / temperature).log_softmax(-1)
    theirs = (teacher.detach().to(dtype) / temperature).log_softmax(-1)
    # Where p is 0, as of a masked token with a logit of -inf, the term is 0, its limit.
    terms = (theirs.exp() * (theirs - ours)).masked_fill(theirs == -torch.inf, 0)
    losses = terms.sum(-1) * temperature**2
    counts = torch.ones_like(losses) if mask is None else mask.to(dtype)
    total = sum_sequence((losses * counts).sum())
    return total if reduction == "sum" else total / sum_sequence(counts.sum()).clamp(min=1)
