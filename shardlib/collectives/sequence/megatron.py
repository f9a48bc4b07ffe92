"""Sequences that are cut outside sliced layers and whole inside them (Korthikanti et al., arXiv 2205.05198)."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import torch

from shardlib.collectives.sequence.base import Attend, Attention, SequenceKind
from shardlib.errors import IllegalComposition
from shardlib.mesh.mesh import Mesh


class Megatron(SequenceKind):
    """A kind in which sliced layers gather the sequence before them and reduce-scatter it after them, instead of the
    all-reduces of tensor slicing."""

    name: ClassVar[str] = "megatron"
    gathers_for_slices: ClassVar[bool] = True
    needs_attention: ClassVar[bool] = False  # code between sliced layers sees all positions

    def check(self, sliced: Collection[str]) -> None:
        if self.axis not in sliced:
            raise IllegalComposition(
                f"sequence(axis={self.axis!r}, kind={self.name!r}) needs tensor_slicing(rules, axis={self.axis!r}): "
                "add it, or use kind='ulysses' or 'ring'"
            )

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Attention, attend: Attend, mesh: Mesh
    ) -> torch.Tensor:
        return attend(q, k, v, how)  # the outputs of a column-sliced layer are all positions of this rank's heads
