"""The phases of a micro-batch, for traces: which block runs, forward or backward, and the work that is done."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from shardlib.common._compat import TorchDispatchMode, asks_device, graph_task
from shardlib.execute.handles import Handle
from shardlib.nn.blocks import Runner
from shardlib.tree import leaves_of


class Phases:
    """The phase of a micro-batch that runs now.

    Args:
        first: the number of the stage's first block among all blocks.
    """

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self.begin()

    def begin(self) -> None:
        """Begin a micro-batch."""
        self._number, self._inside, self._begun = self._first, False, False
        self._forward = self._backward = ""

    @property
    def now(self) -> str:
        """The phase, such as "backward of block 3". Blocks count from 1; without blocks, "forward" or "backward"."""
        return f"backward{self._backward}" if graph_task() != -1 else f"forward{self._forward}"

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
            here = f" of block {self._number}"
            if not self._begun:
                self._begun = True
                self._at_gradient((args[1:], kwargs), f" of what precedes block {self._number}")
            self._inside, self._forward = True, here
            try:
                result = runner(fn, args, kwargs) if runner else fn(*args, **kwargs)
            finally:
                self._inside = False
            self._forward = self._backward = f" of what follows block {self._number}"
            self._at_gradient(result, here)
            return result

        return run

    def _at_gradient(self, tree: Any, phase: str) -> None:
        """Begin a phase of backward when the gradient of a value in ``tree`` has been computed."""

        def begin(gradient: torch.Tensor) -> None:
            self._backward = phase

        for leaf in leaves_of(tree):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Handle) and leaf.grad_fn is not None:
                leaf.register_hook(begin)


class Work(TorchDispatchMode):
    """A mode that counts work: of forward, and of backward with what it recomputes.

    Attributes:
        flops: floating-point operations, of those operators that torch knows to count (matrix products).
        launches: operators that compute tensors: neither views nor memory without values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.launches = [0, 0], [0, 0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is asks_device:  # no work
            return func(*args)
        result = func(*args, **(kwargs or {}))
        backward = graph_task() != -1
        if count := flop_registry.get(func.overloadpacket):
            self.flops[backward] += count(*args, **(kwargs or {}), out_val=result)
        computes = not (func.is_view or func.overloadpacket in _WITHOUT_VALUES)
        self.launches[backward] += computes and any(isinstance(leaf, torch.Tensor) for leaf in leaves_of(result))
        return result


_WITHOUT_VALUES = {
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")
}
