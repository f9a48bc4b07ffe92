"""Leaves of a batch that belong to its rows and are not cut with them: lists by row, arrays of objects, hidden tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import optree

from shardlib.common.hidden import TENSORS, held, hides
from shardlib.tree import Tree, flatten, leaves_of, path_name


def uncut(batch: Tree, rows: int) -> list[str]:
    """What is to be said of each of these leaves, with a remedy.

    >>> print(*uncut({"x": torch.ones(2, 3), "words": [["a"], ["b", "c"]], "size": (3,)}, 2))
    words: a list with list for each of 2 rows; make it a tensor, leave it out, or close over it in the loss function if it \
does not belong to rows
    """
    failures = []
    paths, leaves, _ = optree.tree_flatten_with_path(batch, is_leaf=lambda value: by_row(value, rows))
    for path, leaf in zip(paths, leaves, strict=True):
        name = path_name(path) or "batch"
        if isinstance(leaf, np.ndarray):
            if leaf.ndim and len(leaf) == rows:
                failures.append(
                    f"{name}: a NumPy array of {leaf.dtype}, which no tensor holds, with {rows} rows; leave it out, or "
                    "close over it in the loss function if it does not belong to rows"
                )
        elif by_row(leaf, rows):
            entry = type(leaf[0]).__name__ if isinstance(leaf, (list, tuple, deque)) else "an entry"
            failures.append(
                f"{name}: a {type(leaf).__name__} with {entry} for each of {rows} rows; make it "
                "a tensor, leave it out, or close over it in the loss function if it does not belong to rows"
            )
        elif hides(leaf) or (_is_record(leaf) and any(by_row(value, rows) for value in held(leaf))):
            failures.append(_hidden(name, leaf))
    return failures


def by_row(value: Any, rows: int) -> bool:
    """Whether a value is a list, or like one, with an entry for each row, of which nothing is cut."""
    if rows == 0:
        return False
    if type(value) in (list, tuple, deque):
        if len(value) != rows:
            return False
        leaves = leaves_of(list(value))
        return bool(leaves) and not any(isinstance(leaf, TENSORS) and leaf.ndim for leaf in leaves)
    if isinstance(value, (str, bytes, tuple, type, Mapping, *TENSORS)):
        return False
    if not hasattr(value, "__getitem__") or not hasattr(value, "__len__"):
        return False
    return optree.tree_is_leaf(value) and len(value) == rows


def _is_record(leaf: Any) -> bool:
    return isinstance(leaf, Mapping) or is_dataclass(leaf)


def hidden_in(batch: Tree) -> list[str]:
    """What is to be said of the leaves that hide tensors, with a remedy."""
    paths, leaves, _ = flatten(batch)
    return [_hidden(path, leaf) for path, leaf in zip(paths, leaves, strict=True) if hides(leaf)]


def _hidden(path: str, leaf: Any) -> str:
    if isinstance(leaf, Mapping):
        remedy = "pass dict(...) of it"
    elif any(isinstance(value, TENSORS) for value in getattr(leaf, "__dict__", {}).values()):
        remedy = "pass vars(...) of it"
    else:
        remedy = "pass a dict of the tensors in it"
    return f"{path or 'batch'}: {type(leaf).__name__} is not a pytree, so what is in it cannot be cut; {remedy}"
