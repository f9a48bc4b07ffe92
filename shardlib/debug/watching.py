"""A loss function that is watched: what it calls, block by block, with all values and gradients.

The calls are those that the loss function itself makes: a function of torch stands for all that it does on shards, so that
the calls on one device and on any mesh are the same, in the same order, and can be compared one by one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardlib.common.environment import environment, within
from shardlib.errors import LossError
from shardlib.execute.handles import Handle
from shardlib.execute.losses import read_loss
from shardlib.nn.blocks import Runner, Sequential
from shardlib.tree import flatten, leaves_of, tree_map


@dataclass
class NotedCall:
    """One call of a function of torch, or of `shardlib.nn`, in a loss function.

    Attributes:
        name: of the function.
        block: number of the block that it is in; None outside of blocks.
        paths: of the parameters among its arguments.
        where: file and line of the code that calls it.
        before: numbers of the earlier calls whose results it takes.
        values: copies of its results.
        grads: of its results, as far as backward has come.
    """

    name: str
    block: int | None
    paths: tuple[str, ...]
    where: str
    before: tuple[int, ...]
    values: list[torch.Tensor]
    grads: list[torch.Tensor | None]

    @property
    def label(self) -> str:
        return f"{self.name}({', '.join(self.paths)})" if self.paths else self.name


@dataclass
class Block:
    """One run of a block.

    Attributes:
        name: the path that its parameters have in common, or its number.
        params: path -> the parameter as the block gets it; handles, which stand for parameters, are left out.
        outputs: copies of the tensors that it returns.
        again: the calls of each of its recomputations.
    """

    name: str
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: list[torch.Tensor] = field(default_factory=list)
    again: list[list[NotedCall]] = field(default_factory=list)


@dataclass
class NotedRun:
    """One run of a loss function, or of the blocks of one stage, on one micro-batch.

    Attributes:
        stage: number of the stage.
        batch: the micro-batch.
        key: the key that it was given, or None.
        blocks: number -> block.
        leaf_grads: path -> gradient of the parameter, for parameters that stand in the loss as tensors.
        total, weight: of the loss; None where the stage is not the last.
        seed: the gradient from which backward began.
    """

    stage: int
    batch: Any
    key: Any
    calls: list[NotedCall] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)
    leaf_grads: dict[str, torch.Tensor] = field(default_factory=dict)
    total: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    seed: float | None = None


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that nothing writes to, with all of its elements: an embedding's gradient may be sparse."""
    return tensor.detach().to_dense() if tensor.is_sparse else tensor.detach().clone()


def own_copy(tree: Any) -> Any:
    """A tree in containers and memory of its own, for one call of a function, which may write to what is there."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


_OURS = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
_ROOT = Path(__file__).parents[2]


class LossWatch:
    """What one rank's loss function does in one step.

    Attributes:
        runs: in order.
    """

    def __init__(self) -> None:
        self.runs: list[NotedRun] = []

    def watched(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """``loss_fn``, watched."""
        if isinstance(loss_fn, Sequential):
            return _WatchedBlocks(loss_fn, self)

        @functools.wraps(loss_fn)
        def watched(params: Any, batch: Any, **extra: Any) -> Any:
            with self.running(params, batch, extra.get("rng")) as run:
                value = loss_fn(params, batch, **extra)
            _note_loss(run, value)
            return value

        return watched

    @contextmanager
    def running(self, params: Any, batch: Any, key: Any, first: int = 0) -> Iterator[NotedRun]:
        """A context that notes one run, whose blocks are numbered from ``first``."""
        run = NotedRun(first, [copied(leaf) for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor)], key)
        self.runs.append(run)
        calls = _Calls(run, first)
        calls.meet(params)
        with within(blocks=functools.partial(calls.block, environment().blocks)), calls:
            yield run


class _WatchedBlocks(Sequential):
    def __init__(self, blocks: Sequential, watch: LossWatch) -> None:
        self.__dict__.update(blocks.__dict__)
        self._watch = watch

    def run(self, params: Any, carry: Any, batch: Any, start: int, stop: int, rng: Any = None) -> Any:
        with self._watch.running(params, batch, rng, start) as run:
            value = super().run(params, carry, batch, start, stop, rng)
        if stop == len(self):
            _note_loss(run, value)
        return value


def _note_loss(run: NotedRun, value: Any) -> None:
    outcome = read_loss(value, False)
    if len(outcome.means) > 1:
        raise LossError(
            f"the loss is a sum of {len(outcome.means)} sl.Mean. Give each by itself: "
            "lambda params, batch: loss_fn(params, batch).terms[0]"
        )
    run.total, run.weight = map(copied, outcome.means[0])
    loss = value[0] if isinstance(value, tuple) else value
    total = loss[0] if isinstance(loss, tuple) else loss
    if total.requires_grad:
        total.register_hook(lambda seed: setattr(run, "seed", float(seed)))


class _Calls(TorchFunctionMode):
    """Notes the calls of a run."""

    def __init__(self, run: NotedRun, first: int) -> None:
        super().__init__()
        self._run, self._next = run, first
        self._into: list[NotedCall] | None = run.calls  # where calls are noted; None while the library's own code runs
        self._block: int | None = None
        self._paths: dict[int, str] = {}
        self._made: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is used again
        self._tree: Any = None

    def meet(self, params: Any) -> None:
        """Learn the paths of the parameters."""
        paths, leaves, _ = flatten(params)
        for path, leaf in zip(paths, leaves, strict=True):
            self._learn(getattr(leaf, "_path", path), leaf)

    def _learn(self, path: str, leaf: Any) -> None:
        if not isinstance(leaf, torch.Tensor) or id(leaf) in self._paths:
            return
        self._paths[id(leaf)] = path
        self._kept.append(leaf)
        if leaf.requires_grad and not isinstance(leaf, Handle):
            leaf.register_hook(functools.partial(self._add, path))

    def _add(self, path: str, grad: torch.Tensor | None) -> None:
        if grad is None:  # the run does not use the leaf
            return
        before = self._run.leaf_grads.get(path)
        self._run.leaf_grads[path] = copied(grad) if before is None else before + copied(grad)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._into is not None:
            self._note(func, (args, kwargs or {}), result)
        return result

    def _note(self, func: Any, given: Any, result: Any) -> None:
        tensors = [t for t in leaves_of(result) if isinstance(t, torch.Tensor) and not isinstance(t, Handle)]
        if not tensors or self._into is None:
            return
        arguments = [value for value in leaves_of(given) if isinstance(value, torch.Tensor)]
        paths = [path for value in arguments if (path := self._path(value))]
        call = NotedCall(
            getattr(func, "__name__", str(func)),
            self._block,
            tuple(dict.fromkeys(paths)),
            _line(),
            tuple(self._made[id(value)] for value in arguments if id(value) in self._made),
            [copied(tensor) for tensor in tensors],
            [None] * len(tensors),
        )
        if self._into is self._run.calls:
            for position, tensor in enumerate(tensors):
                self._made[id(tensor)] = len(self._into)
                self._kept.append(tensor)
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(_keep, call, position))
        self._into.append(call)

    def _path(self, value: torch.Tensor) -> str | None:
        return getattr(value, "_path", None) or self._paths.get(id(value))

    def block(self, runner: Runner | None, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block by the runner that the plan needs; noted are the calls of the block, not those of the runner."""
        if self._block is not None or self._into is None:  # a block within a block
            return fn(*args, **kwargs) if runner is None else runner(fn, args, kwargs)
        number, self._next = self._next, self._next + 1
        before = leaves_of((args, kwargs))
        paths = [self._path(value) if isinstance(value, torch.Tensor) else None for value in before]
        block = self._run.blocks[number] = Block(_common(paths) or str(number))
        begun, named = False, frozenset(kwargs)

        def noted(*args: Any, **kwargs: Any) -> Any:
            nonlocal begun
            recomputed, begun = begun, True
            if recomputed:
                block.again.append([])
                with self._noting(block.again[-1], number), self:
                    return fn(*args, **kwargs)
            given = {name: value for name, value in kwargs.items() if name in named}  # without the gate of a layer
            for path, leaf in zip(paths, leaves_of((args, given)), strict=True):
                if path is not None and not isinstance(leaf, Handle):
                    self._learn(path, leaf)
                    block.params[path] = copied(leaf)
            with self._noting(self._run.calls, number):
                return fn(*args, **kwargs)

        noted.__wrapped__ = fn  # type: ignore[attr-defined]  # whether it takes a gate
        with self._noting(None, None):
            result = noted(*args, **kwargs) if runner is None else runner(noted, args, kwargs)
            block.outputs = [copied(leaf) for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor)]
        return result

    @contextmanager
    def _noting(self, into: list[NotedCall] | None, block: int | None) -> Iterator[None]:
        before = self._into, self._block
        self._into, self._block = into, block
        try:
            yield
        finally:
            self._into, self._block = before


def _keep(call: NotedCall, position: int, grad: torch.Tensor | None) -> None:
    if grad is not None:  # as a function's own backward may return
        call.grads[position] = copied(grad)


def _common(paths: list[str | None]) -> str:
    """The path that all parameters have in common."""
    known = [path.split("/") for path in paths if path]
    shared = []
    for parts in zip(*known):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(shared)


def _line() -> str:
    """The line that called a function of torch: the innermost one that is neither torch's nor this room's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    if frame is None:
        return ""
    path = Path(frame.f_code.co_filename)
    name = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path.name
    return f"{name}:{frame.f_lineno}"
