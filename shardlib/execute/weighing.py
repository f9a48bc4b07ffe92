"""The weights of a loss that is a sum of means, which must be known before its backward starts.

The weight of a single `Mean` is divided out of the gradient when all micro-batches and ranks have added to it. In a sum each
total is to be divided by a weight of its own, so the backward of each starts from one over it. A step of one micro-batch sums
the weights over ranks between forward and backward. A step of several starts from the weights of the steps before, if these
were always the same; otherwise it is taken twice, the first time to learn them.
"""

from __future__ import annotations

import torch

from shardlib.collectives.primitives import sum_over
from shardlib.errors import LossError
from shardlib.execute.losses import Outcome
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming
from shardlib.plan.plan import Plan

_TOLERANCE = 1e-12  # relative difference up to which sums of the same weights in another order are equal


class Weighing:
    """The weights of one step's sum of means.

    Args:
        terms: the number of means in the loss of the step before, which all ranks know.
        expected: weights, ``[terms]``, that the step is expected to have; None to learn them.
    """

    def __init__(self, plan: Plan, mesh: Mesh, terms: int, expected: torch.Tensor | None) -> None:
        self._plan, self._mesh, self._terms, self._weights = plan, mesh, terms, expected
        self._learnt = False

    @naming("the weights of a sum of means")
    def meet(self, outcome: Outcome | None) -> None:
        """Learn the weights of a step from its only micro-batch. Collective; ``outcome`` is None on a rank without one."""
        if self._terms == 1 or self._weights is not None:
            return
        summation, mine = self._plan.reductions.summation, None if outcome is None else outcome.weights
        if mine is None or len(mine) != self._terms:
            mine = torch.zeros(self._terms, dtype=torch.float64, device=self._mesh.device)
        sums = summation.numbers(mine)
        sum_over(self._mesh, self._plan.loss_axes, sums)
        self._weights = summation.values(sums)

    def knows(self, outcome: Outcome) -> bool:
        """Whether `factors` are those of the step. Where nothing has values, on an abstract mesh, any are."""
        return (
            self._mesh.abstract
            or len(outcome.means) == 1
            or (self._weights is not None and len(self._weights) == len(outcome.means))
        )

    def factors(self, outcome: Outcome) -> torch.Tensor:
        """What each total is multiplied by before backward, ``[terms]``; 1 for a loss that is no sum, and 0 where weights are
        not known."""
        if len(outcome.means) == 1 or self._mesh.abstract:
            return torch.ones_like(outcome.weights)
        if not self.knows(outcome):
            return torch.zeros_like(outcome.weights)
        assert self._weights is not None
        return torch.where(self._weights == 0, 0.0, 1 / self._weights)

    def fits(self, weights: torch.Tensor | None) -> bool:
        """Whether the backward had the step's ``weights``. If not, it has them when the step is taken again.

        Raises:
            LossError: the step was taken again, with other weights.
        """
        if weights is None or alike(self._weights, weights):
            return True
        if self._learnt:
            raise LossError(
                "the weights of a sum of means changed when the step was computed again, as it is to learn them: the loss "
                "function draws or counts by itself. Draw by its rng (sl.dropout), or torch's own generators"
            )
        self._weights, self._learnt = weights, True
        return False


def alike(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether the weights of two sums of means are the same, but for the order in which they were summed."""
    if one is None or other is None or one.shape != other.shape:
        return False
    return torch.allclose(one, other, rtol=_TOLERANCE, atol=0, equal_nan=True)
