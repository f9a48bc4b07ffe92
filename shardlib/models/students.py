"""Mixture of students: a GPT that follows a larger one for some of its steps (arXiv 2201.05596, section 4.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from shardlib.models.gpt import GPTConfig, hidden_and_layers, scored
from shardlib.models.layers import Params
from shardlib.nn.functional import Mean, distillation
from shardlib.nn.sequence import shard_sequence
from shardlib.rng import Key


def make_loss(student: GPTConfig, teacher: GPTConfig, *, temperature: float = 1.0) -> Callable[..., Any]:
    """The loss ``loss(params, batch, rng=None)`` of a student with a teacher, of ``{"student": ..., "teacher": ...}``.

    It is the student's own (`shardlib.models.gpt.make_loss`, with experts too) plus ``batch["distill"]`` times the divergence
    from the teacher's predictions (`shardlib.nn.distillation`). That weight is a number, from a schedule of the step: in the
    paper a student that stops early, and goes on with its own loss, ends lower than one that follows to the end. Where it is
    0 the teacher is not computed, and at stage 3 not gathered.

    Both are sharded alike, and the teacher is not trained: put ``sl.freeze("teacher/*")`` into the plan. The loss returns
    ``(loss, aux)``, with the divergence as ``aux["distill"]``.

    Raises:
        ValueError: different vocabularies; from the loss, a batch without a number "distill".

    >>> from shardlib.models import gpt, students
    >>> large, small = gpt.GPTConfig(layers=4, width=16, heads=2), gpt.GPTConfig(layers=2, width=16, heads=2)
    >>> params = {"student": gpt.init(small), "teacher": gpt.init(large)}
    >>> tokens = torch.zeros(2, 8, dtype=torch.int64)
    >>> weight = sl.optim.piecewise_constant_schedule(1.0, {400_000: 0.0})
    >>> batch = {"tokens": tokens, "targets": tokens, "distill": float(weight(400_000))}
    >>> loss, aux = students.make_loss(small, large)(params, batch)
    >>> float(loss) == float(gpt.make_loss(small)(params["student"], batch))
    True
    """
    if student.vocab != teacher.vocab:
        raise ValueError(f"a student of {student.vocab} words and a teacher of {teacher.vocab}: use one vocabulary")

    def loss(params: Params, batch: dict[str, Any], rng: Key | None = None) -> Any:
        weight = batch.get("distill")
        if not isinstance(weight, (int, float)):
            raise ValueError(
                f"the batch's 'distill' is {type(weight).__name__}; give the divergence's weight, a number: batch | "
                f"{{'distill': float(schedule(state.step))}}"
            )
        packed = {name: batch.get(name) for name in ("segments", "positions")}
        own = params["student"]
        x, layers = hidden_and_layers(student, own, batch["tokens"], rng, **packed)
        value = scored(student, x, layers, own["head"]["weight"], batch)
        value, aux = value if student.moe is not None else (value, {})
        mask = shard_sequence(batch["targets"]) != -100
        apart = torch.zeros((), dtype=x.dtype, device=x.device)
        if weight:
            with torch.no_grad():
                theirs, _ = hidden_and_layers(teacher, params["teacher"], batch["tokens"], None, **packed)
                logits = F.linear(theirs, params["teacher"]["head"]["weight"])
            mine = F.linear(x, own["head"]["weight"])
            how = "sum" if isinstance(value, Mean) else "mean"
            apart = distillation(mine, logits, temperature=temperature, mask=mask, reduction=how)
        if isinstance(value, Mean):
            total, of = Mean(value.total + weight * apart, value.weight), value.weight
        else:
            total, of = value + weight * apart, torch.ones_like(apart)
        return total, aux | {"distill": Mean(apart.detach(), of)}

    return loss
