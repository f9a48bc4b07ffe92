"""What a loss says of its parts: blocks, names of values, submodules that are followed, gates of layers."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import nn

from shardlib.common.environment import environment
from shardlib.rng import Key

# `block`, the one optional marker in a model, and `sequential`, a loss made of blocks.
# A block is the unit that is gathered, recomputed and compiled. Outside a train step a block is a plain function call.


# How blocks are called.
Runner = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


F = TypeVar("F", bound=Callable[..., Any])


def block(fn: F) -> F:
    """Mark ``fn`` as a block: ``fn(params, *inputs) -> outputs`` over pytrees of tensors.

    Under `remat` a block's activations are recomputed in backward. Under ZeRO-3 its parameters are gathered once, before it
    runs, and ``fn`` gets them as plain tensors, so that ``sl.block(torch.compile(fn))`` compiles.

    >>> mlp = sl.block(lambda params, x: (x @ params["up"]).relu() @ params["down"])
    >>> mlp({"up": torch.ones(4, 8), "down": torch.ones(8, 4)}, torch.ones(2, 4)).shape
    torch.Size([2, 4])
    """

    @functools.wraps(fn)
    def marked(*args: Any, **kwargs: Any) -> Any:
        return _call(fn, args, kwargs)

    return cast(F, marked)


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a block. At the top level, since a marked function must be picklable, and a context variable is not."""
    runner: Runner | None = environment().blocks
    return fn(*args, **kwargs) if runner is None else runner(fn, args, kwargs)


class Sequential:
    """A loss function made of blocks: see `sequential`.

    Attributes:
        functions: as they were given.
        blocks: the same, marked.
    """

    def __init__(self, blocks: Sequence[Callable[..., Any]]) -> None:
        self.functions: list[Callable[..., Any]] = list(blocks)
        self.blocks: list[Callable[..., Any]] = [block(fn) for fn in blocks]
        rngs = [_rng_of(fn) for fn in blocks]
        self._wants_rng = [rng is not None for rng in rngs]
        names = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("params", "batch")]
        if any(self._wants_rng):
            # The loss requires a key if one of its blocks requires one.
            required = any(rng is not None and rng.default is inspect.Parameter.empty for rng in rngs)
            default = inspect.Parameter.empty if required else None
            names.append(inspect.Parameter("rng", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default))
        self.__signature__: inspect.Signature = inspect.Signature(names)

    def __len__(self) -> int:
        return len(self.blocks)

    def __call__(self, params: Sequence[Any], batch: Any, rng: Key | None = None) -> Any:
        if len(params) != len(self):
            raise ValueError(f"sequential has {len(self)} blocks and got {len(params)} parameter trees")
        return self.run(params, None, batch, 0, len(self), rng)

    def run(self, params: Sequence[Any], carry: Any, batch: Any, start: int, stop: int, rng: Key | None = None) -> Any:
        """The carry after blocks ``start`` to ``stop - 1``, which are called in order from ``carry``."""
        for index in range(start, stop):
            extra = {"rng": rng.fold_in(index) if rng is not None else None} if self._wants_rng[index] else {}
            carry = self.blocks[index](params[index], carry, batch, **extra)
        return carry


def sequential(blocks: Sequence[Callable[..., Any]]) -> Sequential:
    """A loss function from blocks ``fn(params_i, carry, batch) -> carry``; the last returns the loss.

    The result is ``loss_fn(params, batch)`` over a list of parameter trees, one per block. The first block's
    carry is None; a carry is any pytree (skips, auxiliary losses). A block with a parameter ``rng`` gets a key of
    its own, and ``loss_fn`` then takes ``rng`` too. `shardlib.pipeline` cuts the list of blocks into stages.

    Raises:
        ValueError: in a call of ``loss_fn``, if the number of parameter trees is not the number of blocks.

    >>> loss_fn = sl.sequential([lambda p, carry, batch: batch * p["w"], lambda p, carry, batch: (carry * p["w"]).sum()])
    >>> loss_fn([{"w": torch.ones(2)}, {"w": torch.ones(2)}], torch.tensor([1.0, 2.0]))
    tensor(3.)
    """
    return Sequential(blocks)


def _rng_of(fn: Callable[..., Any]) -> inspect.Parameter | None:
    """The parameter ``rng`` of a function, if it has one."""
    try:
        return inspect.signature(fn).parameters.get("rng")
    except (TypeError, ValueError):
        return None


# `checkpoint_name`: names for the values of a block, by which `shardlib.remat` keeps some of them.


# What is done with a value that is named. A block that keeps some of them sets it while it runs, and while it is recomputed.
Named = Callable[[torch.Tensor, str], torch.Tensor]


def checkpoint_name(x: torch.Tensor, name: str) -> torch.Tensor:
    """``x``, under a name by which ``sl.remat(save=[name])`` keeps it instead of computing it again.

    Name the result of an operation that is worth keeping: of a matrix product, or of attention. In blocks that are compiled,
    and outside of recomputed ones, names have no effect.

    >>> block = sl.block(lambda w, x: torch.tanh(sl.nn.checkpoint_name(x @ w, "product")))
    >>> block(torch.eye(2), torch.zeros(2)).tolist()
    [0.0, 0.0]
    """
    if torch.compiler.is_compiling():
        return x
    named: Named | None = environment().names
    return x if named is None else named(x, name)


# What a module that runs as a function of its parameters is told by those around it: who follows its parts by their names,
# and whether it trains.


# ``follow(module, parameters)`` is a context in which the module is called with these parameters (dotted name -> tensor).
Follow = Callable[[nn.Module, Mapping[str, torch.Tensor]], AbstractContextManager[None]]


class _Mode(threading.local):  # no ContextVar, which compiled functions cannot read
    training: bool | None = None


_mode = _Mode()


@contextmanager
def evaluating() -> Iterator[None]:
    """A context in which modules run in eval mode."""
    before, _mode.training = _mode.training, False
    try:
        yield
    finally:
        _mode.training = before


def mode_of_modules() -> bool | None:
    """Whether modules run in train mode (True), in eval mode (False), or as each of them is set (None)."""
    return _mode.training


# `Gate`: what a layer of a model does at one step of training, for blocks that see to it themselves.


@dataclass(frozen=True)
class Gate:
    """What a layer does at one step, given to a block that has a parameter ``gate``.

    Such a block returns its input unchanged where the gate is not ``open``, without a use of its parameters, and else adds
    ``gate.scaled(branch)`` to the residual stream for each of its branches. (Of a block without this parameter the train
    step takes x + (block(x) − x)/p.) Outside of a train step every gate is open and scales nothing.

    Attributes:
        keep: the probability p with which the layer was to be kept at this step; None where it is never left out.
        open: whether it was kept.
        tokens: the positions of the tokens that the layer sees, int64 (B, kept), ascending; None where it sees all. What is
            per token among its inputs has those tokens only; a block that computes positions itself takes these.

    >>> sl.nn.Gate(keep=0.5).scaled(torch.ones(2))
    tensor([2., 2.])
    """

    keep: float | None = None
    open: bool = True
    tokens: torch.Tensor | None = None

    def scaled(self, branch: torch.Tensor) -> torch.Tensor:
        """A branch over the probability that it is kept, so that its expected value does not depend on that."""
        return branch if self.keep in (None, 1.0) else branch / self.keep

    def between(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """The residual stream behind a layer whose branches cannot be scaled one by one: before + (after − before)/p."""
        return after if self.keep in (None, 1.0) else before + (after - before) / self.keep


OPEN = Gate()
