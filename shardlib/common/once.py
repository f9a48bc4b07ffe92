"""`once`: decisions that recomputation takes over and never makes again."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardlib.common.environment import environment

# A list of tensors that no gradient passes.
Decision = Callable[[], list[torch.Tensor]]

# How decisions are made. A block that is recomputed sets it while it runs, and while it is recomputed.
Decides = Callable[[Decision], list[torch.Tensor]]


def once(decide: Decision) -> list[torch.Tensor]:
    """What ``decide`` returns, without gradient. Where a block is recomputed, it is what its first run decided.

    In blocks that are compiled, and in checkpoints of a model's own, ``decide`` runs again.
    """
    with torch.no_grad():
        if torch.compiler.is_compiling():
            return decide()
        made: Decides | None = environment().decides
        return decide() if made is None else made(decide)
