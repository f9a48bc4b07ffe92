"""Exchanges of the function itself (tokens with experts, rows with other ranks) that ranks agree on, like gathers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardlib.collectives.tokens import Coming, TokenExchange
from shardlib.mesh.mesh import Mesh


class Meeting:
    """An exchange before which ranks meet, in forward and in backward: see `shardlib.execute.gathering.Gathering.meet`.

    A rank whose batch uses no unit before a layer of experts would otherwise send tokens while others wait for it to agree on
    a gather.
    """

    def __init__(self, exchange: TokenExchange, meet: Callable[[], None]) -> None:
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
