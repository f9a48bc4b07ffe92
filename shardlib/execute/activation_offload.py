"""Activation offload: a keeper puts the inputs of checkpointed blocks into a store, and brings them back for backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

import torch

from shardlib.common._compat import storage_id, version_of, watch_checkpoints, without_top_mode
from shardlib.common.environment import environment
from shardlib.execute.handles import Handle
from shardlib.plan.recompute import Recompute

# A checkpoint keeps its block's inputs, and backward recomputes the block from them. A keeper takes the activations among
# them (what requires a gradient and is no parameter), puts them in an `ActivationStore`, and brings them back one block
# ahead of backward. What requires no gradient (batches, masks, positions) stays: blocks share it, and it is alive anyway.


Function = Callable[..., Any]
Arguments = Sequence[Any]


class StoredActivation(Protocol):
    """A tensor in a store.

    Attributes:
        moves: whether it takes time to bring the tensor back.
    """

    moves: bool

    def fetch(self) -> None:
        """Start to bring the tensor back, unless it is back or under way."""
        ...

    def arrive(self) -> torch.Tensor:
        """The tensor as it was put. The same memory each time, until `release`."""
        ...

    def release(self) -> None:
        """Let go of the tensor that was brought back. It can be fetched again."""
        ...

    def spend(self) -> None:
        """Give up what the device holds: the tensor is not needed again."""
        ...

    def free(self) -> None:
        """Give up what the store holds."""
        ...


class ActivationStore(Protocol):
    """A place where tensors are kept."""

    def put(self, tensor: torch.Tensor) -> StoredActivation:
        """Start to move a tensor. Its memory is free at the next `settle`."""
        ...

    def settle(self) -> None: ...


@dataclass(eq=False)
class _Entry:
    """A kept tensor, which several blocks may share.

    Attributes:
        first: the number of the first block that was given it, which is the last to be recomputed.
        users: how many blocks that were given it have not been recomputed in the last backward.
    """

    kept: StoredActivation
    first: int
    users: int = 0


class ActivationKeeper:
    """Keeps the inputs of the checkpoints of one micro-batch.

    Args:
        how: how blocks are recomputed; None if they are not.
        store: where inputs are kept; None if they stay where they are.
        is_parameter: whether a tensor lies in the memory of parameters.
        is_outermost: whether tensors that are saved now are not already saved by a checkpoint, or by hooks of the user's.
    """

    def __init__(
        self,
        how: Recompute | None,
        store: ActivationStore | None,
        is_parameter: Callable[[torch.Tensor], bool],
        is_outermost: Callable[[], bool],
    ) -> None:
        self._store, self._smallest = store, how.smallest if how else 0
        self._is_parameter, self._is_outermost = is_parameter, is_outermost
        self._blocks: list[list[_Entry]] = []
        self._known: dict[Any, tuple[Callable[[], Any], _Entry]] = {}
        self._here: dict[_Entry, None] = {}  # those that are back, or on their way
        self._last = False  # whether the last backward runs

    def keep(self, fn: Function, args: Arguments, has_context: bool) -> tuple[Function, Arguments]:
        """What a checkpoint is to recompute, and to keep for it, in place of ``fn(*args)``.

        Args:
            has_context: whether recomputation has a context of its own.
        """
        if self._store is None or not torch.is_grad_enabled() or not self._is_outermost():
            return fn, args
        taken = [position for position, arg in enumerate(args) if self._takes(arg)]
        if not taken:
            return fn, args
        self._store.settle()
        number = len(self._blocks)
        entries = [self._entry(args[position], number) for position in taken]
        self._blocks.append(entries)
        for entry in dict.fromkeys(entries):
            entry.users += 1
        # A tensor without elements tells the checkpoint whose generators it has to restore.
        sign = torch.empty(0, device=args[taken[0]].device)
        left = [None if position in taken else arg for position, arg in enumerate(args)]

        def again(_: torch.Tensor, *left: Any, **more: Any) -> Any:
            values = list(left)
            # A recompute policy must not see what happens outside of the block.
            with without_top_mode() if has_context else nullcontext():
                for position, tensor in zip(taken, self._recall(number, entries)):
                    values[position] = tensor
            return fn(*values, **more)

        return again, [sign, *left]

    def rest(self) -> None:
        """End the forward; other micro-batches may run before the backward."""
        if self._store is not None:
            self._store.settle()

    def turn(self, last: bool) -> None:
        """Begin a backward: start to bring back what it needs first.

        Args:
            last: whether no block is recomputed again after this backward.
        """
        self.rest()
        self._last = last
        if self._blocks:
            self._fetch(self._blocks[-1])

    def close(self) -> None:
        """Give up all tensors."""
        for entry in dict.fromkeys(entry for entries in self._blocks for entry in entries):
            entry.kept.free()
        self._blocks.clear()
        self._known.clear()
        self._here.clear()
        self._last = False

    def _takes(self, arg: Any) -> bool:
        return may_move(arg) and arg.nbytes >= self._smallest and not self._is_parameter(arg)

    def _entry(self, tensor: torch.Tensor, number: int) -> _Entry:
        storage = tensor.untyped_storage()
        view = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()
        key = storage_id(storage), version_of(tensor), view
        known = self._known.get(key)
        if known is None or known[0]() is None:  # a new storage may have the identity of one that was freed
            assert self._store is not None
            with torch.no_grad():
                known = self._known[key] = ref(storage), _Entry(self._store.put(tensor), number)
        return known[1]

    def _recall(self, number: int, entries: Sequence[_Entry]) -> list[torch.Tensor]:
        """The inputs of block ``number``; starts to bring back those of the block before it."""
        with torch.no_grad():
            self._fetch(entries)
            tensors = [entry.kept.arrive().detach().requires_grad_() for entry in entries]
            for entry in [entry for entry in self._here if entry.first >= number]:
                entry.kept.release()  # blocks before this one do not need it
                del self._here[entry]
            for entry in dict.fromkeys(entries) if self._last else ():
                entry.users -= 1
                if entry.users == 0:
                    entry.kept.spend()
            if number:
                self._fetch(self._blocks[number - 1])
        return tensors

    def _fetch(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            entry.kept.fetch()
            self._here[entry] = None


def may_move(arg: Any) -> bool:
    """Whether an input of a checkpoint goes to a store, if it is large and no parameter."""
    plain = isinstance(arg, torch.Tensor) and not isinstance(arg, Handle)
    return plain and arg.requires_grad and arg.layout is torch.strided


def _kept(fn: Function, args: Arguments, has_context: bool) -> tuple[Function, Arguments]:
    keeper: ActivationKeeper | None = environment().keeper
    return (fn, args) if keeper is None else keeper.keep(fn, args, has_context)


watch_checkpoints(_kept)
