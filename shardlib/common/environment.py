"""What is around the code of a function while the library runs it: one immutable value, which all rooms read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Environment:
    """What is around the code of a function; None where there is none of it.

    The executor sets it for the duration of a run, and of a block's recomputation, which may be in a thread of autograd's.

    Attributes:
        mesh: the mesh of collectives that are called with an axis name alone. `launch` and `simulate` set it, too.
        averaged: the axes over which the step takes the mean of the ranks' losses.
        rows: gathers the rows of all ranks; see `shardlib.nn.gather_batch`.
        parts: of the sequence; see `shardlib.execute.sequence.SequenceParts`.
        modules: those that run in tiles; see `shardlib.nn.tiled`.
        tokens: how tokens travel to experts that are dealt out; see `shardlib.collectives.tokens.TokenExchange`.
        blocks: how blocks are called; see `shardlib.nn.blocks.Runner`.
        names: what is done with values that are named; see `shardlib.nn.blocks`.
        decides: how decisions are made that recomputation takes over; see `once`.
        reads: how a sharded tree is read; see `shardlib.sharded.tree`.
        keeper: of the inputs of checkpoints that a model makes itself; see `shardlib.execute.activation_offload`.
        follows: who follows modules by their names; see `shardlib.nn.blocks.Follow`.
        clock: of a measured step; see `Clock`.
        casts: the dtype to which torch's autocast around a step casts; see `shardlib.execute.context`.
        phases, phases_of: of the micro-batch, and what makes them; see `shardlib.execute.phases`.
    """

    mesh: Any = None
    averaged: tuple[str, ...] = ()
    rows: Any = None
    parts: Any = None
    modules: Any = None
    tokens: Any = None
    blocks: Any = None
    names: Any = None
    decides: Any = None
    reads: Any = None
    keeper: Any = None
    follows: Any = None
    clock: Any = None
    casts: Any = None
    phases: Any = None
    phases_of: Any = None


_current: ContextVar[Environment] = ContextVar("environment", default=Environment())  # noqa: B039 (it is frozen)


def environment() -> Environment:
    """What is around the code that runs."""
    return _current.get()


@contextmanager
def within(**changes: Any) -> Iterator[None]:
    """A context with another environment: the current one with these attributes."""
    token = _current.set(replace(_current.get(), **changes))
    try:
        yield
    finally:
        _current.reset(token)


def settle(**changes: Any) -> None:
    """Change the environment of all that this context, a thread's or a process's, goes on to run."""
    _current.set(replace(_current.get(), **changes))


# The clock of a measured step: told where parts of the step begin and end. Outside of measurements there is none.


class Clock(Protocol):
    """What measures the parts of a step, one within another."""

    def span(self, kind: str, name: str) -> AbstractContextManager[None]:
        """A context whose code is a part of the step: of a kind ("optimizer", "offload", "wait"), and which one."""
        ...


_UNTIMED = nullcontext()


def timed(kind: str, name: str = "") -> AbstractContextManager[None]:
    """A context whose code is a part of the step: see `Clock.span`."""
    clock: Clock | None = environment().clock
    return _UNTIMED if clock is None else clock.span(kind, name)


# `once`: decisions that recomputation takes over and never makes again.


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
