"""Attention whose sequence is cut over a mesh axis, by all-to-all (DeepSpeed-Ulysses, arXiv 2309.14509)."""

from __future__ import annotations

from typing import ClassVar

import torch

from shardlib.collectives.pairs import all_to_all
from shardlib.collectives.sequence.base import Attend, Attention, SequenceKind
from shardlib.errors import SpecError
from shardlib.mesh.mesh import Mesh


class Ulysses(SequenceKind):
    """A kind in which each rank computes attention for its share of the heads, over the whole sequence.

    Payload per rank, forward: (P−1)/P of its q, k, v and output, which is 4(P−1)/P · N·h/P elements.
    """

    name: ClassVar[str] = "ulysses"

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Attention, attend: Attend, mesh: Mesh
    ) -> torch.Tensor:
        """See `SequenceKind.attention`.

        Raises:
            SpecError: the heads do not divide over the axis.
        """
        axis, ways = self.axis, mesh.shape[self.axis]
        failures = [
            f"{x.shape[1]} {name} heads" for name, x in (("query", q), ("key and value", k)) if x.shape[1] % ways
        ]
        if failures:
            raise SpecError(
                f"{' and '.join(failures)} do not divide over axis {axis!r} of size {ways}: use a smaller axis, "
                "repeat keys' heads, or use kind='ring'"
            )
        q, k, v = (all_to_all(x, axis, split_dim=1, concat_dim=2, mesh=mesh) for x in (q, k, v))
        return all_to_all(attend(q, k, v, how), axis, split_dim=2, concat_dim=1, mesh=mesh)
