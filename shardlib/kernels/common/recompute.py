"""Recomputation of single values: autograd saves how a value is computed instead of the value.

`torch.utils.checkpoint` computes a whole segment of a model again. Here one cheap value is computed again, such as the
output of a GeLU, whose input is saved for the GeLU's own backward anyway: no matrix product runs twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from shardlib.common._compat import func_transform, saving_hooks, storage_id


def recomputed(
    value: torch.Tensor, function: Callable[..., torch.Tensor], *inputs: Any
) -> contextlib.AbstractContextManager[None]:
    """A context in which operations save, in place of ``value`` or a view of it, a note of how it is computed.

    Backward calls ``function(*inputs)``, which must return ``value``, once per operation that saved it. Tensors among
    ``inputs`` are kept alive, which costs nothing where they are saved anyway. Other hooks on saved tensors still run.

    The value itself is saved inside `torch.func`'s transforms, which allow no hooks, and inside `torch.compile`, which
    chooses by itself what to recompute.
    """
    return _saving_notes(value, function, inputs) if can_hook() else contextlib.nullcontext()


def can_hook() -> bool:
    """Whether saved tensors can have hooks: not inside `torch.func`'s transforms, nor inside `torch.compile`."""
    return not torch.compiler.is_compiling() and func_transform() is None


@contextlib.contextmanager
def _saving_notes(
    value: torch.Tensor, function: Callable[..., torch.Tensor], inputs: tuple[Any, ...]
) -> Iterator[None]:
    pack, unpack = saving_hooks() or (_identity, _identity)
    storage = storage_id(value.untyped_storage())
    kept = [pack(each.detach()) if isinstance(each, torch.Tensor) else each for each in inputs]
    tensors = [isinstance(each, torch.Tensor) for each in inputs]

    def recompute() -> torch.Tensor:
        values = [unpack(each) if tensor else each for each, tensor in zip(kept, tensors)]
        with torch.no_grad():
            return function(*values)

    def save(tensor: torch.Tensor) -> Any:
        if storage_id(tensor.untyped_storage()) != storage:
            return pack(tensor)
        return _Note(recompute, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def restore(saved: Any) -> torch.Tensor:
        return saved.tensor() if isinstance(saved, _Note) else unpack(saved)

    with saved_tensors_hooks(save, restore):
        yield


class _Note(NamedTuple):
    """A saved view of a value that is computed again in backward."""

    recompute: Callable[[], torch.Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        return self.recompute().as_strided(self.size, self.stride, self.offset)


def _identity(value: Any) -> Any:
    return value
