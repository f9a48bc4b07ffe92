"""`profile`: where the time of a train step goes."""

from __future__ import annotations

from typing import Any

from shardlib.plan.plan import Plan
from shardlib.report.profile.memory import measure_peak, memory
from shardlib.report.profile.operators import operators_of
from shardlib.report.profile.rates import predicted
from shardlib.report.profile.recording import TrainStep, drawing_as, record, require_steps
from shardlib.report.profile.value import Profile


def profile(
    train_step: TrainStep, state: Any, batch: Any, *, steps: int = 5, warm: int = 2, plan: Plan | None = None
) -> Profile:
    """Where the time and the operations of a train step go, on every rank. Collective.

    Takes ``warm`` steps that are not looked at, then ``steps`` with clocks at the boundaries of blocks, phases and exchanges,
    one in which operators are counted and timed, and one in which memory gets its names. All of them train: the state after
    them is ``.state``. The last two draw by the number of the recorded step of median length, as they are compared with it:
    the same layers and tokens are left out, and the loss is given the same ``rng``. The peak is that of a large product on
    the same device and dtype, measured once.

    Args:
        train_step, state: of `make_train_step`. The state is used up.
        batch: this rank's share of a batch, which every step is given.
        plan: the step's plan as `make_plan` makes it with ``loss_fn``, ``batch`` and ``optimizer``, which knows what is sent
            inside the loss and the peak of memory; by default the state's, which does not.

    Raises:
        TypeError: a state that is no `TrainState`, or a plan that is no `Plan`.
        ValueError: fewer than one step, fewer than none before, or no whole numbers of them; a plan of other parameters, or
            of another mesh, than the state's.

    >>> loss_fn = lambda params, batch: (batch @ params["w"]).square().mean()
    >>> state, train_step = sl.make_train_step(loss_fn, {"w": torch.ones(64, 64)}, sl.optim.sgd(0.1))
    >>> found = sl.profile(train_step, state, torch.ones(32, 64))
    >>> found.flops["forward"] == 2 * 32 * 64 * 64
    True
    >>> round(sum(found.by_kind.values()) / found.seconds, 6)
    1.0
    """
    require_steps("profile", state, steps, warm, plan)
    params = state.params
    peak = measure_peak(params.mesh.device, params.plan.computed_dtype)
    state, recording = record(train_step, state, batch, steps, warm)
    # Steps differ in the layers and tokens that they leave out: what is counted must be what was timed.
    again = drawing_as(train_step, state.step - steps + recording.median)
    state, operators = operators_of(again, state, batch)
    held = memory(again, state, batch, warm=0, plan=plan)
    return Profile(recording, operators, held, peak, predicted(plan or params.plan, recording), held.state)
