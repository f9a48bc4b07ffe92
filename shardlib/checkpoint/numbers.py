"""Numbers in an optimizer's state and in buffers: Python's and NumPy's, for each of which a tensor is saved."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch

from shardlib.errors import TreeError, listing
from shardlib.tree import flatten, named_leaves, path_name, unflatten

_PYTHONS = (bool, int, float, complex)
# Of these kinds a leaf of a fresh state is as it was.
_CONSTANT = (str, bytes, Enum, torch.dtype, torch.device)


def tensors_of_numbers(prefix: str, tree: Any) -> dict[str, torch.Tensor]:
    """Name -> a tensor with the value, for each number (or array of numbers) among the leaves of a tree."""
    return {_name(prefix, path): _tensor(leaf) for path, leaf in named_leaves(tree) if _is_number(leaf)}


def with_numbers(prefix: str, tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """A tree with numbers of the types that it has, and of the values of `tensors_of_numbers`."""
    names = [_name(prefix, path) for path, _ in named_leaves(tree)]
    if tensors.keys().isdisjoint(names):
        return tree
    _, leaves, treedef = flatten(tree)
    values = [
        _number(leaf, tensors[name]) if name in tensors else leaf for name, leaf in zip(names, leaves, strict=True)
    ]
    return unflatten(treedef, values)


def require_kept(prefix: str, tree: Any) -> None:
    """Refuse leaves that a checkpoint would lose.

    Raises:
        TreeError: leaves are neither tensors nor numbers, nor of a kind that does not change; lists them.
    """
    lost = [
        f"{_name(prefix, path)}: {type(leaf).__name__}"
        for path, leaf in named_leaves(tree)
        if not (isinstance(leaf, (torch.Tensor, *_CONSTANT)) or callable(leaf) or _is_number(leaf))
    ]
    if lost:
        raise TreeError(
            f"a checkpoint would lose these, which are neither tensors nor numbers of 64 bits:\n{listing(lost)}\nHold what "
            "they hold in tensors, numbers, and trees of them."
        )


def _name(prefix: str, path: tuple[Any, ...]) -> str:
    return f"{prefix}/{path_name(path)}"


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind in "biufc" and leaf.dtype.itemsize <= (16 if leaf.dtype.kind == "c" else 8)
    return type(leaf) in _PYTHONS and (type(leaf) is not int or -(2**63) <= leaf < 2**63)


def _tensor(number: Any) -> torch.Tensor:
    if isinstance(number, (np.ndarray, np.generic)):
        return torch.from_numpy(np.array(number))
    return torch.tensor(number, dtype={float: torch.float64, complex: torch.complex128}.get(type(number)))


def _number(like: Any, tensor: torch.Tensor) -> Any:
    """The value of a tensor as a number of the type of ``like``."""
    if isinstance(like, np.ndarray):
        return tensor.numpy()
    return tensor.numpy()[()] if isinstance(like, np.generic) else tensor.item()
