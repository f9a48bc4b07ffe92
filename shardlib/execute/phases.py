"""The phases of a micro-batch, for traces and profiles: which block runs, forward or backward, and the work that is done."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from shardlib.common._compat import graph_task, watch_checkpoints
from shardlib.common.environment import environment, within
from shardlib.execute.handles import Handle
from shardlib.nn.blocks import Runner
from shardlib.tree import leaves_of


class Phase(NamedTuple):
    """A part of a micro-batch, such as "backward of block 3".

    Attributes:
        place: "of", "of what precedes" or "of what follows" a block; "" where there is no block.
        block: its number, from 1.
    """

    backward: bool = False
    place: str = ""
    block: int = 0

    def __str__(self) -> str:
        way = "backward" if self.backward else "forward"
        return f"{way} {self.place} block {self.block}" if self.place else way


class Phases:
    """The phase of a micro-batch that runs now.

    Args:
        first: the number of the stage's first block among all blocks.

    Attributes:
        recomputing: whether a checkpoint computes again what it did not keep.
    """

    recomputing: bool

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self.begin()

    @contextmanager
    def running(self, backward: bool) -> Iterator[None]:
        """A context in which the function runs, or its backward."""
        with within(phases=self):
            yield

    def turned(self) -> None:
        """Called when another phase has begun, for a clock."""

    def meets(self, number: int, args: tuple[Any, ...]) -> None:
        """Called when a block begins, with its arguments, for names."""

    def knows(self, leaves: Mapping[str, torch.Tensor]) -> None:
        """Called before the function, with what stands for each parameter by its path, for names."""

    def begin(self) -> None:
        """Begin a micro-batch."""
        self._number, self._inside, self._begun, self.recomputing = self._first, False, False, False
        self._late = False  # whether the second half of a backward runs, between autograd's runs too
        self._forward, self._backward = Phase(False), Phase(True)
        self._values: dict[int, weakref.ref[torch.Tensor]] = {}  # by identity: see `_meet`

    @property
    def now(self) -> Phase:
        """The phase that runs."""
        return self.at(self._late or graph_task() != -1)

    def at(self, backward: bool) -> Phase:
        """The phase at which forward is, or backward."""
        return self._backward if backward else self._forward

    @property
    def blocks(self) -> int:
        """How many blocks have begun in the micro-batch; those within blocks are not counted."""
        return self._number - self._first

    def around(self, runner: Runner | None) -> Runner:
        """A runner of blocks that notes which block runs; ``runner`` then runs it."""

        def run(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._inside or graph_task() != -1:  # a block within a block, or one that is recomputed
                return runner(fn, args, kwargs) if runner else fn(*args, **kwargs)
            self._number += 1
            number, held, given = self._number, leaves_of(args[:1]), leaves_of((args[1:], kwargs))
            # Its backward ends where the gradients of what it was given are there; if a block has returned that, its
            # backward begins there. What several blocks are given is the first one's: its gradient is there last.
            before = (
                Phase(True, "of what follows", number - 1) if self._begun else Phase(True, "of what precedes", number)
            )
            self._begun = True
            self._at_gradient([leaf for leaf in given if not self._met(leaf)], before)
            self._meet(given)
            self._inside, self._forward = True, Phase(False, "of", number)
            self.meets(number, args)
            self.turned()
            try:
                result = runner(fn, args, kwargs) if runner else fn(*args, **kwargs)
            finally:
                self._inside = False
            returned = leaves_of(result)
            self._forward = Phase(False, "of what follows", number)
            self._backward = self._forward._replace(backward=True)
            self.turned()
            self._at_gradient(made_of(returned, [*held, *given]), Phase(True, "of", number))
            self._meet(returned)
            return result

        return run

    def _meet(self, leaves: Sequence[Any]) -> None:
        """Remember values whose gradients begin a phase."""
        self._values |= {id(leaf): weakref.ref(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}

    def _met(self, leaf: Any) -> bool:
        found = self._values.get(id(leaf))
        return found is not None and found() is leaf

    def _at_gradient(self, leaves: Sequence[Any], phase: Phase) -> None:
        """Begin a phase of backward when the gradient of one of ``leaves`` has been computed."""

        def begin(gradient: torch.Tensor) -> None:
            if self._backward != phase:
                self._backward = phase
                self.turned()

        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Handle) and leaf.grad_fn is not None:
                leaf.register_hook(begin)

    @contextmanager
    def late(self, phase: Phase) -> Iterator[None]:
        """A context in which the second half of a backward computes what the first one has left in a phase."""
        self._late, self._backward = True, phase
        self.turned()
        try:
            yield
        finally:
            self._late = False

    def again(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, by which a checkpoint computes again."""

        def computed(*args: Any, **kwargs: Any) -> Any:
            before, self.recomputing = self.recomputing, True
            self.turned()
            try:
                return fn(*args, **kwargs)
            finally:
                self.recomputing = before
                self.turned()

        return computed


def made_of(returned: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """The leaves that are returned, but for those that were given and are handed on: their gradients are there when the
    backward of what made them begins."""
    handed_on = set(map(id, given))
    return [leaf for leaf in returned if id(leaf) not in handed_on]


@contextmanager
def followed(make: Callable[[Any], Phases]) -> Iterator[None]:
    """A context in which the phases of each micro-batch are noted: ``make(executor)`` returns those of one."""
    with within(phases_of=make):
        yield


def _noted(fn: Callable[..., Any], args: Sequence[Any], _: bool) -> tuple[Callable[..., Any], Sequence[Any]]:
    phases: Phases | None = environment().phases
    return (fn if phases is None else phases.again(fn)), args


watch_checkpoints(_noted)
