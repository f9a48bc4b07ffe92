"""`once`: decisions that recomputation takes over and never makes again."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import torch

# A list of tensors that no gradient passes.
Decision = Callable[[], list[torch.Tensor]]

# How decisions are made. A block that is recomputed sets it while it runs, and while it is recomputed.
deciding: ContextVar[Callable[[Decision], list[torch.Tensor]] | None] = ContextVar("deciding", default=None)


def once(decide: Decision) -> list[torch.Tensor]:
    """What ``decide`` returns, without gradient. Where a block is recomputed, it is what its first run decided.

    In blocks that are compiled, and in checkpoints of a model's own, ``decide`` runs again.
    """
    with torch.no_grad():
        if torch.compiler.is_compiling():
            return decide()
        made = deciding.get()
        return decide() if made is None else made(decide)
