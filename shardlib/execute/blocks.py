"""How the blocks of a function run: with gathered parameters, and recomputed in backward as the plan says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from shardlib.collectives.styles.slices import Slices
from shardlib.common._compat import is_compiled, without_modes
from shardlib.execute.collective_order import Record
from shardlib.execute.context import Surroundings, refuse_scaled
from shardlib.execute.layer_dropping import Layers
from shardlib.execute.recompute import RECOMPUTE_MODES, Draws, checkpointed
from shardlib.execute.slicing import gathered, refuse_slices
from shardlib.execute.tiles import refuse_tiles
from shardlib.execute.zero_bubble import readable_twice
from shardlib.plan.plan import Plan

_log = logging.getLogger("shardlib.execute")


class Blocks:
    """The blocks of one micro-batch.

    Args:
        trained: whether a backward follows.
        surroundings: of the function. They are part of what is recomputed, which may run in a thread of autograd's.
        record: takes the names of values, where the plan keeps some by name.
        slices: of the function's layers, which hold nothing from one block to the next.
        device: the device that the rank computes on.

    Attributes:
        layers: the blocks that a step may leave out.
        count: how many blocks have begun, recomputed or not; those within blocks are not counted.
    """

    count: int

    def __init__(
        self,
        plan: Plan,
        trained: bool,
        surroundings: Surroundings,
        record: Record,
        slices: Slices,
        device: torch.device,
    ) -> None:
        self._how, self._trained, self._surroundings, self._record = plan.step.remat, trained, surroundings, record
        self._slices = slices
        self._draws = Draws(device)
        self.layers: Layers = Layers(plan, device)
        self._refuses = (
            bool(plan.styles) or surroundings.scaled is not None or any(bucket.tiles > 1 for bucket in plan.buckets)
        )
        self._splits = trained and plan.stages.schedule.splits
        self._around: bool | None = (
            None  # whether the block around the present code is recomputed; None outside of blocks
        )
        self.count = 0

    def begin(self) -> None:
        """Begin a micro-batch."""
        self.count, self._around = 0, None

    def tell_of_none(self) -> None:
        """Log that nothing is recomputed, where the plan says so of blocks and the function has had none."""
        if self._how is not None and (told := self._how.without_blocks(self.count)):
            _log.warning(told)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of a block."""
        run = self.layers.run if self._around is None else self.layers.run_within
        return run(fn, args, kwargs, self._run)

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recomputes = self._recomputes()

        def call(*args: Any, **kwargs: Any) -> Any:
            # Gathering does not belong to the block: a recompute policy must neither see nor keep its operations.
            with without_modes(RECOMPUTE_MODES):
                args, kwargs = gathered((args, kwargs))
            if self._refuses and is_compiled(fn):
                refuse_slices((args, kwargs))
                refuse_tiles((args, kwargs))
                refuse_scaled(self._surroundings.scaled, (args, kwargs))
            with self._within(recomputes):
                return fn(*args, **kwargs)

        if self._how is None or not recomputes:
            return call(*args, **kwargs)

        def surrounded(*args: Any, **kwargs: Any) -> Any:
            with self._surroundings.installed(casts=False), readable_twice() if self._splits else nullcontext():
                return call(*args, **kwargs)

        names, updates = self._record.names, self._record.updates
        return checkpointed(surrounded, args, kwargs, self._how, names, self._draws, updates)

    def _recomputes(self) -> bool:
        """Whether the block that begins now is recomputed in backward; one within another is if the other is."""
        if self._around is not None:
            return self._around
        self.count += 1
        if not self._trained or self._how is None:
            return False
        return self._how.covers(self.count - 1)

    @contextmanager
    def _within(self, recomputed: bool) -> Iterator[None]:
        before, self._around = self._around, recomputed
        try:
            yield
        finally:
            self._around = before
            if before is None:  # layers of blocks within a block may read one input
                self._slices.let_go()
