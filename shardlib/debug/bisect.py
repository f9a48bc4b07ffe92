"""`bisect`: the first operation by which two plans that should train alike do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch

from shardlib.debug.calls import forward, placing
from shardlib.debug.finding import PHASES, Difference, Finding
from shardlib.debug.one_device import OverRows, mean_over_rows
from shardlib.debug.reduction import reduction
from shardlib.debug.replay import PlanTrial
from shardlib.debug.subject import (
    by_design,
    eagerly,
    in_float64,
    is_float64,
    left_out,
    like_one_device,
    plan_of,
    widened,
)
from shardlib.debug.update import norm, update
from shardlib.debug.view import side_by_side
from shardlib.execute.batches import as_tensors
from shardlib.optim import sgd
from shardlib.optim.base import GradientTransformation
from shardlib.optim.combine import require_transformations
from shardlib.plan.plan import Plan
from shardlib.rng import Key
from shardlib.sharded.given import whole_params
from shardlib.tree import Tree


@dataclass(frozen=True)
class Bisection:
    """The result of `bisect`; ``print`` it. True if something differs.

    Attributes:
        finding: the first thing that differs; None if nothing does.
        verdict: whether it is a defect or rounding, and why.
        notes: what was not compared, a line each.
    """

    finding: Finding | None
    verdict: str
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.finding is not None

    def __str__(self) -> str:
        first = [f"{self.finding.plan}, {self.finding}"] if self.finding else []
        return "\n".join([*first, self.verdict, *(f"not compared: {note}" for note in self.notes)])


def bisect(
    loss_fn: Callable[..., Any],
    params: Tree,
    plan_a: Any,
    plan_b: Any,
    batch: Tree,
    *,
    optimizer: GradientTransformation | None = None,
    steps: int = 1,
    rng: Key | int = 0,
) -> Bisection:
    """Find the first operation by which two plans that should train alike do not.

    Replays both plans on simulated ranks, from the same parameters on the same global batches, beside plain autograd on one
    device, which gets the same micro-batches. Compared are, in the order of a step: micro-batches, random keys, gathered
    parameters, each call of the loss function, each call's gradient, each exchange of gradients, loss and norm, the update,
    and the parameters that are gathered after it. Ranks' shards are assembled by a reading of specs of its own.

    All is replayed in float64 first, which tells rounding from a defect, and then in the plans' own dtypes. Values differ if
    they do by more than 8·ε^¾ of the largest one.

    Args:
        loss_fn: as for `make_train_step`, without buffers.
        params: a pytree with the parameters' values.
        plan_a, plan_b: each a plan of `make_plan` for these parameters, or a pair of the mesh's sizes and a transform,
            ``(dict(data=4), sl.zero(2))``; None for one device. At most 64 ranks.
        batch: the global batch, whose rows are a multiple of every plan's ranks times micro-batches.
        optimizer: by default ``sl.optim.sgd(0.1)``.
        steps: how many steps to replay, all on the same batch. A defect of what is kept from step to step needs 2.
        rng: as for `make_train_step`.

    Raises:
        TypeError: a plan of another form; an optimizer that is not a gradient transformation; a loss that takes buffers.
        ValueError: fewer than 1 step, or no plan at all.
        IllegalComposition: a plan for too many ranks, on disk, or with ``offload(delay=True)``.
        TreeError: sharded parameters, or a module in their place.
        LossError: a loss that is not callable, or a module; one that runs in float32 and not in float64.
        BatchError: rows that do not divide; a batch without tensors, on which the loss raises an error.
        NonFiniteError: the loss or its gradient is not finite on one device.

    >>> params = {"up": torch.ones(4, 4), "down": torch.ones(4, 4)}
    >>> loss_fn = lambda params, batch: (batch @ params["up"] @ params["down"]).square().mean()
    >>> print(sl.debug.bisect(loss_fn, params, None, (dict(data=2), sl.zero(3)), torch.ones(4, 4)))
    nothing differs, in float64 and in the plans' own dtypes
    """
    if not isinstance(steps, (int, Integral)) or steps < 1:
        raise ValueError(f"steps={steps!r}: replay at least 1")
    optimizer = sgd(0.1) if optimizer is None else optimizer
    require_transformations("bisect", optimizer)
    params = whole_params("bisect", params)
    given = {"plan_a": plan_a, "plan_b": plan_b}
    plans = {name: plan_of(plan, params, name) for name, plan in given.items() if plan is not None}
    if not plans:
        raise ValueError("plan_a and plan_b are both None, which is one device: give a plan to compare with it")
    key = rng if isinstance(rng, Key) else Key(rng)
    batch = as_tensors(batch, torch.device("cpu"))
    notes = tuple(dict.fromkeys(note for plan in plans.values() for note in left_out(plan, optimizer)))
    notes += tuple(by_design(plans))

    def first(exact: bool) -> Finding | None:
        values, rows = (widened(params), widened(batch)) if exact else (params, batch)
        found = []
        for name, plan in plans.items():
            plan = in_float64(plan) if exact else like_one_device(plan)
            finding = _first_difference(plan, PlanTrial(loss_fn, values, rows, optimizer, steps, key))
            if finding is not None:
                found.append(replace(finding, plan=name))
        if len(found) == 2 and found[0] == found[1]:
            found = [replace(found[0], plan="both plans")]
        return min(found, key=lambda each: (each.step, PHASES.index(each.phase)), default=None)

    with eagerly():
        trial = PlanTrial(loss_fn, params, batch, optimizer, steps, key)
        return _judged(first, plans, lambda plan: mean_over_rows(plan, trial), notes)


_RAISED = "what the step raised"  # the operation of an error beside which nothing differs


def _first_difference(plan: Plan, trial: PlanTrial) -> Finding | None:
    """The first value of a trial's steps under a plan that one device does not give; None if there is none.

    Each part of a step is compared on what the part before it gave.
    """
    made, views = side_by_side(plan, trial)
    found = None
    for view in views:
        found = placing(view) or forward(view) or reduction(view)
        if found is None and view.ended:
            found = norm(view) or update(view, trial.optimizer)
        if found is not None:
            break
    if made.error is None:
        return found
    if found is None:
        number = max((len(noted) for noted in made.steps.values()), default=1) - 1
        found = Finding("update", _RAISED, number, Difference(float("inf"), 0.0, 0.0))
    said = f"the step then raised {type(made.error).__name__}: {str(made.error).splitlines()[0]}"
    return replace(found, note="; ".join(filter(None, [found.note, said])))


def _judged(
    first: Callable[[bool], Finding | None],
    plans: Mapping[str, Plan],
    over_rows: Callable[[Plan], OverRows],
    notes: tuple[str, ...],
) -> Bisection:
    """What is found, and what it is.

    Args:
        first: ``first(exact)``: the first thing that differs, in float64 or in the plans' own dtypes.
        over_rows: what differs where the loss function is no mean over rows.
    """
    exact = first(True)
    if exact and exact.operation != _RAISED:
        return Bisection(exact, "It differs in float64 too, so it is no rounding.", notes)
    if not all(map(is_float64, plans.values())) and (finding := first(False)):
        return Bisection(
            finding,
            "It does not differ in float64: rounding, or a defect of what float64 passes by (kernels and codecs of narrower "
            "dtypes, masters).",
            notes,
        )
    if exact:
        return Bisection(exact, "Nothing differs before it.", notes)
    found = {name: over_rows(plan) for name, plan in plans.items()}
    notes += tuple(dict.fromkeys(each.note for each in found.values() if each.note))
    for name, each in found.items():
        if each.finding:
            finding = replace(each.finding, plan=name)
            return Bisection(finding, "The ranks compute what one device does on their rows.", notes)
    return Bisection(None, "nothing differs, in float64 and in the plans' own dtypes", notes)
