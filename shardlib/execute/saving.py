"""Autograd's saved tensors while parameters are gathered: a tensor in gathered storage is saved as a note of its position.

Storage that is freed and filled again before backward reads it would need no notes. But a function may keep a view of a
parameter (``w = p.t()``) and use it after its unit was released, where it would read freed memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from shardlib.common._compat import is_view, saving_hooks, storage_id, version_of
from shardlib.execute.handles import Handle
from shardlib.execute.units import BucketState, UnitState


class Saved(NamedTuple):
    """A saved tensor with its version. Torch does not check the version of tensors that are saved through hooks."""

    tensor: torch.Tensor
    version: int

    def changed(self) -> RuntimeError:
        """Torch's error for a tensor of its own that was written to after it was saved."""
        return RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: shape "
            f"{tuple(self.tensor.shape)}, {self.tensor.dtype}, saved at version {self.version} and now at "
            f"{version_of(self.tensor)}. Write to a copy, x.clone()"
        )


class SavedTensors:
    """Saved tensors of one micro-batch.

    Args:
        touch: gathers a unit when backward needs its parameters.
    """

    def __init__(self, touch: Callable[[UnitState], None]) -> None:
        self._touch = touch
        # Identity of a gathered storage -> a weak reference to it, its unit and bucket. A storage may outlive its unit's
        # release, in an operation that uses two units.
        self._gathered: dict[int, tuple[Callable[[], Any], UnitState, BucketState]] = {}

    def hooks(self) -> saved_tensors_hooks:
        """A context in which tensors in gathered storage are saved as notes, and gathered again in backward."""
        return saved_tensors_hooks(self._note, self._recall)

    def innermost(self) -> bool:
        """Whether no hooks but these stand for what is saved now."""
        hooks = saving_hooks()
        return hooks is None or hooks[0] == self._note

    def note_gathered(self, unit: UnitState) -> None:
        """Remember the storages of a unit that has been gathered."""
        for state in unit.buckets:
            if state.gathers and state.whole is not None:
                storage = state.whole.untyped_storage()
                self._gathered[storage_id(storage)] = weakref.ref(storage), unit, state

    def bucket_with(self, tensor: torch.Tensor) -> tuple[UnitState, BucketState] | None:
        """The unit and the gathered bucket in whose storage a tensor lies; None for other tensors."""
        entry = self._gathered.get(storage_id(tensor.untyped_storage()))
        if entry is None or entry[0]() is None:  # a new storage may have the identity of one that was freed
            return None
        return entry[1], entry[2]

    def clear(self) -> None:
        self._gathered.clear()

    def _note(self, tensor: torch.Tensor) -> Any:
        # These two functions run for every saved tensor: they ask first for what most of them are, and make no tuple for
        # it, which the garbage collector would follow: an activation at version 0 stands for itself.
        plain = type(tensor) is torch.Tensor
        if not plain and isinstance(tensor, Handle):
            return tensor
        # Gathered leaves are views of their buffer. Most activations are no views, and need no look-up.
        if is_view(tensor) and tensor.layout is torch.strided and tensor.numel():
            source = self.bucket_with(tensor)
            if source is not None and source[1].bucket.dtype is tensor.dtype:
                unit, state = source
                leaf = state.leaf_at(tensor)
                if leaf is not None:
                    return unit.notes[state.first + leaf]
                return unit, state, tensor.size(), tensor.stride(), tensor.storage_offset()
        version = version_of(tensor)
        return tensor if plain and not version else Saved(tensor, version)

    def _recall(self, note: Any) -> torch.Tensor:
        kind = type(note)
        if kind is torch.Tensor:
            if version_of(note):
                raise Saved(note, 0).changed()
            return note
        if kind is tuple:
            self._touch(note[0])
            if len(note) == 2:
                unit, index = note
                return unit.saved(index)
            _, state, *layout = note
            return state.whole.as_strided(*layout)
        if kind is not Saved:
            return note
        tensor, version = note
        if version_of(tensor) != version:
            raise note.changed()
        return tensor
