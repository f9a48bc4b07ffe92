"""A plan beside one device, step by step and part by part: the first thing that differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from shardlib.debug.difference import Difference
from shardlib.debug.finding import Finding
from shardlib.debug.forward import forward
from shardlib.debug.one_device import OneDevice
from shardlib.debug.placing import placing
from shardlib.debug.reduction import reduction
from shardlib.debug.replay import PlanTrial, Replay, cells, replay
from shardlib.debug.update import norm, update
from shardlib.debug.view import StepView
from shardlib.errors import IllegalComposition, ShardlibError
from shardlib.execute.batches import as_tensors, cast
from shardlib.plan.build import with_owner
from shardlib.plan.plan import Plan
from shardlib.tree import tree_map

RAISED = "what the step raised"  # the operation of an error beside which nothing differs


def first_difference(plan: Plan, trial: PlanTrial) -> Finding | None:
    """The first value of a trial's steps under a plan that one device does not give; None if there is none.

    Each part of a step is compared on what the part before it gave.

    Raises:
        IllegalComposition: a plan that is not to train like one device.
        BatchError: a batch that does not divide.
        NonFiniteError: the loss or its gradient is not finite on one device.
        ShardlibError: what the library refuses on one device too.
    """
    made, views = side_by_side(plan, trial)
    for view in views:
        found = placing(view) or forward(view) or reduction(view)
        if found is None and view.ended:
            found = norm(view) or update(view, trial.optimizer)
        if found is not None:
            return _with_error(found, made.error)
    if made.error is not None:
        number = max((len(noted) for noted in made.steps.values()), default=1) - 1
        why = Difference(float("inf"), 0.0, 0.0)
        return _with_error(Finding("update", RAISED, number, why), made.error)
    return None


def side_by_side(plan: Plan, trial: PlanTrial) -> tuple[Replay, Iterator[StepView]]:
    """A replay of a trial under a plan, and its steps beside one device, which takes each step in `update`.

    Raises what `first_difference` raises.
    """
    if plan.step.update == "delay":
        raise IllegalComposition(
            "offload(delay=True) applies the gradients of the step before, so that it trains as no other plan does; compare "
            "the plan without delay"
        )
    whole = tree_map(lambda leaf: cast(leaf, plan), as_tensors(trial.batch, torch.device("cpu")))
    microbatches = cells(whole, plan)
    made = replay(plan, replace(trial, batch=whole))
    made.plan = with_owner(plan, trial.optimizer)
    if isinstance(made.error, ShardlibError) and not any(made.steps.values()):
        raise made.error
    device = OneDevice(plan, trial.loss_fn, trial.params, trial.optimizer, trial.rng)

    def views() -> Iterator[StepView]:
        for number in range(max(map(len, made.steps.values()), default=0)):
            evaluated = [device.evaluate(number, cell, part) for cell, part in enumerate(microbatches)]
            view = StepView(number, made, device, microbatches, evaluated)
            view.require_finite()
            yield view
            if made.plan.reductions.owner is not None:
                break  # its update is not that of one device

    return made, views()


def _with_error(found: Finding, error: Exception | None) -> Finding:
    if error is None:
        return found
    said = f"the step then raised {type(error).__name__}: {str(error).splitlines()[0]}"
    return replace(found, note="; ".join(filter(None, [found.note, said])))
