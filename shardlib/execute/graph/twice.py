"""A look at whether a loss function computes the same when it is called again, as a graph of it would.

What it takes from no tensor is a constant of a graph: Python's and NumPy's random numbers, and a count of its own calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import numpy
import torch

from shardlib.common._compat import TorchDispatchMode, asks_device, other_fakes
from shardlib.errors import IllegalComposition
from shardlib.tree import leaves_of


class Calls(TorchDispatchMode):
    """A mode that notes operations: their operators, the shapes of tensors and all other arguments.

    Attributes:
        noted: what was called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not asks_device:
            self.noted.append((str(func), *map(_form, leaves_of((args, kwargs or {})))))
        return func(*args, **(kwargs or {}))


def _form(value: Any) -> Any:
    return str(value.shape) if isinstance(value, torch.Tensor) else repr(value)


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


def require_same(first: Calls, again: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> None:
    """Refuse a function whose operations differ from those that it had.

    Args:
        first: the operations of a call.
        again: calls the function again, on fake tensors like ``inputs``.

    Raises:
        IllegalComposition: names the first operation that differs.
    """
    with other_fakes() as fake, torch.enable_grad():
        fakes = [fake.from_tensor(tensor) for tensor in inputs]
        with Calls() as second:
            again(*fakes)
    for before, now in zip_longest(first.noted, second.noted):
        if before != now:
            raise IllegalComposition(
                f"the loss function computes something else when it is called again on the same tensors ({_told(before)}, "
                f"and then {_told(now)}): it reads something that changes and is no tensor, such as a count of its calls, "
                "which would be a constant of a graph. Put it into the batch as a tensor, torch.tensor(count)"
            )


def _told(call: tuple[Any, ...] | None) -> str:
    return "nothing" if call is None else f"{call[0]}({', '.join(map(str, call[1:]))})"
