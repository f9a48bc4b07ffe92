"""Sequences that are whole inside sliced layers (Korthikanti et al., arXiv 2205.05198)."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import torch

from shardlib.collectives.sequence.base import Attend, Attention, SequenceKind
from shardlib.errors import IllegalComposition
from shardlib.mesh.mesh import Mesh


class Megatron(SequenceKind):
    """Sliced layers gather the sequence before them and reduce-scatter it after them, in place of all-reduces."""

    name: ClassVar[str] = "megatron"
    gathers_for_slices: ClassVar[bool] = True
    needs_attention: ClassVar[bool] = False  # whatever lies between sliced layers sees all positions

    def check(self, sliced: Collection[str]) -> None:
        if self.axis not in sliced:
            raise IllegalComposition(
                f"sequence(axis={self.axis!r}, kind={self.name!r}) changes the exchanges of layers that are sliced over "
                f"{self.axis!r}, and none is: add tensor_slicing(rules, axis={self.axis!r}), or use kind='ulysses' or "
                "'ring', which need none"
            )

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Attention, attend: Attend, mesh: Mesh
    ) -> torch.Tensor:
        return attend(q, k, v, how)  # a column-sliced layer gave all positions of this rank's heads
