"""The graphs of a function, one for each form of its inputs; and what ranks agree on about them."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from shardlib.collectives import primitives
from shardlib.common.originals import CopiedModule, called_in
from shardlib.errors import HandleError, IllegalComposition, RankMismatch
from shardlib.execute.graph.recorder import InputLayout, Lengths
from shardlib.execute.stages.one import StepInputs
from shardlib.mesh.mesh import Mesh
from shardlib.tree import Tree, flatten

T = TypeVar("T")
_log = logging.getLogger("shardlib.execute")
MOST = 8  # graphs at a time
_HERE = Path(__file__).parents[2]  # the library
_TORCH = Path(torch.__file__).parent


@dataclass
class _MadeGraph(Generic[T]):
    """A graph, how long it took, and what it is for: batches of a form, which have lengths that fit."""

    number: int
    graph: T
    seconds: float
    form: Any
    lengths: Lengths


class Graphs(Generic[T]):
    """The graphs of a function. The first one is for inputs of the sizes that it was traced with; where sizes or strides have
    changed since, they are symbols of the next ones.

    Args:
        order_of: the exchanges of a graph, in order.
        symbolic: whether there are symbols, and not a graph for all sizes that there are.

    Attributes:
        order: that of the first graph; None before.
        failed: the error of the last trace that failed.
    """

    failed: Exception | None

    def __init__(self, order_of: Callable[[T], list[Any]], symbolic: bool) -> None:
        self._order_of, self._symbolic = order_of, symbolic
        self._made: list[_MadeGraph[T]] = []  # the one that was used last is the last
        self._known: list[tuple[InputLayout, ...]] = []  # of inputs that were traced
        self._fixed: list[Any] = []  # paths of inputs that cannot be traced with symbols
        self._modules: set[CopiedModule] = set()  # of which copies are called in the graphs
        self._tokens: tuple[int | None, ...] = ()
        self._count, self._told = 0, False
        self.order: list[Any] | None = None
        self.failed = None

    def named(self) -> Iterator[tuple[str, T]]:
        """The graphs that there are, each with a name."""
        for made in sorted(self._made, key=lambda made: made.number):
            what = f"form {made.number}{', of any length' * made.lengths.vary}"
            yield f"{what}, compiled in {made.seconds:.2f} s", made.graph

    def begin(self, tokens: tuple[int | None, ...]) -> None:
        """Begin a step: a graph has the modules as they were, and as many tokens in each layer. Those of other numbers of
        tokens are dropped, so that a schedule may have many."""
        if tokens != self._tokens or any(module.differs() for module in self._modules):
            self._tokens = tokens
            self._made.clear()
            self._modules.clear()

    def of(self, form: Callable[[], tuple[Any, ...]], trace: Callable[[Lengths], T]) -> tuple[T, Mapping[Any, Any]]:
        """The graph for inputs, and what its symbols are. It is traced if there is none.

        Args:
            form: gives the `form_of` the inputs, and what else a graph depends on.
        """
        (kinds, layouts), *rest = form()
        for place, made in enumerate(reversed(self._made), 1):
            if made.form == (kinds, *rest) and (values := made.lengths.values(layouts)) is not None:
                self._made.append(self._made.pop(-place))
                return made.graph, values
        if len(self._made) >= MOST:
            self._drop((kinds, *rest), layouts)
        start = time.perf_counter()
        try:
            lengths, (graph, modules) = self._traced(layouts, trace)
        except Exception as error:
            self.failed = error
            raise
        order = self._order_of(graph)
        if self.order is None:
            self.order = order
        elif order != self.order:
            raise HandleError(
                "compile=True: a batch of another form exchanges in another order. Keep the order of layers"
            )
        self._count += 1
        self._made.append(_MadeGraph(self._count, graph, time.perf_counter() - start, (kinds, *rest), lengths))
        self._modules.update(modules)
        values = lengths.values(layouts)
        assert values is not None
        return graph, values

    def _traced(
        self, layouts: tuple[InputLayout, ...], trace: Callable[[Lengths], T]
    ) -> tuple[Lengths, tuple[T, Collection[CopiedModule]]]:
        """A graph for inputs with these layouts, with symbols if it can have them, and the modules in it."""
        paths = _paths(layouts)
        alike = [each for each in self._known if _paths(each) == paths]
        self._known = [*self._known, layouts][-MOST:]
        if self._symbolic and paths not in self._fixed:
            lengths = Lengths([*alike, layouts])
            try:
                return lengths, called_in(lambda: trace(lengths))
            except Exception:
                if not lengths.vary:
                    raise
                self._fixed.append(paths)  # an operation, or code of the loss, takes plain numbers alone
        lengths = Lengths([layouts])
        return lengths, called_in(lambda: trace(lengths))

    def _drop(self, form: Any, layouts: tuple[InputLayout, ...]) -> None:
        """Drop the graph that was used longest ago."""
        if not self._told:
            self._told = True
            last = self._made[-1]
            _log.warning(
                "compile=True: the %dth form of the loss's inputs, each of which takes a trace of its own, as may happen in "
                "many of the next steps. %s",
                MOST + 1,
                _changing(form, layouts, last.form, self._known[-1]),
            )
        del self._made[0]


def _paths(layouts: Sequence[InputLayout]) -> list[tuple[str, int]]:
    return [(layout.path, len(layout.sizes)) for layout in layouts]


class Trial:
    """The first step, which runs without graphs, and whether later ones have them.

    Attributes:
        passed: whether they can be traced, as far as is known.
        ended: whether the first step is over.
    """

    passed: bool
    ended: bool

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self.passed, self.ended = mesh, True, False
        self._first: Sequence[Tree] = ()  # the micro-batches of the first step, which may be taken again

    def without_graphs(self, call: StepInputs) -> bool:
        """Whether a step runs without graphs."""
        if self.passed and self.ended and self._first is not call.microbatches:
            self._first = ()
            return False
        return True

    def end(self, call: StepInputs, trace: Callable[[], Any], alike: Any = None) -> None:
        """End a step that ran without graphs: the first one is traced, and if one rank cannot trace it, none has. Collective.

        Args:
            trace: makes this rank's first graphs; returns the exchanges of them, in order.
            alike: ranks with an equal one exchange with each other.

        Raises:
            RankMismatch: ranks that exchange in other orders.
        """
        if self.ended:
            return
        why, order, mesh = "", None, self._mesh
        self.ended, self._first = True, call.microbatches
        try:
            order = trace()
        except Exception as error:
            why = told(error)
        everyone = primitives.all_gather_object(mesh, list(mesh.shape), (why, alike, order))
        failed = [(rank, text) for rank, (text, _, _) in enumerate(everyone) if text]
        self.passed = not failed
        if failed and mesh.rank == 0:
            _log.warning(
                "compile=True: the loss function cannot be traced, and steps run as without it (rank %d: %s)",
                *failed[0],
            )
        if not failed and any(other != order for _, theirs, other in everyone if theirs == alike):
            raise RankMismatch(
                "compile=True: the ranks exchange in different orders. Run the same layers on every rank"
            )

    def stop(self, error: Exception) -> None:
        """Run later steps without graphs, after a batch of another form than the first that could not be traced."""
        self.passed = False
        _log.warning(
            "compile=True: the loss function cannot be traced for a batch of another form, and steps run as without it (%s)",
            told(error),
        )


def form_of(*trees: Tree) -> tuple[tuple[Any, ...], tuple[InputLayout, ...]]:
    """What a graph depends on of inputs: their structure, what tensors are and all other leaves; and the tensors' layouts."""
    kinds: list[Any] = []
    layouts: list[InputLayout] = []
    for tree in trees:
        paths, leaves, treedef = flatten(tree)
        kinds.append(treedef)
        for path, leaf in zip(paths, leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                kinds.append((path, (leaf.dim(), leaf.dtype, leaf.requires_grad, leaf.is_conj(), leaf.is_neg())))
                layouts.append(InputLayout(path, tuple(leaf.shape), leaf.stride()))
            else:
                kinds.append((path, repr(leaf)))
    return tuple(kinds), tuple(layouts)


def _changing(form: Any, layouts: Sequence[InputLayout], old: Any, old_layouts: Sequence[InputLayout]) -> str:
    """What differs between inputs and the last known ones, and a remedy."""
    (kinds, *_, closed), (before, *_, closed_before) = form, old
    if changed := sorted({name for name, _ in {*closed} ^ {*closed_before}}):
        return (
            f"{', '.join(changed)} changes, which the loss function reads and is not given: put torch.tensor(value) into the "
            "batch"
        )
    numbers = [each[0] for each in kinds if isinstance(each, tuple) and isinstance(each[1], str) and each not in before]
    if numbers:
        return f"{', '.join(numbers)} of the batch changes and is no tensor: pass torch.tensor(value)"
    others = [layout.path for layout in layouts if layout not in old_layouts]
    return (
        f"{', '.join(path or 'the batch' for path in others)} changes in shape, and these shapes cannot share a graph: "
        "pad batches to a few lengths"
    )


def told(error: Exception) -> str:
    """An error of a trace, with the line of the user's that raised it, or else the last one, and a remedy."""
    if isinstance(error, IllegalComposition):
        return str(error)
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
