"""Steps whose update failed and was taken back, so that the state they were given can still be used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shardlib.optim.train_state import TrainState, require_state


class Undone(Exception):
    """An update that failed on some rank, and was not made, or taken back, on all.

    Attributes:
        error: why, for the caller of the step.
        fits: whether this rank's copies of parameters follow the parameters of the step's state now.
    """

    def __init__(self, error: Exception, fits: bool = False) -> None:
        super().__init__(str(error))
        error.add_note("The state that the step was given is as it was: it can be saved, and used again")
        self.error, self.fits = error, fits


def gives_back(train_step: Callable[[TrainState, Any], Any]) -> Callable[[TrainState, Any], Any]:
    """``train_step``, whose state is its caller's again if its update is undone."""

    @functools.wraps(train_step)
    def step(state: TrainState, batch: Any) -> Any:
        give_back = require_state("a train step", state, batch).keeping()
        try:
            return train_step(state, batch)
        except Undone as undone:
            error, fits = undone.error, undone.fits
        give_back()
        if fits:
            state.fitting()
        raise error

    return step
