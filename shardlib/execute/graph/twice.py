"""A look at whether a loss function computes the same when it is called again, as a graph of it would.

What it takes from no tensor is a constant of a graph: Python's and NumPy's random numbers, and a count of its own calls.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import numpy
from torch.fx import Node

from shardlib.errors import IllegalComposition
from shardlib.execute.graph.recorder import Recorder


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


def require_same(first: Recorder, again: Recorder, last: Node) -> None:
    """Refuse a function whose operations differ from those that it had.

    Args:
        first: of a call and of what follows on it.
        again: of another call.
        last: the first call's last operation.

    Raises:
        IllegalComposition: names the first operation that differs.
    """
    twins: dict[Node, Node] = {}
    nodes = list(first.graph.nodes)
    for before, now in zip_longest(nodes[: nodes.index(last) + 1], again.graph.nodes):
        if before is None or now is None or not _same(before, now, twins) or not _equal(first, again, now):
            raise IllegalComposition(
                f"the loss function computes something else when it is called again on the same tensors ({_told(before)}, "
                f"and then {_told(now)}): it reads something that changes and is no tensor, such as a count of its calls, "
                "which would be a constant of a graph. Put it into the batch as a tensor, torch.tensor(count)"
            )
        twins[before] = now


def _same(before: Any, now: Any, twins: Mapping[Node, Node]) -> bool:
    """Whether two nodes call the same with the same, or two arguments are the same."""
    if isinstance(before, Node):
        known = twins.get(before)
        if known is not None:
            return known is now
        return before.target == now.target and _same([before.args, before.kwargs], [now.args, now.kwargs], twins)
    if isinstance(before, dict):
        return _same(list(before.items()), list(now.items()), twins)
    if isinstance(before, tuple | list):
        return len(before) == len(now) and all(_same(one, other, twins) for one, other in zip(before, now))
    return type(before) is type(now) and (before == now or repr(before) == repr(now))


def _equal(first: Recorder, again: Recorder, node: Node) -> bool:
    """Whether a constant has the same values in both; True of other nodes."""
    if node.op != "get_attr":
        return True
    one, other = first.constants[str(node.target)], again.constants[str(node.target)]
    return one is other or (one.shape == other.shape and bool(((one == other) | (one != one)).all()))


def _told(node: Node | None) -> str:
    return "nothing" if node is None else f"{node.target}({', '.join(map(str, node.args))})"
