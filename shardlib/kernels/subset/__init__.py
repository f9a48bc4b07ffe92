"""Tokens of a sequence by their positions, and back among the others; forward and backward in one pass each.

- take: y_bj = x_bi for i = index_bj. Backward: dx_bi = dy_bj, and 0 for tokens that were not taken.
- put: y_bi = r_bj for i = index_bj, and y_bi = x_bi for the others. Backward: dr_bj = dy_bi; dx_bi = dy_bi, and 0 where r was
  put.

x is ``[batch, tokens, columns]``, r ``[batch, taken, columns]``, in fp32, bf16 or fp16 (float64 by plain torch); index is
int64 ``[batch, taken]``, of positions that differ within a row. Each element is read once and written once; plain torch
writes those that are put twice (a copy, then a scatter). Only the index is saved.
"""

from __future__ import annotations

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native, results
from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.dispatch import Plain, on, serving
from shardlib.kernels.common.operators import differentiable

__all__ = ["put", "take"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("triton",)}


def take(x: torch.Tensor, index: torch.Tensor, *, using: str | None = None) -> torch.Tensor:
    """The tokens of ``x`` at positions ``index``, ``[batch, taken, columns]``.

    Raises:
        ValueError: shapes that do not fit.

    >>> from shardlib.kernels.subset import take
    >>> take(torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[0, 2]])).flatten()
    tensor([1., 3.])
    """
    check_tensors("take", {"x": x, "index": index}, exactly={"index": torch.int64})
    if x.dim() != 3 or index.dim() != 2 or len(x) != len(index):
        raise ValueError(
            f"x {tuple(x.shape)} and index {tuple(index.shape)}: they must be [batch, tokens, columns] and [batch, taken]"
        )
    return _take(x, index, using)[0]


def put(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, *, using: str | None = None) -> torch.Tensor:
    """``x`` with ``rows`` as the tokens at positions ``index``.

    Raises:
        ValueError: shapes that do not fit.

    >>> from shardlib.kernels.subset import put
    >>> put(torch.zeros(1, 3, 1), torch.tensor([[0, 2]]), torch.ones(1, 2, 1)).flatten()
    tensor([1., 0., 1.])
    """
    check_tensors("put", {"x": x, "index": index, "rows": rows}, exactly={"index": torch.int64})
    if x.dim() != 3 or index.dim() != 2 or len(x) != len(index) or rows.shape != (*index.shape, x.shape[2]):
        raise ValueError(
            f"x {tuple(x.shape)}, index {tuple(index.shape)} and rows {tuple(rows.shape)}: they must be [batch, tokens, "
            "columns], [batch, taken] and [batch, taken, columns]"
        )
    return _put(x, index, rows.to(x.dtype), using)[0]


def _taken(x: torch.Tensor, index: torch.Tensor, using: str | None) -> list[torch.Tensor]:
    with on(x.device):
        return [serving("subset", x, using).take(x, index)]


def _spread(index: torch.Tensor, length: int, using: str | None, dy: torch.Tensor) -> list[torch.Tensor]:
    with on(dy.device):
        return [serving("subset", dy, using).put(None, index, dy, length)]


def _merged(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, using: str | None) -> list[torch.Tensor]:
    with on(x.device):
        return [serving("subset", x, using).put(x, index, rows, x.shape[1])]


def _parted(index: torch.Tensor, using: str | None, dy: torch.Tensor) -> list[torch.Tensor]:
    with on(dy.device):
        served = serving("subset", dy, using)
        return [served.put(dy, index, None, dy.shape[1]), served.take(dy, index)]


_take = differentiable(
    "subset_take",
    forward=_taken,
    forward_fake=lambda x, index, using: [x.new_empty(*index.shape, x.shape[2])],
    backward=_spread,
    backward_fake=lambda index, length, using, dy: [dy.new_empty(len(dy), length, dy.shape[2])],
    backward_reference=lambda index, length, using, dy: [reference.put(None, index, dy, length)],
    keep=lambda inputs, outputs: (inputs[1], inputs[0].shape[1], inputs[2]),
)


_put = differentiable(
    "subset_put",
    forward=_merged,
    forward_fake=lambda x, index, rows, using: [x.new_empty(x.shape)],
    backward=_parted,
    backward_fake=lambda index, using, dy: [dy.new_empty(dy.shape), dy.new_empty(*index.shape, dy.shape[2])],
    backward_reference=lambda index, using, dy: [
        reference.put(dy, index, None, dy.shape[1]),
        reference.take(dy, index),
    ],
    keep=lambda inputs, outputs: (inputs[1], inputs[3]),
)


class reference(Plain):
    """In plain torch."""

    @staticmethod
    def take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.gather(1, _wide(index, x))

    @staticmethod
    def put(x: torch.Tensor | None, index: torch.Tensor, rows: torch.Tensor | None, length: int) -> torch.Tensor:
        """``x``, or zeros, with ``rows``, or zeros, at the positions."""
        given = rows if x is None else x
        assert given is not None
        before = given.new_zeros(len(index), length, given.shape[2]) if x is None else x
        wide = _wide(index, given)
        return before.scatter(1, wide, before.new_zeros(wide.shape) if rows is None else rows)


def _wide(index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return index[..., None].expand(-1, -1, x.shape[2])


def slots(index: torch.Tensor, length: int) -> torch.Tensor:
    """For every token its place in ``index``, −1 where it is not there: int64 ``[batch, tokens]``."""
    places = torch.arange(index.shape[1], device=index.device).expand_as(index)
    return index.new_full((len(index), length), -1).scatter_(1, index, places)


class cpu(native.Compiled, take="ppllllpi", put="pppllllpi"):
    """By subset.cpp."""

    @staticmethod
    def take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        x, out = x.contiguous(), results.empty(x, (*index.shape, x.shape[2]))
        sizes = (len(out), index.shape[1], x.shape[1], _bytes(x))
        cpu.library().take(x, index.contiguous(), *sizes, out, threads())
        return out

    @staticmethod
    def put(x: torch.Tensor | None, index: torch.Tensor, rows: torch.Tensor | None, length: int) -> torch.Tensor:
        given = rows if x is None else x
        assert given is not None
        x, rows = (None if each is None else each.contiguous() for each in (x, rows))
        out = results.empty(given, (len(index), length, given.shape[2]))
        sizes = (len(out), index.shape[1], length, _bytes(given))
        cpu.library().put(x, rows, slots(index, length), *sizes, out, threads())
        return out


def _bytes(x: torch.Tensor) -> int:
    """Bytes of one token."""
    return x.shape[2] * x.element_size()
