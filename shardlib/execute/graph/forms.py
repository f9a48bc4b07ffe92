"""The graphs of a function, one for each form of its inputs; and what ranks agree on about them."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from shardlib.collectives import primitives
from shardlib.common.originals import CopiedModule, called_in
from shardlib.errors import BatchError, HandleError, IllegalComposition, RankMismatch
from shardlib.execute.stages.base import Call
from shardlib.mesh.mesh import Mesh
from shardlib.tree import Tree, flatten

T = TypeVar("T")
_log = logging.getLogger("shardlib.execute")
MOST = 8  # forms of inputs, each of which takes a trace
_HERE = Path(__file__).parents[2]  # the library
_TORCH = Path(torch.__file__).parent


class Graphs(Generic[T]):
    """The graphs of a function.

    Args:
        order_of: the exchanges of a graph, in order.

    Attributes:
        order: that of the first graph; None before.
    """

    def __init__(self, order_of: Callable[[T], list[Any]]) -> None:
        self._order_of = order_of
        self._made: dict[Any, tuple[T, float]] = {}  # and how long it took
        self._modules: set[CopiedModule] = set()  # of which copies are called in the graphs
        self._tokens: tuple[int | None, ...] = ()
        self.order: list[Any] | None = None

    def named(self) -> Iterator[tuple[str, T]]:
        """The graphs so far, each with a name."""
        for number, (made, seconds) in enumerate(self._made.values(), 1):
            yield f"form {number}, compiled in {seconds:.2f} s", made

    def begin(self, tokens: tuple[int | None, ...]) -> None:
        """Begin a step: a graph has the modules as they were, and as many tokens in each layer. Those of other numbers of
        tokens are dropped, so that a schedule may have many."""
        if tokens != self._tokens or any(module.differs() for module in self._modules):
            self._tokens = tokens
            self._made.clear()
            self._modules.clear()

    def of(self, form: Callable[[], Any], trace: Callable[[], T]) -> T:
        """The graph for inputs of a form, which is traced if it is a new one."""
        now = form()
        if now not in self._made:
            if len(self._made) >= MOST:
                raise BatchError(
                    f"compile=True: the {MOST + 1}th form of the loss's inputs, each of which takes a trace of its own. "
                    f"{_changing(now, self._made)}"
                )
            start = time.perf_counter()
            made, modules = called_in(trace)
            order = self._order_of(made)
            if self.order is None:
                self.order = order
            elif order != self.order:
                raise HandleError(
                    "compile=True: with a batch of another form the loss exchanges in another order than at first, and ranks "
                    "whose batches differ would wait for each other. Let the order of layers not depend on the batch's sizes"
                )
            now = form()  # after the trace: a count of the loss's own calls goes on in it
            self._made[now] = made, time.perf_counter() - start
            self._modules.update(modules)
        return self._made[now][0]


class Trial:
    """The first step, which runs without graphs, and whether later ones have them.

    Attributes:
        passed: whether they can be traced, as far as is known.
        ended: whether the first step is over.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self.passed, self.ended = mesh, True, False
        self._first: Sequence[Tree] = ()  # the micro-batches of the first step, which may be taken again

    def without_graphs(self, call: Call) -> bool:
        """Whether a step runs without graphs."""
        if self.passed and self.ended and self._first is not call.microbatches:
            self._first = ()
            return False
        return True

    def end(self, call: Call, trace: Callable[[], Any], alike: Any = None) -> None:
        """End a step that ran without graphs: the first one is traced. Collective. Arguments as in `agreed`."""
        if not self.ended:
            self.ended, self._first, self.passed = True, call.microbatches, agreed(self._mesh, trace, alike)


def form_of(tree: Tree) -> tuple[Any, ...]:
    """What a graph depends on of an input: its structure, the form of tensors, and all other leaves."""
    paths, leaves, treedef = flatten(tree)
    forms = [
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    ]
    return treedef, tuple(zip(paths, forms, strict=True))


def agreed(mesh: Mesh, trace: Callable[[], Any], alike: Any = None) -> bool:
    """Whether all ranks have graphs of the same exchanges; if one cannot trace, none has. Collective.

    Args:
        trace: makes this rank's first graphs; returns the exchanges of them, in order.
        alike: ranks with an equal one exchange with each other.

    Raises:
        RankMismatch: ranks that exchange in other orders.
    """
    why, order = "", None
    try:
        order = trace()
    except Exception as error:
        why = str(error) if isinstance(error, IllegalComposition) else _told(error)
    told = primitives.all_gather_object(mesh, list(mesh.shape), (why, alike, order))
    if not any(text for text, _, _ in told):
        if any(other != order for _, theirs, other in told if theirs == alike):
            raise RankMismatch(
                "compile=True: the ranks' graphs exchange in different orders. Let the loss function run the same layers "
                "on every rank, or leave out compile=True"
            )
        return True
    rank, text = next((rank, text) for rank, (text, _, _) in enumerate(told) if text)
    if mesh.rank == 0:
        _log.warning(
            "compile=True: the loss function cannot be traced, and steps run as without it (rank %d: %s)", rank, text
        )
    return False


def _changing(form: Any, known: Collection[Any]) -> str:
    """What differs between a form and the last known one, and a remedy."""
    ((_, leaves), *_, closed), ((_, before), *_, closed_before) = form, list(known)[-1]
    if changed := [name for name, value in closed if dict(closed_before).get(name) != value]:
        return (
            f"{', '.join(changed)} changes, which the loss function reads and is not given: put torch.tensor(value) into the "
            "batch, which is an input"
        )
    old = dict(before)
    others = [(path, now) for path, now in leaves if old.get(path) != now]
    numbers = [path for path, now in others if isinstance(now, str)]
    if numbers:
        return (
            f"{', '.join(numbers)} of the batch changes and is no tensor: pass torch.tensor(value), which is an input"
        )
    return f"{', '.join(path or 'the batch' for path, _ in others)} changes in shape: pad batches to a few lengths"


def _told(error: Exception) -> str:
    """An error of a trace, with the line of the user's that raised it, or else the last one, and a remedy."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not Path(frame.filename).is_relative_to(_TORCH) and not frame.filename.startswith("<")
    ]
    users = [frame for frame in own if _HERE not in Path(frame.filename).parents] or own or list(frames)
    line, last = str(error).strip().partition("\n")[0], users[-1]
    return (
        f"{type(error).__name__}: {line}, at {last.filename}:{last.lineno} ({last.line}). Let the loss compute with tensors "
        "alone: torch.where in place of if, and no .item()"
    )
