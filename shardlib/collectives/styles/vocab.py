"""Embeddings and output layers whose vocabulary is split over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from shardlib.collectives.cross_entropy import vocab_cross_entropy
from shardlib.collectives.styles.base import Compute, Losses, Style
from shardlib.collectives.styles.column import Column
from shardlib.collectives.styles.slices import Slice
from shardlib.kernels.linear_cross_entropy import widened
from shardlib.mesh.specs import P


@dataclass(frozen=True)
class Vocab(Style):
    """A style in which each rank holds the rows of its share of the vocabulary, and looks up or scores these words.

    The number of words need not divide: rows of zeros pad the last slices.
    """

    name: ClassVar[str] = "vocab"

    @property
    def rule(self) -> str:
        return repr(self.name)

    @property
    def gathered(self) -> str:
        return "logits by {paths}, except in sl.nn.linear_cross_entropy"

    def spec(self, shape: tuple[int, ...], ways: int) -> P:
        return P(self.axis, padded=shape != () and shape[0] % ways > 0)

    def linear(
        self, weight: Slice, x: torch.Tensor, bias: torch.Tensor | None, compute: Compute, transposed: bool
    ) -> torch.Tensor:
        return Column(gather=True, axis=self.axis).linear(weight, x, bias, compute, transposed)

    def embedding(self, weight: Slice, ids: torch.Tensor, padding: int | None, sparse: bool) -> torch.Tensor:
        words, first, held = weight.window.shape[0], weight.window.first[0], weight.window.sizes[0]
        local = (ids >= first) & (ids < first + held)
        if padding is not None:
            padding = padding % words - first
            padding = padding if 0 <= padding < held else None
        # -1 for an id outside the vocabulary, which F.embedding refuses, on every rank.
        rows = F.embedding(
            (ids - first).where(local, 0).where((ids >= 0) & (ids < words), -1), weight.local, padding, sparse=sparse
        )
        return weight.leave(rows.masked_fill(~local[..., None], 0))

    def cross_entropy(self, weight: Slice, x: torch.Tensor, *, ignore_index: int, label_smoothing: float) -> Losses:
        scores = widened(F.linear(weight.enter(x), weight.local))
        options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}

        def losses(targets: torch.Tensor, reduction: str) -> torch.Tensor:
            return vocab_cross_entropy(
                scores,
                targets,
                self.axis,
                words=weight.window.shape[0],
                **options,
                reduction=reduction,
                mesh=weight.mesh,
            )

        return losses
