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

``using`` names one implementation ("cpu", "reference"), for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import has_torch_function

from shardlib.common._compat import differentiated
from shardlib.common.thresholds import threads
from shardlib.kernels.common import native
from shardlib.kernels.common.dispatch import Plain, on, serving
from shardlib.kernels.grouped_matmul import grouped_matmul
from shardlib.kernels.permute import permute, unpermute
from shardlib.kernels.routing import by_expert
from shardlib.kernels.thin_matmul import FEW, Linear, Matrix, line, lines, readable

__all__ = ["MLP", "Choice", "decoder_mlp"]

IMPLEMENTATIONS = {"cpu": ("cpu",)}


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
class MLP:
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

    def __post_init__(self) -> None:
        if self._computes_itself or self._fits():
            return
        shapes = ", ".join(f"{tuple(part.shape)} of {part.dtype}" for part in self._parts if part is not None)
        raise ValueError(
            f"MLP of {shapes}: they must be a norm [width], gate and up [inner, width], and down [width, inner], or with "
            "experts [experts, 2 · inner, width] and [experts, width, inner], and a router [experts, width], with at least "
            "as many experts as a token takes; biases [outputs], none with experts; all of one dtype"
        )

    @cached_property
    def lines(self) -> Any:
        """What decoder_mlp.cpp calls a layer; None where it cannot read it."""
        if self._computes_itself or not readable(self._parts, self.norm.dtype):
            return None
        router = None if self.choice is None else self.choice.router
        return lines(line(router), line(*self.gate), line(*self.up) if self.up else line(None), line(*self.down))

    @property
    def _parts(self) -> tuple[Any, ...]:
        return (self.norm, *self.gate, *(self.up or ()), *self.down, *((self.choice.router,) if self.choice else ()))

    @cached_property
    def _computes_itself(self) -> bool:
        return has_torch_function(tuple(part for part in self._parts if not isinstance(part, Matrix)))

    def _fits(self) -> bool:
        (width,), inner = self.norm.shape, self.down.weight.shape[-1]
        wanted: list[tuple[Any, tuple[int, ...]]] = []
        if self.choice is None:
            if self.up is None:
                return False
            for part, shape in ((self.gate, (inner, width)), (self.up, (inner, width)), (self.down, (width, inner))):
                wanted += [(part.weight, shape), (part.bias, shape[:1])]
        else:
            experts = len(self.choice.router)
            if (
                self.up
                or self.gate.bias is not None
                or self.down.bias is not None
                or not 1 <= self.choice.taken <= experts
            ):
                return False
            wanted = [
                (self.choice.router, (experts, width)),
                (self.gate.weight, (experts, 2 * inner, width)),
                (self.down.weight, (experts, width, inner)),
            ]
        given = [(part, shape) for part, shape in wanted if part is not None]
        return all(part.shape == shape and part.dtype == self.norm.dtype for part, shape in given)


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
            f"x is {tuple(x.shape)}, {x.dtype} on {x.device}, and the layer's norm {tuple(norm.shape)}, {norm.dtype} on "
            f"{norm.device}: x must be [tokens, width], the rest the same"
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


class cpu(native.Cpp, operation="decoder_mlp", decoder_mlp="pilppflipi"):
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
