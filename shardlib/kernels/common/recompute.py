"""Keep how a value is computed instead of the value, where its consumer's backward needs it.

`torch.utils.checkpoint` computes a whole piece of a model again. Here one cheap value is, such as a GeLU's output, whose
input is kept for its own backward anyway: no matrix product runs twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from shardlib._compat import func_transform, saving_hooks, storage_id


def recomputed(
    value: torch.Tensor, function: Callable[..., torch.Tensor], *inputs: Any
) -> contextlib.AbstractContextManager[None]:
    """Within, operations that keep ``value`` (or a view of it) for their backward keep a note instead.

    Backward then calls ``function(*inputs)``, which gave ``value``, once per operation that kept it. Inputs that are
    tensors are kept, so they should be kept for another reason already. Other hooks on saved tensors go on as before.

    Inside `torch.func`'s transforms, which allow no such hooks, and inside `torch.compile`, which decides itself what to
    compute again, the value is kept.
    """
    return _noting(value, function, inputs) if can_hook() else contextlib.nullcontext()


def can_hook() -> bool:
    """Whether saved tensors can have hooks here: not inside `torch.func`'s transforms, nor inside `torch.compile`."""
    return not torch.compiler.is_compiling() and func_transform() is None


@contextlib.contextmanager
def _noting(value: torch.Tensor, function: Callable[..., torch.Tensor], inputs: tuple[Any, ...]) -> Iterator[None]:
    pack, unpack = saving_hooks() or (_same, _same)
    storage = storage_id(value.untyped_storage())
    kept = [pack(each.detach()) if isinstance(each, torch.Tensor) else each for each in inputs]
    tensors = [isinstance(each, torch.Tensor) for each in inputs]

    def again() -> torch.Tensor:
        values = [unpack(each) if tensor else each for each, tensor in zip(kept, tensors)]
        with torch.no_grad():
            return function(*values)

    def save(tensor: torch.Tensor) -> Any:
        if storage_id(tensor.untyped_storage()) != storage:
            return pack(tensor)
        return _Note(again, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def restore(saved: Any) -> torch.Tensor:
        return saved.tensor() if isinstance(saved, _Note) else unpack(saved)

    with saved_tensors_hooks(save, restore):
        yield


class _Note(NamedTuple):
    """A view of a value that can be computed again."""

    again: Callable[[], torch.Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        return self.again().as_strided(self.size, self.stride, self.offset)


def _same(value: Any) -> Any:
    return value
