"""`with_rollback`: a train step that goes back to the last checkpoint when steps are not finite."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from typing import Any

from shardlib.checkpoint.manager import Manager
from shardlib.collectives import primitives
from shardlib.errors import NonFiniteError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.optim.train_state import Metrics, TrainState, TrainStep
from shardlib.tree import T

_log = logging.getLogger("shardlib.checkpoint")


def with_rollback(
    train_step: TrainStep[T],
    manager: Manager,
    rollback: int = 1,
    *,
    limit: int = 3,
    ids: Callable[[Any], Iterable[Any]] | None = None,
) -> TrainStep[T]:
    """``train_step`` that returns the state of the last checkpoint when steps are not finite, and goes on with later data::

        state, train_step = sl.make_train_step(loss_fn, params, optimizer, nonfinite="skip")
        with sl.checkpoint.Manager("run", every=100) as manager:
            train_step = sl.checkpoint.with_rollback(train_step, manager, rollback=3, ids=lambda batch: batch["id"])
            for batch in batches:
                state, metrics = train_step(state, batch)
                manager.step(state, notes=batches.state_dict())

    A step that is not finite is skipped, as ``nonfinite="skip"`` does. After ``rollback`` of them in a row the parameters are
    taken to be damaged, and the next state is that of the last checkpoint. The batches must come one after another, as from
    `shardlib.data.loader`: those that were trained on since the checkpoint are not repeated, and the batches that were not
    finite are left out. The first call saves a checkpoint where there is none. `Manager.step` then saves the state again,
    with the new position of the data, so that a run that is interrupted leaves the same batches out.

    Every roll-back is logged, and written as a line of JSON to ``rollbacks.jsonl`` in the manager's folder: ``step`` that
    was reached, ``back_to``, ``not_finite`` with the steps and the ids of their batches, over all ranks.

    Args:
        train_step: from `shardlib.make_train_step` with ``nonfinite="skip"`` (the default under dynamic loss scaling, which
            skips a step now and then, so that ``rollback`` should be 10 or more).
        rollback: steps in a row that are not finite after which the state goes back.
        limit: roll-backs to the same checkpoint, after which the next raises.
        ids: from this rank's batch to what identifies its rows, for the log. Values that JSON can hold, or a tensor or array
            of numbers.

    Raises:
        ValueError: ``rollback`` or ``limit`` is below 1.
        NonFiniteError: raised by the step: after ``limit`` roll-backs to one checkpoint, the run is no further.

    >>> loss_fn = lambda params, batch: (params["w"] * batch).sum()
    >>> state, train_step = sl.make_train_step(loss_fn, {"w": torch.ones(2)}, sl.optim.sgd(0.1), nonfinite="skip")
    >>> with sl.checkpoint.Manager("run", every=2) as manager:
    ...     train_step = sl.checkpoint.with_rollback(train_step, manager)
    ...     for x in (1.0, 2.0, 3.0, float("nan"), 5.0):
    ...         state, metrics = train_step(state, torch.full((2,), x))
    ...         manager.step(state)
    >>> state.step  # after step 3, the batch of NaN took it back to step 2
    3
    """
    if rollback < 1 or limit < 1:
        raise ValueError(f"with_rollback: rollback={rollback} and limit={limit}, but both are at least 1")
    return _Guarded(train_step, manager, rollback, limit, ids)


class _Guarded:
    """The step that `with_rollback` makes, with its arguments."""

    def __init__(
        self,
        train_step: TrainStep,
        manager: Manager,
        rollback: int,
        limit: int,
        ids: Callable[[Any], Iterable[Any]] | None,
    ) -> None:
        self._train_step, self._manager, self._ids = train_step, manager, ids
        self.graph = train_step.graph
        self._rollback, self._limit = rollback, limit
        self._started = False
        self._bad: list[dict[str, Any]] = []  # the steps in a row, up to the last one, that were not finite
        self._to: int | None = None  # the step of the checkpoint of the last roll-back
        self._reasons: list[str] = []  # of the roll-backs to it

    def __call__(self, state: TrainState, batch: Any, /) -> tuple[TrainState, Metrics]:
        mesh = state.params.mesh
        if not self._started:
            if _gathered(mesh, self._manager.latest() is None)[0]:
                self._manager.save(state)
            self._started = True
        state, metrics = self._train_step(state, batch)
        if metrics["finite"]:
            self._bad = []
            return state, metrics
        self._bad.append({"step": state.step, "ids": self._ids_of(batch, mesh)})
        if len(self._bad) >= self._rollback:
            state = self._back(state)
        return state, metrics

    def _back(self, state: TrainState) -> TrainState:
        reached, bad = state.step, self._bad
        state = self._manager.restore(state)
        if state.step != self._to:
            self._to, self._reasons = state.step, []
        steps = ", ".join(str(each["step"]) for each in bad)
        rows = ", ".join(str(one) for each in bad for one in each["ids"])
        self._reasons.append(
            f"not finite in step {steps}{f' (ids {rows})' if rows else ''}, so back to step {state.step}"
        )
        if len(self._reasons) > self._limit:
            raise NonFiniteError(
                f"{self._limit} roll-backs to step {state.step} have not helped:\n{listing(self._reasons)}\nLower the "
                "learning rate, clip gradients, look at the batches named, or go on from an older checkpoint"
            )
        if state.params.mesh.rank == 0:
            _log.warning("%s", self._reasons[-1])
            line = {"step": reached, "back_to": state.step, "not_finite": bad}
            with open(self._manager.folder / "rollbacks.jsonl", "a") as file:
                file.write(f"{json.dumps(line)}\n")
        self._bad = []
        return state

    def _ids_of(self, batch: Any, mesh: Mesh) -> list[Any]:
        """The ids of a batch's rows over all ranks, each once, in the order of the ranks."""
        if self._ids is None:
            return []
        ids = self._ids(batch)
        mine = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        return list(dict.fromkeys(one for rank in _gathered(mesh, mine) for one in rank))


def _gathered(mesh: Mesh, value: Any) -> list[Any]:
    return primitives.all_gather_object(mesh, list(mesh.shape), value)
