"""The base of token exchanges: the dispatch of rows to the ranks that hold their experts, and the combine of results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from shardlib.mesh.mesh import Mesh


class PendingRows(Protocol):
    """The handle of an all-to-all. What is computed before `wait` is computed while rows are under way."""

    def wait(self) -> torch.Tensor:
        """The rows that have arrived; may be called again."""
        ...


class TokenRoute(Protocol):
    """The route of rows that were dispatched, on which their results come back.

    Attributes:
        ends: int64 ``[experts of a rank]``: of the rows that arrive, the row after each expert's last one.
        arriving: the number of rows that arrive.
    """

    @property
    def ends(self) -> torch.Tensor: ...

    @property
    def arriving(self) -> int: ...


class Payload(NamedTuple):
    """Bytes that one rank sends along each axis, for one layer and one micro-batch.

    Attributes:
        sizes: of the messages that say how many rows come; in a forward alone.
        there: of rows to their experts in a forward; in a backward, of the gradients of results.
        back: of results in a forward; in a backward, of the gradients of rows.
    """

    sizes: Mapping[str, int]
    there: Mapping[str, int]
    back: Mapping[str, int]

    @property
    def forward(self) -> dict[str, int]:
        """Axis -> bytes of a forward."""
        return {axis: sent + self.sizes[axis] for axis, sent in self.backward.items()}

    @property
    def backward(self) -> dict[str, int]:
        """Axis -> bytes of a backward."""
        return {axis: sent + self.back[axis] for axis, sent in self.there.items()}


@dataclass(frozen=True)
class TokenExchange(ABC):
    """A dispatch of rows to experts that are sharded over mesh axes, and the combine. A new one is a subclass.

    An exchange is a frozen value, equal to another of the same class and options. Experts lie in equal runs on the ranks of
    ``axes``, the first axis major.

    `send` and `back` are each other's transpose, so autograd crosses both: the gradients of rows that were sent come back,
    and those of rows that came back are sent. All ranks along ``axes`` call both, those without rows too, and take part in
    backward. Which collectives are called does not depend on counts.

    Attributes:
        padded: whether rows to experts that have a capacity are to be padded to it: whether layers give `send` its ``slots``.
        spare: a rank's slots for replicas of other ranks' experts. Layers that have them send to slots instead of experts:
            what is said here of experts is then said of slots.
        name: the exchange's name in a plan's print-out and in messages.
    """

    padded: bool = field(default=False, kw_only=True)
    spare: int = field(default=0, kw_only=True)

    name: ClassVar[str]

    @property
    @abstractmethod
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which experts are sharded, from major to minor."""

    @abstractmethod
    def send(
        self,
        mesh: Mesh,
        rows: torch.Tensor,
        counts: torch.Tensor,
        *,
        slots: int | None = None,
        anchor: torch.Tensor | None = None,
    ) -> tuple[PendingRows, Any]:
        """Start to send rows to their experts.

        Args:
            rows: ``[R, W]``, sorted by expert. Those beyond the counted ones stay.
            counts: int64 ``[E]``: how many rows each expert gets from this rank.
            slots: None sends as many rows as there are; the sizes are exchanged before, and the host waits for them. A
                number, equal on all ranks and at least as large as every count, pads each expert's rows with zeros to that
                number; then all sizes are known beforehand. Use an expert's capacity.
            anchor: a tensor that needs a gradient on all ranks or on none, and depends on what gradients are asked for, such
                as a parameter of the experts. Backward then runs on a rank whose rows need no gradient, too. None is one of
                its own, which `torch.Tensor.backward` reaches, and `torch.autograd.grad` with ``inputs`` does not.

        Returns:
            the rows that come, sorted by expert of this rank and then by source rank, and the `TokenRoute` for `back`. What
            is added up over a row's place in an expert does not depend on the order of arrival.

        Raises:
            SpecError: sizes that do not fit each other or the axes.
        """

    @abstractmethod
    def back(self, mesh: Mesh, rows: torch.Tensor, way: Any) -> PendingRows:
        """Start to send experts' results ``[arriving, W']`` back along the `TokenRoute` of `send`.

        What comes is ``[R, W']``, in the order of the rows that were sent; 0 for a row that stayed.
        """

    @abstractmethod
    def payload(
        self,
        sizes: Mapping[str, int],
        coords: Mapping[str, int],
        counts: torch.Tensor,
        width: int,
        dtype: torch.dtype,
        *,
        slots: int | None = None,
    ) -> Payload:
        """What the rank at ``coords`` sends.

        Args:
            sizes: of the mesh's axes.
            coords: of the rank, along `axes` at least.
            counts: int64 ``[ranks, E]``: the counts of all ranks along `axes`, the first axis major; with ``slots`` only
                their shape matters.
            width, dtype: of rows.
            slots: as in `send`.
        """

    @abstractmethod
    def bound(
        self,
        sizes: Mapping[str, int],
        rows: int,
        experts: int,
        width: int,
        dtype: torch.dtype,
        *,
        slots: int | None = None,
    ) -> Payload:
        """The most that a rank sends whatever the counts are, where no rank has more than ``rows`` rows.

        A rank has ``rows`` rows to send, and all ranks' results to send back where every row goes to its experts. On the
        average over ranks no more than ``rows`` go either way. With ``slots``, as in `send`, what a rank sends depends on
        no counts.
        """
