"""`checkpoint_name`: names for the values of a block, by which `shardlib.remat` keeps some of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardlib.common.environment import environment

# What is done with a value that is named. A block that keeps some of them sets it while it runs, and while it is recomputed.
Named = Callable[[torch.Tensor, str], torch.Tensor]


def checkpoint_name(x: torch.Tensor, name: str) -> torch.Tensor:
    """``x``, under a name by which ``sl.remat(save=[name])`` keeps it instead of computing it again.

    Name the result of an operation that is worth keeping: of a matrix product, or of attention. In blocks that are compiled,
    and outside of recomputed ones, names have no effect.

    >>> block = sl.block(lambda w, x: torch.tanh(sl.nn.checkpoint_name(x @ w, "product")))
    >>> block(torch.eye(2), torch.zeros(2)).tolist()
    [0.0, 0.0]
    """
    if torch.compiler.is_compiling():
        return x
    named: Named | None = environment().names
    return x if named is None else named(x, name)
