"""The base of sequence kinds, each of which is a way of attention over a sequence that is cut over a mesh axis."""

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
    """The arguments of `shardlib.nn.attention` beside q, k and v.

    Attributes:
        causal: whether a position sees no later ones.
        scale: of the scores; None for 1/√size.
        key_mask: (batch, whole sequence), or None.
        layout: the `shardlib.sparse.Layout` of the whole sequence, or None.
        segments: (batch, whole sequence) integers, or None: a position sees those of its own segment.
    """

    causal: bool = False
    scale: float | None = None
    key_mask: torch.Tensor | None = None
    layout: Any = None
    segments: torch.Tensor | None = None

    def require_segments(self, batch: int, length: int) -> None:
        """Refuse segments that are not those of ``batch`` whole sequences of ``length``.

        Raises:
            ValueError: they are of another shape or dtype, or there is a layout too.
        """
        if self.segments is None:
            return
        if self.layout is not None:
            raise ValueError("attention takes segments or a layout, and got both; use layout=None for packed documents")
        if self.segments.shape != (batch, length) or self.segments.is_floating_point():
            raise ValueError(
                f"segments are integers (batch, sequence) = {(batch, length)}, of the whole sequence on every rank, and got "
                f"{self.segments.dtype} of shape {tuple(self.segments.shape)}"
            )


# Attention of q, k and v, (batch, heads, sequence, size), on a rank that holds all positions.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Attention], torch.Tensor]


@dataclass(frozen=True)
class SequenceKind(ABC):
    """A way of attention over sequences that are cut over ``axis``. A new kind is a subclass with ``attention``.

    A kind is a frozen value, equal to another of the same class and options. `shardlib.sequence` takes a subclass for its
    ``kind``, or any other function from an axis to a kind (``functools.partial(Kind, option=...)``).

    Attributes:
        name: the kind's name in a plan's print-out and in messages.
        gathers_for_slices: whether layers that are sliced over ``axis`` gather the sequence before them and reduce-scatter it
            after them, so that `tensor_slicing` uses the same axis. The axis of other kinds may be one of `zero`.
        needs_attention: whether to refuse a loss function that never calls `shardlib.nn.attention`, in which positions would
            never see each other.
    """

    axis: str

    name: ClassVar[str]
    gathers_for_slices: ClassVar[bool] = False
    needs_attention: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"{self.name} over axis {self.axis!r}"

    def check(self, sliced: Collection[str]) -> None:  # noqa: B027  # most kinds fit every plan
        """Raise `IllegalComposition` for a plan that the kind does not fit. ``sliced``: the axes that leaves are sliced
        over."""

    def chunks(self, rank: int, size: int, length: int) -> list[tuple[int, int]]:
        """The part of the sequence that rank ``rank`` of ``size`` holds: (start, length) of each chunk, in order.

        All ranks' parts have the same length.

        Raises:
            SpecError: the length does not divide.
        """
        step = self.step(length, size, size)
        return [(rank * step, step)]

    @abstractmethod
    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Attention, attend: Attend, mesh: Mesh
    ) -> torch.Tensor:
        """Attention over the whole sequence for the queries of this rank's part.

        Args:
            q, k, v: of this rank's part (see `chunks`): q (batch, heads, sequence / ranks, size); k and v with as many heads
                or a divisor of their number.
            attend: ``attend(q, k, v, how)`` computes attention where q, k and v have all positions.
        """

    def step(self, length: int, size: int, chunks: int, why: str = "") -> int:
        """The length of one chunk when a sequence is cut into ``chunks``; ``why`` explains their number in the message.

        Raises:
            SpecError: the length does not divide.
        """
        if length % chunks or not length:
            raise SpecError(
                f"a sequence of length {length} does not divide over axis {self.axis!r} of size {size} "
                f"(kind={self.name!r}{why}); pad it to a multiple of {chunks}, targets with ignore_index"
            )
        return length // chunks
