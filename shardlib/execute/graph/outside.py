"""What a loss may not do in a trace, outside of its arguments: draw or seed numbers, read values, change what it holds."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.overrides import TorchFunctionMode

from shardlib.common._compat import no_dispatch
from shardlib.errors import IllegalComposition
from shardlib.execute.graph.closed import Reached
from shardlib.execute.graph.recorder import Recorder, draw_on
from shardlib.rng import restore_generators, states_of_generators

_log = logging.getLogger("shardlib.execute")


class CallsDiffer(IllegalComposition):
    """A function computed something else when it was called again."""


@contextmanager
def without_random_numbers() -> Iterator[None]:
    """A context for a trace. Raises `IllegalComposition` if its code draws from global generators of Python or NumPy."""

    def states() -> dict[tuple[str, str], Any]:
        words = numpy.random.get_state(legacy=False)["state"]
        return {
            ("Python's random", "random.random()"): random.getstate(),
            ("numpy.random", "numpy.random.rand()"): (words["key"].tobytes(), words["pos"]),
        }

    before = states()
    yield
    for (name, call), now in states().items():
        if now != before[name, call]:
            raise IllegalComposition(
                f"the loss draws by {name}, which a graph does once. Pass torch.tensor({call}) in the batch"
            )


@contextmanager
def without_seeds(recorder: Recorder, device: torch.device) -> Iterator[None]:
    """A context for a function's call. Raises `IllegalComposition` if its code seeds torch's generators."""
    before, already = states_of_generators(device), len(recorder.drawn)
    try:
        yield
        now = states_of_generators(device)
        restore_generators(before)
        for each in recorder.drawn[already:]:
            draw_on(each)
        with no_dispatch():
            alike = [found.equal(due) for (_, found), (_, due) in zip(now, states_of_generators(device))]
        if not all(alike):
            raise IllegalComposition(
                "the loss function seeds torch's generators (torch.manual_seed, fork_rng), and a graph would draw what "
                "follows on the step's seed. Draw outside of the loss, or by sl.dropout(x, p, rng.fold_in(name))"
            )
    finally:
        restore_generators(before)


class WithoutReads(TorchFunctionMode):
    """A mode for a function's call, in which nothing but an operator gives a tensor other values, or reads them.

    Raises:
        IllegalComposition: values of a tensor that the function closes over are read.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ and type(args[0]) is torch.Tensor:
            raise IllegalComposition(
                f"the loss function reads values of a tensor of its closure, by {func.__name__}(), which a graph would do "
                "once for all steps. Put them into the batch"
            )
        result = func(*args, **(kwargs or {}))
        if func == _ASSIGN_DATA and hasattr(args[1], "recorded"):
            args[0].recorded = args[1].recorded
        return result


_READ = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__)
_ASSIGN_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class Outside:
    """What a function reaches outside of its arguments, which calls in a trace may change and a graph does not. After a trace
    it is as it was before: what calls left there are tensors without values."""

    def __init__(self, reads: Any) -> None:
        self._roots, self._seen = [reads], set[int]()
        self._held = [Reached(reads).held()]

    @contextmanager
    def follow(self, module: torch.nn.Module, _: Any) -> Iterator[None]:
        """A context for the call of a module, whose attributes are outside too."""
        if id(module) not in self._seen:
            self._seen.add(id(module))
            self._roots.append(module)
            self._held.append(Reached(module).held())
        yield

    def values(self) -> list[tuple[str, str]]:
        """Plain values, with their names, and which tensors there are; but for those of the trace."""
        return [each for each in Reached(*self._roots).values if not each[1].startswith("a FakeTensor")]

    def require_same(self, before: list[tuple[str, str]], now: list[tuple[str, str]]) -> None:
        """Refuse what a call changed. Raises `CallsDiffer`."""
        if before != now:
            names = ", ".join(sorted({name for name, _ in {*before} ^ {*now}}))
            raise CallsDiffer(
                f"the loss function changes {names}, which a graph would not do. Return it as aux, or change it between steps"
            )

    def tell(self, last: Recorder) -> None:
        """Tell what a call leaves for others to read."""
        left = {name for name, fake in self._held[0].fakes() if last.node_of(fake)}
        if left:
            _log.warning(
                "compile=True: the loss function writes to %s, which stays as it was after the first step. Return it as aux",
                ", ".join(sorted(left)),
            )

    def restore(self) -> None:
        """Let everything be as it was."""
        for held in self._held:
            held.restore()
