"""`block`, the one optional marker in a model, and `sequential`, a loss made of blocks.

A block is the unit that is gathered, recomputed and compiled. Outside a train step it is a plain call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

Runner = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

# Set by the executor for the duration of a loss; it decides how a block is called.
block_runner: ContextVar[Runner | None] = ContextVar("block_runner", default=None)


def block(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Mark ``fn`` as a block: ``fn(params, *inputs) -> outputs`` over pytrees of tensors.

    Under `remat` a block's activations are recomputed in backward; under ZeRO-3 its parameters are gathered
    once, before it runs, and reach it as plain tensors, so ``sl.block(torch.compile(fn))`` compiles.
    """

    @functools.wraps(fn)
    def marked(*args: Any, **kwargs: Any) -> Any:
        runner = block_runner.get()
        return fn(*args, **kwargs) if runner is None else runner(fn, args, kwargs)

    return marked


def sequential(blocks: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """A loss function from blocks ``fn(params_i, carry, batch) -> carry``; the last returns the loss.

    The result is ``loss_fn(params, batch)`` over a list of parameter trees, one per block. The first block's
    carry is None; a carry is any pytree (skips, auxiliary losses).

    Raises:
        ValueError: when called with another number of parameter trees than blocks.
    """
    marked = [block(fn) for fn in blocks]

    def loss_fn(params: Sequence[Any], batch: Any) -> Any:
        if len(params) != len(marked):
            raise ValueError(f"sequential has {len(marked)} blocks and got {len(params)} parameter trees")
        carry = None
        for fn, params_i in zip(marked, params, strict=True):
            carry = fn(params_i, carry, batch)
        return carry

    return loss_fn
