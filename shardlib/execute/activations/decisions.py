"""Decisions of blocks (`shardlib.common.once`), which are kept from a block's first run for its recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardlib.common._compat import TorchDispatchMode, without_modes
from shardlib.common.environment import environment, within
from shardlib.common.once import Decision


def decided_once(fn: Callable[..., Any], hidden_from: tuple[type[TorchDispatchMode], ...]) -> Callable[..., Any]:
    """``fn``, of which every call after the first takes over what the first one decided, in order.

    Args:
        hidden_from: dispatch modes that do not see how a decision is made: they count operations, and recomputation runs
            none of these.
    """
    kept: list[list[torch.Tensor]] = []
    runs = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal runs
        runs += 1
        decides, number = runs == 1, 0
        around = environment().decides  # of a block that this one lies in, which may be in its recomputation

        def made(decide: Decision) -> list[torch.Tensor]:
            nonlocal number
            if decides:
                with without_modes(hidden_from):
                    kept.append(decide() if around is None else around(decide))
            number += 1
            return kept[number - 1]

        with within(decides=made):
            return fn(*args, **kwargs)

    return call
