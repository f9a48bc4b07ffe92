"""Rows of tokens by assignment, in the order of experts, and back; forward and backward in one pass each.

Token t has k assignments, and p_tj is the row of the j-th. A position outside of [0, R) is no row: it was dropped.

- permute: r_p = x_t for p = p_tj; a row without an assignment is 0. Backward: dx_t = Σ_j dr_p, p = p_tj.
- unpermute: y_t = Σ_j w_tj·r_p, in order of j, or without weights Σ_j r_p. Backward: dr_p = w_tj·dy_t, 0 for a row without
  an assignment; dw_tj = dy_t·r_p, 0 where there is no row.

x and y are ``[T, columns]``, r ``[R, columns]``, in fp32, bf16 or fp16 (float64 by plain torch); w is ``[T, k]``, of any
floating dtype. Sums are in fp32, each product rounded before it is added. No two assignments may have one position.
Bytes moved per element of x in fp32: 4 + 4k each way, weighted backward 4 + 8k; plain torch moves 8k to permute and 16k
back. Only positions are saved, and rows where weights are learned.
"""

from __future__ import annotations

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native, results
from shardlib.kernels.common import rows as lines
from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.dispatch import Plain, on, serving
from shardlib.kernels.common.operators import differentiable

__all__ = ["permute", "unpermute"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("triton",)}


def permute(
    x: torch.Tensor, positions: torch.Tensor, count: int | None = None, *, using: str | None = None
) -> torch.Tensor:
    """The rows of ``x`` at their assignments' positions, ``[count, columns]``.

    Args:
        x: ``[T, columns]``.
        positions: int64 ``[T, k]``, such as `shardlib.kernels.routing.top_k` returns.
        count: of rows; None is one for each assignment.

    >>> from shardlib.kernels.permute import permute
    >>> permute(torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 2], [0, -1]])).flatten()
    tensor([2., 1., 1., 0.])
    """
    check_tensors("permute", {"x": x, "positions": positions}, exactly={"positions": torch.int64})
    _check("x", x, positions)
    return _permute(x, positions, positions.numel() if count is None else count, using)[0]


def unpermute(
    rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None = None, *, using: str | None = None
) -> torch.Tensor:
    """The weighted sum of each token's rows, ``[T, columns]``.

    Args:
        rows: ``[R, columns]``.
        positions: int64 ``[T, k]``, as for `permute`.
        weights: ``[T, k]``; None adds rows as they are.

    >>> from shardlib.kernels.permute import unpermute
    >>> rows, positions = torch.tensor([[2.0], [1.0], [4.0]]), torch.tensor([[1, 2], [0, -1]])
    >>> unpermute(rows, positions, torch.tensor([[0.5, 0.25], [1.0, 0.0]])).flatten()
    tensor([1.5000, 2.0000])
    """
    given = {"rows": rows, "positions": positions, "weights": weights}
    check_tensors("unpermute", given, optional=("weights",), exactly={"positions": torch.int64})
    _check("rows", rows, positions)
    if weights is None:
        return _unpermute(rows, positions, using)[0]
    if weights.shape != positions.shape:
        raise ValueError(
            f"weights {tuple(weights.shape)} and positions {tuple(positions.shape)}: both must be [tokens, k]"
        )
    return _weighted(rows, positions, weights, using)[0]


def _check(name: str, x: torch.Tensor, positions: torch.Tensor) -> None:
    if x.dim() != 2 or positions.dim() != 2 or (name == "x" and x.shape[0] != positions.shape[0]):
        first = "tokens" if name == "x" else "rows"
        raise ValueError(
            f"{name} {tuple(x.shape)} and positions {tuple(positions.shape)}: they must be [{first}, columns] and [tokens, k]"
        )


def _spread(x: torch.Tensor, positions: torch.Tensor, count: int, using: str | None) -> list[torch.Tensor]:
    with on(x.device):
        return [serving("permute", x, using).permute(x, positions, count)]


def _gathered(
    rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None, using: str | None
) -> list[torch.Tensor]:
    with on(rows.device):
        return [serving("permute", rows, using).unpermute(rows, positions, weights)]


def _sums(rows: torch.Tensor, positions: torch.Tensor, using: str | None) -> list[torch.Tensor]:
    return _gathered(rows, positions, None, using)


def _sums_of_gradients(positions: torch.Tensor, using: str | None, drows: torch.Tensor) -> list[torch.Tensor]:
    return _gathered(drows, positions, None, using)


def _spread_gradients(positions: torch.Tensor, count: int, using: str | None, dy: torch.Tensor) -> list[torch.Tensor]:
    return _spread(dy, positions, count, using)


def _weighted_sums(
    rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor, using: str | None
) -> list[torch.Tensor]:
    return _gathered(rows, positions, weights, using)


def _weighted_backward(
    rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor, using: str | None, dy: torch.Tensor
) -> list[torch.Tensor]:
    with on(rows.device):
        drows, dweights = serving("permute", rows, using).backward(rows, positions, weights, dy)
    return [drows, dweights.to(weights.dtype)]


def _many(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    return [x.new_empty(count, x.shape[1])]


_permute = differentiable(
    "permute",
    forward=_spread,
    forward_fake=lambda x, positions, count, using: _many(x, count),
    backward=_sums_of_gradients,
    backward_fake=lambda positions, using, drows: _many(drows, positions.shape[0]),
    backward_reference=lambda positions, using, drows: [reference.unpermute(drows, positions, None)],
    keep=lambda inputs, outputs: (inputs[1], inputs[3]),
)


_unpermute = differentiable(
    "unpermute",
    forward=_sums,
    forward_fake=lambda rows, positions, using: _many(rows, positions.shape[0]),
    backward=_spread_gradients,
    backward_fake=lambda positions, count, using, dy: _many(dy, count),
    backward_reference=lambda positions, count, using, dy: [reference.permute(dy, positions, count)],
    keep=lambda inputs, outputs: (inputs[1], len(inputs[0]), inputs[2]),
)


_weighted = differentiable(
    "unpermute_weighted",
    forward=_weighted_sums,
    forward_fake=lambda rows, positions, weights, using: _many(rows, positions.shape[0]),
    backward=_weighted_backward,
    backward_fake=lambda rows, positions, weights, using, dy: [lines.like(rows), lines.like(weights)],
    backward_reference=lambda rows, positions, weights, using, dy: reference.backward(rows, positions, weights, dy),
)


class reference(Plain):
    """In plain torch; assignments without a row have one behind the last."""

    @staticmethod
    def permute(x: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
        return _as_rows(x[:, None].expand(-1, positions.shape[1], -1), positions, count)

    @staticmethod
    def unpermute(rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        inside, found = _found(rows, positions)
        terms = found if weights is None else torch.where(inside, weights.to(found.dtype), 0)[..., None] * found
        total = terms.new_zeros(len(positions), rows.shape[1])
        for j in range(positions.shape[1]):  # in this order, whatever torch's sum does
            total = total + terms[:, j]
        return total.to(rows.dtype)

    @staticmethod
    def backward(
        rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor, dy: torch.Tensor
    ) -> list[torch.Tensor]:
        inside, found = _found(rows, positions)
        dy = lines.wide(dy)[:, None]
        drows = _as_rows((weights.to(dy.dtype)[..., None] * dy).to(rows.dtype), positions, len(rows))
        dweights = torch.where(inside, (found * dy).sum(-1), 0)
        return [drows, dweights.to(weights.dtype)]


def _inside(positions: torch.Tensor, count: int) -> torch.Tensor:
    return (positions >= 0) & (positions < count)


def _as_rows(terms: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """``terms [T, k, columns]`` as rows."""
    at = positions.where(_inside(positions, count), count).flatten()
    return terms.new_zeros(count + 1, terms.shape[-1]).index_add(0, at, terms.flatten(0, 1))[:count].clone()


def _found(rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask of the assignments that have a row, and ``[T, k, columns]``: those rows, others 0."""
    wide, inside = lines.wide(rows), _inside(positions, len(rows))
    padded = torch.cat([wide, wide.new_zeros(1, rows.shape[1])])
    return inside, padded[positions.where(inside, len(rows))]


class cpu(native.Compiled, permute="plpllllppi", unpermute="pipplllpli", unpermute_backward="ppippllllpppi"):
    """By permute.cpp."""

    @staticmethod
    def permute(x: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
        x, out = x.contiguous(), results.empty(x, (count, x.shape[1]))
        sizes = (*positions.shape, x.shape[1], count)
        cpu.library().permute(x, x.element_size(), positions.contiguous(), *sizes, out, _filled(count), threads())
        return out

    @staticmethod
    def unpermute(rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        rows, y = rows.contiguous(), results.empty(rows, (len(positions), rows.shape[1]))
        given = (rows, native.DTYPES[rows.dtype], positions.contiguous(), native.floats(weights))
        cpu.library().unpermute(*given, *positions.shape, rows.shape[1], y, len(rows), threads())
        return y

    @staticmethod
    def backward(
        rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor, dy: torch.Tensor
    ) -> list[torch.Tensor]:
        rows, drows = rows.contiguous(), results.like(rows)
        dweights = torch.empty(weights.shape)
        given = (dy.contiguous(), rows, native.DTYPES[rows.dtype], positions.contiguous(), native.floats(weights))
        made = (drows, dweights, _filled(len(rows)), threads())
        cpu.library().unpermute_backward(*given, *positions.shape, *rows.shape[::-1], *made)
        return [drows, dweights]


def _filled(count: int) -> torch.Tensor:
    """Whether each row has an assignment, for the kernel to note."""
    return torch.zeros(count, dtype=torch.uint8)
