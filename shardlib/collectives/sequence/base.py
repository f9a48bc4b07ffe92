"""The base of sequence kinds, each of which is a way of attention over a sequence that is cut over a mesh axis."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from shardlib.collectives.pairs import all_to_all
from shardlib.errors import IllegalComposition, SpecError
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
                f"(sequence, kind={self.name!r}{why}); pad it to a multiple of {chunks}, with ignore_index as the "
                "targets of the padding"
            )
        return length // chunks


# Sequences that are cut outside sliced layers and whole inside them (Korthikanti et al., arXiv 2205.05198).


class Megatron(SequenceKind):
    """A kind in which sliced layers gather the sequence before them and reduce-scatter it after them, instead of the
    all-reduces of tensor slicing."""

    name: ClassVar[str] = "megatron"
    gathers_for_slices: ClassVar[bool] = True
    needs_attention: ClassVar[bool] = False  # code between sliced layers sees all positions

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
        return attend(q, k, v, how)  # the outputs of a column-sliced layer are all positions of this rank's heads


# Attention whose sequence is cut over a mesh axis, by all-to-all (DeepSpeed-Ulysses, arXiv 2309.14509).


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
                f"{' and '.join(failures)} do not divide over axis {axis!r} of size {ways} (sequence, "
                f"kind={self.name!r}): use a smaller axis, repeat the keys' heads, or use kind='ring', which cuts no heads"
            )
        q, k, v = (all_to_all(x, axis, split_dim=1, concat_dim=2, mesh=mesh) for x in (q, k, v))
        return all_to_all(attend(q, k, v, how), axis, split_dim=2, concat_dim=1, mesh=mesh)
