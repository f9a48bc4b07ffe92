"""Tensors that are read, and made, tile by tile, so that of a whole tensor and of its gradient there is one copy each.

Forward mode and `torch.func` see plain views and copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardlib.common._compat import transformed

# ``view(tensor, number)``: the tile of this number, as a view of a whole tensor. The views of all numbers cover the tensor.
View = Callable[[torch.Tensor, int], torch.Tensor]


class Cut:
    """A tensor whose tiles are taken one by one. Their gradients are written into one tensor, as backward makes them."""

    def __init__(self, x: torch.Tensor, view: View) -> None:
        plain = transformed()
        self._x: torch.Tensor | None = x if plain else x.detach()
        # The graph keeps the sums, and must not keep what it is kept by, or the tensor, longer than a tile needs it.
        self._sum = _Sum(x, view)
        made = not plain and x.requires_grad and torch.is_grad_enabled()
        self._stand_in = _TileGradient.apply(x, self._sum) if made else None

    def take(self, number: int) -> torch.Tensor:
        assert self._x is not None
        if self._stand_in is None:
            return self._sum.view(self._x, number)
        return _Take.apply(self._stand_in, self._x, self._sum, number)

    def done(self) -> None:
        """Let go of the tensor, once all tiles have been taken."""
        self._x = None


class _Sum:
    """The gradient of a tensor, which its tiles make up."""

    def __init__(self, x: torch.Tensor, view: View) -> None:
        self.view = view
        self._like, self._device = torch.empty_like(x, device="meta", requires_grad=False), x.device
        self._gradient: torch.Tensor | None = None

    def put(self, grad: torch.Tensor, number: int) -> None:
        if self._gradient is None:
            self._gradient = torch.zeros_like(self._like, device=self._device)
        self.view(self._gradient, number).copy_(grad)  # which autograd follows, where this is differentiated again

    def take(self) -> torch.Tensor | None:
        gradient, self._gradient = self._gradient, None
        return gradient


class _TileGradient(torch.autograd.Function):
    """A stand-in without memory for a tensor that is cut; its backward hands on the gradient that the tiles made up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, total: _Sum) -> torch.Tensor:
        ctx.total = total
        ctx.set_materialize_grads(False)
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return ctx.total.take(), None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_in: torch.Tensor, x: torch.Tensor, total: _Sum, number: int) -> torch.Tensor:
        ctx.total, ctx.number = total, number
        ctx.set_materialize_grads(False)
        return total.view(x, number)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, None, None, None]:
        if grad is not None:
            ctx.total.put(grad, ctx.number)
        return None, None, None, None


class Join:
    """A tensor that is made of tiles, each of which can be freed when it is in its place.

    Args:
        out: memory for the whole tensor.
    """

    def __init__(self, out: torch.Tensor, view: View) -> None:
        self.out, self.view = out, view
        self._stand_ins: list[torch.Tensor] = []
        self._count = 0

    def put(self, tile: torch.Tensor) -> None:
        """Put the next tile, of as many elements as its view, into its place."""
        number, self._count = self._count, self._count + 1
        if transformed():
            self._write(tile, number)
        else:
            self._stand_ins.append(_Put.apply(tile, self._write, number))

    def whole(self) -> torch.Tensor:
        return _Whole.apply(self.out, self.view, *self._stand_ins) if self._stand_ins else self.out

    def _write(self, tile: torch.Tensor, number: int) -> torch.Size:
        """Write a tile into its place; returns the place's shape."""
        place = self.view(self.out, number)
        place.copy_(tile.view(place.shape))
        return place.shape


class _Put(torch.autograd.Function):
    """Writes a tile into its place, and returns a stand-in without memory for it."""

    @staticmethod
    def forward(
        ctx: Any, tile: torch.Tensor, write: Callable[[torch.Tensor, int], torch.Size], number: int
    ) -> torch.Tensor:
        ctx.shape = tile.shape
        return tile.new_zeros(()).expand(write(tile, number))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.reshape(ctx.shape), None, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, view: View, *stand_ins: torch.Tensor) -> torch.Tensor:
        ctx.view, ctx.count = view, len(stand_ins)
        ctx.mark_dirty(out)  # the result is this tensor and no view of it, so that it may be written to
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *(ctx.view(grad, number) for number in range(ctx.count))
