"""A look at whether a loss function computes the same when it is called again, as a graph of it would.

What it takes from no tensor is a constant of a graph: Python's and NumPy's random numbers, and a count of its own calls.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
from torch.fx import Node

from shardlib.errors import IllegalComposition
from shardlib.execute.graph.recorder import Recorder


class CallsDiffer(IllegalComposition):
    """A function computed something else when it was called again."""


@contextmanager
def without_random_numbers() -> Iterator[None]:
    """A context for a trace.

    Raises:
        IllegalComposition: the code in it draws from the global generators of Python or NumPy.
    """
    python, of_numpy = _states()
    yield
    now, of_numpy_now = _states()
    if now != python:
        raise IllegalComposition(_drawn("Python's random", "random.random()"))
    if of_numpy_now != of_numpy:
        raise IllegalComposition(_drawn("numpy.random", "numpy.random.rand()"))


def _states() -> tuple[Any, Any]:
    """The states of the global generators of Python and of NumPy."""
    words = numpy.random.get_state(legacy=False)["state"]
    return random.getstate(), (words["key"].tobytes(), words["pos"])


def _drawn(name: str, call: str) -> str:
    return (
        f"the loss function draws numbers by {name}, which a graph would draw once for all steps. Draw them outside of the "
        f"loss and put them into the batch as a tensor, torch.tensor({call})"
    )


class Repeated(Recorder):
    """A recorder of a function's second call, which refuses what differs from the first.

    Args:
        first: of the first call, and of what follows on it.
        last: the first call's last operation.

    Raises:
        CallsDiffer: names the first operation that differs.
    """

    def __init__(self, first: Recorder, last: Node) -> None:
        super().__init__(first.fakes)
        self._first = first
        nodes = list(first.graph.nodes)
        self._nodes = iter(nodes[: nodes.index(last) + 1])

    def _node(self, op: str, target: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Node:
        before = next(self._nodes, None)
        if before is None or before.target != target or not _same([before.args, before.kwargs], [args, kwargs or {}]):
            raise _other(_told(before), f"{target}({', '.join(map(str, args))})")
        return before

    def end(self) -> None:
        """Refuse a call that ended before the first one, or that read other constants."""
        if (before := next(self._nodes, None)) is not None:
            raise _other(_told(before), "nothing")
        for name, now in self.constants.items():
            known = self._first.constants[name]
            if known is not now and not (known.shape == now.shape and bool(((known == now) | (now != now)).all())):
                raise _other(f"the constant {known}", str(now))


def _same(before: Any, now: Any) -> bool:
    """Whether two arguments are the same."""
    if isinstance(before, Node):
        return before is now
    if isinstance(before, dict):
        return _same(list(before.items()), list(now.items()))
    if isinstance(before, tuple | list):
        return len(before) == len(now) and all(map(_same, before, now))
    return type(before) is type(now) and (before == now or repr(before) == repr(now))


def _told(node: Node | None) -> str:
    return "nothing" if node is None else f"{node.target}({', '.join(map(str, node.args))})"


def _other(before: str, now: str) -> CallsDiffer:
    return CallsDiffer(
        f"the loss function computes something else when it is called again on the same tensors ({before}, and then {now}): "
        "it reads something that changes and is no tensor, such as a count of its calls, which would be a constant of a "
        "graph. Put it into the batch as a tensor, torch.tensor(count)"
    )
