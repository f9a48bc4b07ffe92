"""y = x + mlp(norm(x)) of tokens x: the second half of a decoder's layer, as in Llama, Mixtral and the models after them.

With n = w·x/√(mean(x²) + ε):

- an MLP:  mlp(n) = W_down (silu(W_gate n) ⊙ W_up n), plus biases where there are any.
- experts: p = softmax(W_router n) in fp32, e_1 … e_k those of the k largest p, and w_j = p_e_j, or that divided by the sum of
  all k;  mlp(n) = Σ_j w_j · mlp_e_j(n), in order of j.

x and y are ``[T, width]`` in fp32 or bf16 (fp16 and float64 by plain torch), the weights of that dtype, or quantised those
of an MLP. Results are rounded to it after each product, norm and activation. Bytes moved: those of the weights, of experts
only those that a token chose, once for up to 32 tokens. More tokens are products of torch's. Nothing has gradients. For one
token, reading weights takes longest; in Python the ten operations take half as long again, as weights evict its data from the
caches. So this is one call. A token's results do not depend on the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from shardlib.common._compat import differentiated
from shardlib.common.thresholds import threads
from shardlib.kernels.common import native
from shardlib.kernels.common.dispatch import Plain, on, serving
from shardlib.kernels.grouped_matmul import grouped_matmul
from shardlib.kernels.permute import permute, unpermute
from shardlib.kernels.routing import by_expert
from shardlib.kernels.thin_matmul import FEW, DecoderWeights, Linear

__all__ = ["MLP", "ChosenExperts", "decoder_mlp"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",)}


class ChosenExperts(NamedTuple):
    """A token's choice of experts: those of the largest softmax of its router's logits.

    Attributes:
        router: ``[experts, width]``.
        taken: the number of experts that a token takes.
        renormalises: whether the weights of a token's experts are divided by their sum.
    """

    router: torch.Tensor
    taken: int
    renormalises: bool

    def of(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of tokens ``[T, width]``, the best first, and their weights, ``[T, taken]`` each."""
        weights, experts = Linear(self.router)(x).float().softmax(-1).topk(self.taken, -1)
        return experts, weights / weights.sum(-1, keepdim=True) if self.renormalises else weights


@dataclass(frozen=True, eq=False)
class MLP(DecoderWeights):
    """A norm's weight, and the weights of an MLP, or of experts among which tokens choose; all of one dtype.

    Attributes:
        norm: ``[width]``, of an RMSNorm with ``eps``.
        gate: weight ``[inner, width]``; with experts ``[experts, 2 · inner, width]``, the rows of ``up`` after its own.
        up: weight ``[inner, width]``; None with experts.
        down: weight ``[width, inner]``; with experts ``[experts, width, inner]``.
        choice: of experts; None for an MLP.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """

    norm: torch.Tensor
    eps: float
    gate: Linear
    up: Linear | None
    down: Linear
    choice: ChosenExperts | None = None

    @property
    def linears(self) -> tuple[Linear | None, ...]:
        return Linear(self.choice.router) if self.choice else None, self.gate, self.up, self.down

    def shapes(self) -> list[tuple[Any, tuple[int, ...]]] | None:
        (width,), inner = self.norm.shape, self.down.weight.shape[-1]
        if self.choice is None:
            if self.up is None:
                return None
            wanted = ((self.gate, (inner, width)), (self.up, (inner, width)), (self.down, (width, inner)))
            return [each for part, shape in wanted for each in ((part.weight, shape), (part.bias, shape[:1]))]
        experts, biases = len(self.choice.router), (self.gate.bias, self.down.bias)
        if self.up or biases != (None, None) or not 1 <= self.choice.taken <= experts:
            return None
        router, gate, down = self.choice.router, self.gate.weight, self.down.weight
        return [(router, (experts, width)), (gate, (experts, 2 * inner, width)), (down, (experts, width, inner))]


def decoder_mlp(x: torch.Tensor, layer: MLP, *, using: str | None = None) -> torch.Tensor:
    """The tokens after the second half of a layer, ``[T, width]``, without gradients.

    Args:
        x: ``[T, width]``, of the layer's dtype.

    Raises:
        ValueError: ``x`` does not fit the layer, or needs gradients where they are recorded.

    >>> from shardlib.kernels.decoder_mlp import MLP, decoder_mlp
    >>> from shardlib.kernels.thin_matmul import Linear
    >>> layer = MLP(torch.ones(1), 0.0, Linear(torch.ones(2, 1)), Linear(torch.ones(2, 1)), Linear(torch.ones(1, 2)))
    >>> decoder_mlp(torch.tensor([[3.0]]), layer)
    tensor([[4.4621]])
    """
    norm = layer.norm
    if x.dim() != 2 or x.shape[1] != norm.shape[0] or x.dtype != norm.dtype or x.device != norm.device:
        raise ValueError(
            f"x is {tuple(x.shape)}, {x.dtype} on {x.device}: it must be [tokens, {len(norm)}], {norm.dtype} on {norm.device}"
        )
    if torch.is_grad_enabled() and differentiated(x):
        raise ValueError("decoder_mlp has no gradients: call it under torch.no_grad()")
    with on(x.device):
        return serving("decoder_mlp", x, using).apply(x, layer)


class reference(Plain):
    """In plain torch, one operation after the other."""

    @staticmethod
    def apply(x: torch.Tensor, layer: MLP) -> torch.Tensor:
        normed = F.rms_norm(x, x.shape[-1:], layer.norm, layer.eps)
        if layer.choice is not None:
            return x + _experts(normed, layer, layer.choice)
        assert layer.up is not None
        return x + layer.down(F.silu(layer.gate(normed)).mul_(layer.up(normed)))


def _experts(x: torch.Tensor, layer: MLP, choice: ChosenExperts) -> torch.Tensor:
    experts, weights = choice.of(x)
    counts, positions = by_expert(experts, len(choice.router))
    ends = counts.cumsum(0)
    both: Any = layer.gate.weight
    down: Any = layer.down.weight
    gate, up = grouped_matmul(permute(x, positions), both, ends).chunk(2, -1)
    rows = grouped_matmul(F.silu(gate).mul_(up), down, ends)
    return unpermute(rows, positions, weights).to(x.dtype)


class cpu(native.Compiled, decoder_mlp="pilppflipi"):
    """By decoder_mlp.cpp, for few tokens."""

    @staticmethod
    def apply(x: torch.Tensor, layer: MLP) -> torch.Tensor:
        lines = layer.lines
        if lines is None or len(x) > FEW():
            return reference.apply(x, layer)
        x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        _, taken, renormalises = layer.choice or (None, 0, False)
        how = (lines, layer.norm, layer.eps, taken, int(renormalises))
        cpu.library().decoder_mlp(x, native.DTYPES[x.dtype], len(x), *how, y, threads())
        return y
