"""Rotary position embedding (arXiv 2104.09864) of queries and keys.

The numbers of a head form pairs (a, b), and pair j at position t is rotated by the angle θ = t·f_j:

    a' = a·cos θ − b·sin θ,  b' = a·sin θ + b·cos θ;  backward rotates by −θ.

If ``interleaved`` (the paper, GPT-J), pairs are neighbours, (x_2j, x_2j+1); otherwise (NeoX, Llama) they are (x_j, x_j+d/2).
Numbers beyond the first d, twice the width of the angles, are unchanged.

x is ``[..., heads, positions, size]`` in fp32, bf16 or fp16 (float64 by plain torch), computed in fp32; cos and sin are
constants ``[positions, d/2]`` that all heads share. Bytes moved per element in fp32: 8 each way; plain torch moves some 32.
Operations: 3. Only the angles are saved.
"""

from __future__ import annotations

import torch

from shardlib.common._compat import differentiated
from shardlib.common.thresholds import threads
from shardlib.kernels.common import native, rows
from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.dispatch import Plain, on, serving
from shardlib.kernels.common.operators import differentiable

__all__ = ["angles", "rotary"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("triton",)}


def angles(positions: torch.Tensor, width: int, base: float = 10000.0) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 ``[positions, width / 2]``, of the paper's frequencies f_j = base^(−2j / width).

    Args:
        positions: ``[positions]``, of any dtype.
        width: the numbers of a head that are rotated, an even number.

    >>> cos, sin = sl.nn.angles(torch.arange(16), 8)
    >>> cos.shape
    torch.Size([16, 4])
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
    theta = positions.to(torch.float64)[:, None] * base**-exponents
    return theta.cos().float(), theta.sin().float()


def rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False, using: str | None = None
) -> torch.Tensor:
    """``x``, ``[..., positions, size]``, rotated by the angles of `angles`, or others of their shape.

    Raises:
        ValueError: the angles' shape does not fit ``x``, or the angles require gradients.

    >>> cos, sin = sl.nn.angles(torch.arange(16), 8)
    >>> sl.nn.rotary(torch.randn(2, 4, 16, 8), cos, sin).shape
    torch.Size([2, 4, 16, 8])
    """
    check_tensors("rotary", {"x": x, "cos": cos, "sin": sin})
    if (
        x.dim() < 2
        or cos.shape != sin.shape
        or cos.dim() != 2
        or len(cos) != x.shape[-2]
        or 2 * cos.shape[1] > x.shape[-1]
    ):
        raise ValueError(
            f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)} and x {tuple(x.shape)}: angles must be [positions, d / 2], x "
            "[..., positions, d at least]"
        )
    if differentiated(cos) or differentiated(sin):
        raise ValueError("cos or sin requires a gradient, and is a constant here: detach it")
    both = torch.stack([cos, sin]).to(torch.promote_types(x.dtype, torch.float32))
    return _rotary(x, both, interleaved, using)[0]


def _forward(x: torch.Tensor, both: torch.Tensor, interleaved: bool, using: str | None) -> list[torch.Tensor]:
    return _turned(x, both, interleaved, using, False)


def _backward(both: torch.Tensor, interleaved: bool, using: str | None, dy: torch.Tensor) -> list[torch.Tensor]:
    return _turned(dy, both, interleaved, using, True)


def _turned(
    x: torch.Tensor, both: torch.Tensor, interleaved: bool, using: str | None, back: bool
) -> list[torch.Tensor]:
    with on(x.device):
        return [rows.cast(serving("rotary", x, using).turn(x, both, interleaved, back), x.dtype)]


_rotary = differentiable(
    "rotary",
    forward=_forward,
    forward_fake=lambda x, *_: [rows.like(x)],
    backward=_backward,
    backward_fake=lambda both, interleaved, using, dy: [rows.like(dy)],
    backward_reference=lambda both, interleaved, using, dy: [reference.turn(dy, both, interleaved, True)],
    keep=lambda inputs, outputs: inputs[1:],
    per_input=lambda computed, incoming: [computed[0], None],
)


class reference(Plain):
    """In plain torch."""

    @staticmethod
    def turn(x: torch.Tensor, both: torch.Tensor, interleaved: bool, back: bool) -> torch.Tensor:
        cos, sin = both[0], -both[1] if back else both[1]
        half = cos.shape[1]
        turned, rest = rows.wide(x).split([2 * half, x.shape[-1] - 2 * half], -1)
        a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
        pairs = [a * cos - b * sin, a * sin + b * cos]
        rotated = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
        return torch.cat([rotated, rest], -1).to(x.dtype)


class cpu(native.Compiled, rotary="pippiillllpi"):
    """By rotary.cpp."""

    @staticmethod
    def turn(x: torch.Tensor, both: torch.Tensor, interleaved: bool, back: bool) -> torch.Tensor:
        x = native.readable(x)
        y = rows.like(x)
        cos, sin = (both.repeat_interleave(2, -1) if interleaved else both.contiguous()).unbind()
        where = (*rows.sizes(x), *both.shape[1:], y, threads())
        cpu.library().rotary(x, native.DTYPES[x.dtype], cos, sin, interleaved, back, *where)
        return y
