"""The numbers that a step sums over ranks besides gradients, in one exchange: loss, weight, squares and agreement."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from shardlib.collectives.primitives import sum_over
from shardlib.errors import LossError
from shardlib.execute import agreement
from shardlib.execute.agreement import Agreement
from shardlib.execute.losses import Outcome, Results, quotient
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming
from shardlib.nn.functional import Mean
from shardlib.plan.plan import Plan
from shardlib.tree import Tree, flatten

_FACTS = 3  # strays, weighted, aux


@dataclass(frozen=True)
class Sums:
    """The sums over all ranks and micro-batches of a step.

    Attributes:
        total: the losses' totals; 0-d. Of a sum of means its value.
        weight: the losses' weights; 0-d. Of a sum of means 1, or 0 if all its weights are.
        weights: the weights of a sum of means, ``[terms]``; None for another loss.
        squares: the squares of the gradients' elements; 0-d.
        differ: whether a rank left the trace (see `shardlib.execute.collective_order`) or could not read parameters, or ranks
            were given different inputs.
        weighted: whether the loss is a `Mean`.
        with_aux: whether any rank has aux.
        numbers: total, weight and squares as numbers on the host.
        layer_tokens: tokens of the global batch that layers saw, summed over layers.
        used: the paths of the parameters that any rank used; None if that is not asked for.
    """

    total: torch.Tensor
    weight: torch.Tensor
    weights: torch.Tensor | None
    squares: torch.Tensor
    differ: bool
    weighted: bool
    with_aux: bool
    numbers: tuple[float, float, float]
    layer_tokens: int
    used: frozenset[str] | None


class Totals:
    """Sums a step's losses and aux over the micro-batches of one rank, and then over ranks.

    Attributes:
        aux: the last micro-batch's aux, with each `Mean` summed over micro-batches.
        buffers: the last micro-batch's buffers.
        losses: total and weight of each mean of each micro-batch on this rank.
        layer_tokens: tokens that this rank's layers saw, summed over layers.
        faults: errors in the losses, with remedies; `require_agreement` raises them on every rank.
    """

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self._plan, self._mesh = plan, mesh
        self._summation = plan.reductions.summation
        self._terms = 0  # the number of means in the loss, 1 for a scalar; 0 before the first micro-batch
        self._losses = self._zeros(1)
        self._negative = torch.zeros((), dtype=torch.bool, device=mesh.device)
        self._weighted = False
        self._aux = Results(mesh.device, self._summation, "micro-batch", "aux")
        self.buffers: Tree = None
        self.losses: list[Mean] = []
        self.layer_tokens = 0
        self.faults: list[str] = []

    def add(self, outcome: Outcome) -> None:
        """Add the detached outcome of one micro-batch."""
        kind = len(outcome.means), outcome.weighted
        if not self._terms:
            self._losses = self._zeros(len(outcome.means))
        elif kind != (self._terms, self._weighted):
            kinds = f"{_loss(self._terms, self._weighted)} in one micro-batch and {_loss(*kind)} in another"
            self.faults.append(f"{kinds}. {_REMEDY}")
            return
        self._terms, self._weighted = kind
        self.losses += outcome.means
        totals = torch.stack([mean.total.double() for mean in outcome.means])
        self._losses += self._summation.numbers(torch.stack([totals, outcome.weights]).to(self._mesh.device))
        if outcome.weighted:
            self._negative |= (outcome.weights < 0).any()
        self._aux.add(outcome.aux)
        self.buffers = outcome.buffers

    @property
    def aux(self) -> Tree:
        return self._aux.tree

    @naming("the loss and the gradients' norm")
    def over_ranks(self, squares: torch.Tensor, strays: float, reached: set[str] | None) -> Sums:
        """The sums over all ranks. Collective. Errors are raised by `require_agreement` later.

        Args:
            squares: this rank's sum of squares of gradients, as the plan's `Summation` holds it.
            strays: `Inputs.share`, plus 1 if this rank strayed, and 1 if it could not read parameters. Its sum is 0 if no
                rank did or could not, and inputs are equal.
            reached: the paths of the parameters that this rank used; None if they are not asked for.
        """
        mesh, plan, width = self._mesh, self._plan, self._summation.width
        known = [strays, float(self._terms * self._weighted), float(self.aux is not None), *self._agreement().numbers()]
        known += [self.layer_tokens] * plan.step.has_drops
        paths = () if reached is None else tuple(plan.numbering.infos)
        known += [float(path in (reached or ())) for path in paths]
        facts = torch.tensor(known, dtype=torch.float64, device=mesh.device)
        facts[_FACTS] += self._negative
        one = self._losses[:, 0] if self._terms == 1 else torch.zeros_like(self._losses[:, 0])
        sums = torch.cat([one.flatten(), squares, facts])
        sum_over(mesh, plan.loss_axes, sums)
        # Ranks along the other axes have the same losses.
        others = tuple(axis for axis in mesh.shape if axis not in plan.loss_axes)
        sum_over(mesh, others, sums[2 * width :])
        values = self._summation.values(sums[: 3 * width].view(3, width))
        numbers = torch.cat([values, sums[3 * width :]]).tolist()
        total, weight, squares = values.unbind()
        counts = [numbers.pop() for _ in paths]
        used = None if reached is None else frozenset(path for path, count in zip(reversed(paths), counts) if count)
        # Of the residual stream, whose tokens are counted, ranks along the sequence's axis have parts.
        parts = () if plan.step.sequence is None else (plan.step.sequence.axis,)
        copies = math.prod(mesh.shape[axis] for axis in others if axis not in parts)
        tokens = round(numbers.pop() / copies) if plan.step.has_drops else 0
        strays, weighted, aux = numbers[3 : 3 + _FACTS]
        self._agree = agreement.agree(numbers[3 + _FACTS :])
        sums_of_means = None
        if self._agree and not strays and (terms := round(weighted / max(numbers[4 + _FACTS], 1))) > 1:
            sums_of_means = self._means_over_ranks(terms)
            total, weight = self._value(sums_of_means)
            numbers[:2] = torch.stack([total, weight]).tolist()
        weights = None if sums_of_means is None else sums_of_means[:, 1]
        of_host = tuple(numbers[:3])
        return Sums(total, weight, weights, squares, strays != 0, weighted > 0, aux > 0, of_host, tokens, used)

    def _means_over_ranks(self, terms: int) -> torch.Tensor:
        """The totals and weights of a sum of means, summed over ranks: ``[terms, 2]``. Collective."""
        sums = self._losses if self._terms else self._zeros(terms)
        sum_over(self._mesh, self._plan.loss_axes, sums)
        return self._summation.values(sums).t()

    @staticmethod
    def _value(means: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`Sums.total` and `Sums.weight` of a sum of means, ``[terms, 2]``."""
        weights = means[:, 1]
        weight = weights.any().double()
        weight = torch.where(weights.isfinite().all(), weight, torch.nan)
        return torch.where(weight == 0, 0.0, quotient(means)), weight

    def _zeros(self, terms: int) -> torch.Tensor:
        shape = 2, terms, self._summation.width
        return torch.zeros(shape, dtype=torch.float64, device=self._mesh.device)

    def require_agreement(self) -> None:
        """Raise the errors of any rank on all ranks; called after `over_ranks`.

        Raises:
            LossError: losses of two kinds, different means in aux, or a negative weight, on any rank or micro-batch.
        """
        if self._agree:
            return
        if self._negative:
            self.faults.append("a negative weight of sl.Mean; weights are counts or other numbers of at least 0")
        self._agreement().refuse(self._mesh, _REMEDY)

    def _agreement(self) -> Agreement:
        if not self._terms:
            return Agreement(None, tuple(self.faults))
        form = _loss(self._terms, self._weighted)
        if self._aux.paths:
            form += f", {self._aux.form}"
        if self.buffers is not None and self._plan.batch_ranks > 1:  # buffers will be averaged over ranks
            shapes = (
                f"{path} {tuple(t.shape)} {t.dtype}"
                for path, t in zip(*flatten(self.buffers)[:2])
                if torch.is_tensor(t)
            )
            form += f", buffers {', '.join(shapes)}"
        return Agreement(form, (*self.faults, *self._aux.faults))


def _loss(terms: int, weighted: bool) -> str:
    if terms > 1:
        return f"a sum of {terms} sl.Mean as the loss"
    return "sl.Mean as the loss" if weighted else "a scalar as the loss"


_REMEDY = "Return the same kind of loss, with the same sl.Mean in aux, on every rank and for every micro-batch"


# The weights of a loss that is a sum of means, which must be known before its backward starts.
# The weight of a single `Mean` is divided out of the gradient when all micro-batches and ranks have added to it. In a sum
# each total is to be divided by a weight of its own, so the backward of each starts from one over it. A step of one micro-
# batch sums the weights over ranks between forward and backward. A step of several starts from the weights of the steps
# before, if these were always the same; otherwise it is taken twice, the first time to learn them.


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
                "the weights of a sum of sl.Mean changed when the loss ran again. Draw by its rng, or torch's "
                "generators"
            )
        self._weights, self._learnt = weights, True
        return False


def alike(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether the weights of two sums of means are the same, but for the order in which they were summed."""
    if one is None or other is None or one.shape != other.shape:
        return False
    return torch.allclose(one, other, rtol=_TOLERANCE, atol=0, equal_nan=True)
