"""The second half of a decoder's layer, as its implementations take it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.overrides import has_torch_function

from shardlib.kernels.thin_matmul.arguments import Matrix
from shardlib.kernels.thin_matmul.line import line, lines, readable
from shardlib.kernels.thin_matmul.linear import Linear


class Choice(NamedTuple):
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
    choice: Choice | None = None

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
