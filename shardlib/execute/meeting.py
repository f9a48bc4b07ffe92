"""Exchanges of the function itself (tokens with experts, rows with other ranks) that ranks agree on, like gathers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from shardlib.collectives import primitives
from shardlib.collectives.tokens import Coming
from shardlib.errors import LossError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.nn.moe.experts import ExpertExchange


class Meeting:
    """An exchange before which ranks meet, in forward and in backward: see `shardlib.execute.gathering.Gathering.meet`.

    A rank whose batch uses no unit before a layer of experts would otherwise send tokens while others wait for it to agree on
    a gather.
    """

    def __init__(self, exchange: ExpertExchange, meet: Callable[[], None]) -> None:
        self._exchange, self._meet = exchange, meet
        self.axes, self.padded, self.spare = exchange.axes, exchange.padded, exchange.spare

    def send(self, mesh: Mesh, rows: torch.Tensor, counts: torch.Tensor, **how: Any) -> tuple[Coming, Any]:
        self._meet()
        coming, way = self._exchange.send(mesh, rows, counts, **how)
        return _Met(coming, self._meet), way

    def back(self, mesh: Mesh, rows: torch.Tensor, way: Any) -> Coming:
        self._meet()
        return _Met(self._exchange.back(mesh, rows, way), self._meet)


class _Met:
    """Rows under way, before whose gradients leave the ranks meet."""

    def __init__(self, coming: Coming, meet: Callable[[], None]) -> None:
        self._coming, self._meet = coming, meet

    def wait(self) -> torch.Tensor:
        return meeting_in_backward(self._coming.wait(), self._meet)


def meeting_in_backward(rows: torch.Tensor, meet: Callable[[], None]) -> torch.Tensor:
    """``rows``, before whose gradients leave the ranks meet."""
    return _MeetInBackward.apply(rows, meet)


class _MeetInBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(rows: torch.Tensor, meet: Callable[[], None]) -> torch.Tensor:
        return rows.view_as(rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.meet = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.meet()
        return grad, None

    @staticmethod
    def jvp(ctx: Any, rows: torch.Tensor, _: Any) -> torch.Tensor:
        return rows.view_as(rows)


# Agreement of all ranks on the form of their results, checked by summing a few numbers.
# Ranks combine their results position by position, so results of different forms would be combined wrongly or deadlock. The
# numbers join a sum that the ranks make anyway, and show every rank whether forms differ; only then do the ranks exchange
# the forms themselves.


NUMBERS = 6
_WORD = 20  # bits: sums of squares over up to 8,192 ranks are exact in float64


@dataclass(frozen=True)
class Agreement:
    """The form of one rank's results.

    Attributes:
        form: a description of the form; None on a rank without results, such as one that does not compute the loss.
        faults: errors in this rank's results alone, each with its remedy.
    """

    form: str | None
    faults: tuple[str, ...] = ()

    def numbers(self) -> list[float]:
        """The numbers to sum over ranks: 1 for faults, 1 for results, and two words of the form's hash with their squares."""
        if self.form is None:
            return [float(bool(self.faults)), 0, 0, 0, 0, 0]
        digest = int.from_bytes(hashlib.blake2b(self.form.encode(), digest_size=2 * _WORD // 8).digest(), "big")
        first, second = digest >> _WORD, digest % (1 << _WORD)
        return [float(bool(self.faults)), 1, first, first**2, second, second**2]

    def refuse(self, mesh: Mesh, remedy: str) -> NoReturn:
        """Raise the same error on every rank, with all ranks' faults or forms. Collective: all ranks call it."""
        everyone = primitives.all_gather_object(mesh, list(mesh.shape), (mesh.rank, self.form, self.faults))
        problems = [f"rank {rank}: {fault}" for rank, _, faults in everyone for fault in faults]
        if not problems:
            forms: dict[str, list[int]] = {}
            for rank, form, _ in everyone:
                if form is not None:
                    forms.setdefault(form, []).append(rank)
            problems = [f"rank {', '.join(map(str, ranks))}: {form}" for form, ranks in forms.items()]
            raise LossError(f"the ranks' results differ in form:\n{listing(problems)}\n{remedy}")
        raise LossError(f"results that cannot be put together:\n{listing(problems)}")


def agree(sums: Sequence[float]) -> bool:
    """Whether all ranks have one form and no fault, given the sums of their `Agreement.numbers`.

    n numbers are equal if and only if n times the sum of their squares is the square of their sum.
    """
    faults, ranks, *words = map(int, sums)
    return not faults and all(ranks * words[i + 1] == words[i] ** 2 for i in (0, 2))
