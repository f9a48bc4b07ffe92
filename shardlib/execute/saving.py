"""What autograd saves while parameters are gathered: a tensor in gathered storage is kept as a note of where it lies."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from shardlib._compat import is_view, storage_id, version_of
from shardlib.execute.handles import Handle
from shardlib.execute.units import BucketState, UnitState


class Kept(NamedTuple):
    """A saved tensor as it is. Torch does not look whether those that were saved through hooks were written to since."""

    tensor: torch.Tensor
    version: int

    def changed(self) -> RuntimeError:
        """The error that torch raises for tensors of its own that were written to before backward reads them."""
        return RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
            f"shape {tuple(self.tensor.shape)}, {self.tensor.dtype}, is at version {version_of(self.tensor)}; expected "
            f"version {self.version} instead. Write to a copy: x = x.clone() before the operation that changes x in place"
        )


class SavedTensors:
    """Saved tensors of one micro-batch.

    Args:
        touch: gathers a unit, in backward.
    """

    def __init__(self, touch: Callable[[UnitState], None]) -> None:
        self._touch = touch
        # Identity of a gathered storage -> whether it is alive, its unit and bucket. It may outlive its unit's release,
        # in an operation that uses two units.
        self._gathered: dict[int, tuple[Callable[[], Any], UnitState, BucketState]] = {}

    def hooks(self) -> saved_tensors_hooks:
        """While it lasts, what lies in gathered storage is saved as a note, and gathered again in backward."""
        return saved_tensors_hooks(self._note, self._recall)

    def arrived(self, unit: UnitState) -> None:
        """The unit is here, gathered."""
        for state in unit.buckets:
            if state.gathers and state.whole is not None:
                storage = state.whole.untyped_storage()
                self._gathered[storage_id(storage)] = weakref.ref(storage), unit, state

    def place(self, tensor: torch.Tensor) -> tuple[UnitState, BucketState] | None:
        """The gathered bucket that a tensor lies in."""
        found = self._gathered.get(storage_id(tensor.untyped_storage()))
        if found is None or found[0]() is None:  # the storage may have the identity of one that is gone
            return None
        return found[1], found[2]

    def clear(self) -> None:
        self._gathered.clear()

    def _note(self, tensor: torch.Tensor) -> Any:
        # What comes first in these two functions is what most saved tensors are: they run for every one of them.
        if type(tensor) is not torch.Tensor and isinstance(tensor, Handle):
            return tensor
        # Gathered leaves are views of their buffer: this sorts most activations out at once.
        if is_view(tensor) and tensor.layout is torch.strided and tensor.numel():
            place = self.place(tensor)
            if place is not None and place[1].bucket.dtype is tensor.dtype:
                leaf = place[1].leaf_at(tensor)
                if leaf is not None:
                    return place[0], place[1].first + leaf
                return *place, tensor.size(), tensor.stride(), tensor.storage_offset()
        return _new(Kept, (tensor, version_of(tensor)))  # at half the cost of `Kept(...)`, for every activation

    def _recall(self, note: Any) -> torch.Tensor:
        kind = type(note)
        if kind is Kept:
            tensor, version = note
            if version_of(tensor) != version:
                raise note.changed()
            return tensor
        if kind is not tuple:
            return note
        self._touch(note[0])
        if len(note) == 2:
            unit, index = note
            return unit.saved(index)
        _, state, *layout = note
        return state.whole.as_strided(*layout)


_new = tuple.__new__
