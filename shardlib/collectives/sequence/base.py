"""What every sequence kind is: how the positions of sequences meet that are cut over a mesh axis."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from shardlib.errors import SpecError
from shardlib.mesh.mesh import Mesh


@dataclass(frozen=True)
class Attention:
    """What `shardlib.nn.attention` was asked for beside its tensors.

    Attributes:
        key_mask: (batch, whole sequence), or None.
        layout: the `shardlib.sparse.Layout` of the whole sequence, or None.
    """

    causal: bool = False
    scale: float | None = None
    key_mask: torch.Tensor | None = None
    layout: Any = None


# Attention of q, k and v, (batch, heads, sequence, size), where all positions are.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Attention], torch.Tensor]


@dataclass(frozen=True)
class SequenceKind(ABC):
    """How the positions of sequences meet that are cut over ``axis``: for a kind of your own, give ``attention``.

    A kind is a frozen value, equal to another of the same class and options. `shardlib.sequence` takes a subclass for its
    ``kind``, or whatever else makes a kind of an axis (``functools.partial(Kind, option=...)``).

    Attributes:
        name: what it is called in a plan's print-out and in messages.
        gathers_for_slices: layers that are sliced over ``axis`` gather the sequence before them and reduce-scatter it after
            them, so that the axis is shared with `tensor_slicing`; other kinds share theirs with `zero`.
        needs_attention: a loss function that never calls `shardlib.nn.attention` is refused: positions would never meet.
    """

    axis: str

    name: ClassVar[str]
    gathers_for_slices: ClassVar[bool] = False
    needs_attention: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"{self.name} over axis {self.axis!r}"

    def check(self, sliced: Collection[str]) -> None:  # noqa: B027  # most kinds fit every plan
        """Refuse a plan that the kind does not fit, by raising `IllegalComposition`; ``sliced`` are the axes of slices."""

    def chunks(self, rank: int, size: int, length: int) -> list[tuple[int, int]]:
        """Where the part of ``rank`` of ``size`` lies: (start, length) of each chunk, in order. All parts are as long.

        Raises:
            SpecError: the length does not divide.
        """
        step = self.step(length, size, size)
        return [(rank * step, step)]

    @abstractmethod
    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Attention, attend: Attend, mesh: Mesh
    ) -> torch.Tensor:
        """Attention of the whole sequence for this rank's part of it, of which q, k and v are: what `chunks` says.

        Args:
            q: (batch, heads, sequence / ranks, size); k and v with as many heads or a divisor of their number.
            attend: computes ``attend(q, k, v, how)`` where all positions are.
        """

    def step(self, length: int, size: int, pieces: int, why: str = "") -> int:
        """How long one of ``pieces`` of a sequence is; a message says ``why`` there are as many.

        Raises:
            SpecError: the length does not divide.
        """
        if length % pieces or not length:
            raise SpecError(
                f"a sequence of length {length} does not divide over axis {self.axis!r} of size {size} "
                f"(sequence, kind={self.name!r}{why}); pad it to a multiple of {pieces}, with ignore_index as the "
                "targets of the padding"
            )
        return length // pieces
