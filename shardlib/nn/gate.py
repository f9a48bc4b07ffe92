"""`Gate`: what a layer of a model does at one step of training, for blocks that see to it themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Gate:
    """What a layer does at one step, given to a block that has a parameter ``gate``.

    Such a block returns its input unchanged where the gate is not ``open``, without a use of its parameters, and else adds
    ``gate.scaled(branch)`` to the residual stream for each of its branches. (Of a block without this parameter the train
    step takes x + (block(x) − x)/p.) Outside of a train step every gate is open and scales nothing.

    Attributes:
        keep: the probability p with which the layer was to be kept at this step; None where it is never left out.
        open: whether it was kept.
        tokens: the positions of the tokens that the layer sees, int64 (B, kept), ascending; None where it sees all. What is
            per token among its inputs has those tokens only; a block that computes positions itself takes these.

    >>> sl.nn.Gate(keep=0.5).scaled(torch.ones(2))
    tensor([2., 2.])
    """

    keep: float | None = None
    open: bool = True
    tokens: torch.Tensor | None = None

    def scaled(self, branch: torch.Tensor) -> torch.Tensor:
        """A branch over the probability that it is kept, so that its expected value does not depend on that."""
        return branch if self.keep in (None, 1.0) else branch / self.keep

    def between(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """The residual stream behind a layer whose branches cannot be scaled one by one: before + (after − before)/p."""
        return after if self.keep in (None, 1.0) else before + (after - before) / self.keep


OPEN = Gate()
