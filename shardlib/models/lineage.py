"""Where the parameters of a changed model come from, when the model is on the meta device and has its values in files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardlib.common._compat import OperatorMode, pytree, storage_id, to_copy, writes
from shardlib.errors import TreeError, listing

NO_VALUES = (
    "Let it wrap, copy and leave out weights, and start new ones without reading these; vocab= resizes embeddings"
)
_COPIES = {torch.ops.aten.clone.default, to_copy}
_MADE_ALIKE = ("new_", "_like")  # parts of names of operators that read of a tensor its form alone


class Lineage(OperatorMode):
    """A mode in which a function changes a model on the meta device.

    New tensors that have values keep them: moving them to the device of the model's weights, the meta device, only copies
    them. Of tensors on the meta device it is noted which are copies of the model's own, and which are computed from these.
    ``module``: the model, before the change."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._own: dict[int, list[tuple[str, torch.Tensor]]] = {}  # storage -> names, in order, and the leaf
        for name, leaf in tensors_of(module).items():
            self._own.setdefault(_storage(leaf), []).append((name, leaf))
        self._copied: dict[int, int] = {}  # storage of a copy -> the storage of the model's own
        self._computed: set[int] = set()
        self._kept: list[Any] = []  # storages, so that their ids are not used again

    def _take(self, op: Any, args: Any, kwargs: Any) -> Any:
        if op in _COPIES and not args[0].is_meta:
            return op(*args, **{key: value for key, value in kwargs.items() if key != "device"})
        read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.is_meta]
        out = op(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.is_meta]
        if any(part in op.__name__ for part in _MADE_ALIKE) or not any(map(self._has_line, read)):
            return out
        for leaf in made:
            line = self._line(read[0])
            if writes(op):
                self._computed.add(self._kept_id(leaf))
            elif op in _COPIES and line is not None:
                self._copied[self._kept_id(leaf)] = line
            elif _storage(leaf) not in map(_storage, read):  # no view
                self._computed.add(self._kept_id(leaf))
        return out

    def sources(self, module: nn.Module) -> dict[str, list[str]]:
        """Name in the changed model -> the names that the tensor which it is, or is a copy of, had before. Raises
        `TreeError`: parameters or buffers are parts of the model's, or computed from them; lists them."""
        found: dict[str, list[str]] = {}
        used: dict[int, int] = {}
        failures = []
        for name, leaf in tensors_of(module).items():
            line = self._line(leaf)
            if not self._has_line(leaf):
                continue
            if line is None or _lies(leaf) != _lies(self._own[line][0][1]):
                failures.append(f"{name}: shape {tuple(leaf.shape)}")
                continue
            before = [name for name, _ in self._own[line]]
            # The model's names for a tied tensor, so that files which have them all are compared.
            at = before.index(name) if name in before else min(used.get(line, 0), len(before) - 1)
            used[line] = at + 1
            found[name] = [before[at], *before[:at], *before[at + 1 :]]
        if failures:
            raise TreeError(f"change makes these of weights that are not read yet:\n{listing(failures)}\n{NO_VALUES}")
        return found

    @property
    def names(self) -> set[str]:
        """The names of all tensors before the change."""
        return {name for every in self._own.values() for name, _ in every}

    def _line(self, leaf: torch.Tensor) -> int | None:
        """The storage of the model's own tensor that a tensor is, is a view of, or is a copy of."""
        storage = self._copied.get(_storage(leaf), _storage(leaf))
        return storage if storage in self._own and _storage(leaf) not in self._computed else None

    def _has_line(self, leaf: torch.Tensor) -> bool:
        return self._line(leaf) is not None or _storage(leaf) in self._computed

    def _kept_id(self, leaf: torch.Tensor) -> int:
        self._kept.append(leaf.untyped_storage())
        return _storage(leaf)


def tensors_of(module: nn.Module) -> Mapping[str, torch.Tensor]:
    """Dotted name -> parameter or buffer, tied ones under all of their names."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def _storage(leaf: torch.Tensor) -> int:
    return storage_id(leaf.untyped_storage())


def _lies(leaf: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor lies in its storage."""
    return tuple(leaf.shape), leaf.stride(), int(leaf.storage_offset())
