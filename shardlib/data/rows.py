"""Rows of a dataset as a batch: whole arrays at once where the dataset can, else sample by sample."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optree
import torch
from torch.utils.data import IterableDataset, default_collate

from shardlib.errors import BatchError, listing
from shardlib.execute.batches import as_tensors, by_row, hidden_in
from shardlib.tree import flatten, tree_map

Fetch = Callable[[np.ndarray], Any]


class RowsDataset(ABC):
    """The base of datasets that read the rows of a batch at once, by ``rows_at``."""

    @abstractmethod
    def rows_at(self, indices: np.ndarray) -> Any:
        """The batch of the samples at int64 ``indices``."""

    def __getitem__(self, index: int) -> Any:
        return tree_map(lambda leaf: leaf[0], self.rows_at(np.array([index])))


class Arrays(RowsDataset):
    """A pytree of tensors or NumPy arrays whose dimension 0 counts samples, as a dataset.

    Raises:
        BatchError: leaves that are neither, or of different lengths; lists them.
    """

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        paths, leaves, _ = flatten(tree)
        self._length = next((len(leaf) for leaf in leaves if _is_array(leaf)), 0)
        failures = [
            f"{path or 'dataset'}: {_described(leaf)}"
            for path, leaf in zip(paths, leaves, strict=True)
            if not _is_array(leaf) or len(leaf) != self._length
        ]
        if failures:
            raise BatchError(
                f"loader: these are no arrays with one row for each of {self._length} samples:\n{listing(failures)}\nGive "
                "every array as many rows, or pass a list of samples."
            )

    def __len__(self) -> int:
        return self._length

    def rows_at(self, indices: np.ndarray) -> Any:
        where = torch.from_numpy(indices)
        rows = tree_map(
            lambda leaf: leaf[where.to(leaf.device) if isinstance(leaf, torch.Tensor) else indices], self._tree
        )
        return as_tensors(rows, torch.device("cpu"))


def as_dataset(dataset: Any) -> Any:
    """``dataset``, or arrays as `Arrays`. Raises `BatchError` if it has no ``__len__`` or ``__getitem__``, or no samples."""
    if isinstance(dataset, Mapping) or _is_array(dataset):
        dataset = Arrays(dataset)
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise BatchError(
            f"loader: {name} has no length, so that its samples have no order to resume in: use "
            "sl.data.streams([dataset], ...)"
        )
    if not hasattr(dataset, "rows_at") and not hasattr(dataset, "__getitem__"):
        raise BatchError(f"loader: {name} has no __getitem__: pass a list, arrays, or a dataset that can be indexed")
    if not len(dataset):
        raise BatchError(f"loader: {name} has no samples; give a dataset with one at least")
    return dataset


def require_functions(verb: str, collate: Any, map: Any) -> None:
    """Refuse what a batch is made and changed by where it cannot be called.

    Raises:
        BatchError: names the argument and what it is called with.
    """
    for name, given, call in (("collate", collate, "collate(samples)"), ("map", map, "map(batch, step)")):
        if not (given is None or callable(given)):
            raise BatchError(f"{verb}: {name}={given!r}: give a function that returns a batch, {call}, or leave it out")


def fetch_of(dataset: Any, collate: Callable[[list[Any]], Any] | None) -> Fetch:
    """The function from indices to a batch: the dataset's ``rows_at``, or its samples, collated."""
    if collate is None and hasattr(dataset, "rows_at"):
        return dataset.rows_at
    return _Collated(dataset, collate or collated)


def collated(samples: list[Any]) -> Any:
    """A batch of samples by torch's ``default_collate``, to which a list of numbers in a sample is a tensor: token ids, as
    Hugging Face's datasets give them without a format, are rows and no columns."""
    samples = [optree.tree_map(_as_tensor, sample, is_leaf=_is_numbers) for sample in samples]
    paths, firsts, _ = flatten(samples[0])
    leaves = [flatten(sample)[1] for sample in samples] if any(map(_is_array, firsts)) else []
    ragged = []
    for path, *column in zip(paths, *leaves):
        shapes = {tuple(leaf.shape) for leaf in column if isinstance(leaf, (torch.Tensor, np.ndarray))}
        if len(shapes) > 1:
            ragged.append(f"{path or 'the samples'}: {', '.join(map(str, sorted(shapes)))}")
    if ragged:
        raise BatchError(
            f"loader: rows of other shapes make no batch:\n{listing(ragged)}\nPad them by collate=, or lay documents end to "
            "end by sl.data.packed"
        )
    return default_collate(samples)


def _is_numbers(value: Any) -> bool:
    return type(value) is list and bool(value) and all(map(_is_number_or_numbers, value))


def _is_number_or_numbers(value: Any) -> bool:
    return isinstance(value, (int, float)) or _is_numbers(value)


def _as_tensor(leaf: Any) -> Any:
    try:
        return torch.tensor(leaf) if type(leaf) is list else leaf
    except ValueError:  # lists of other lengths within one sample
        return leaf


class _Collated:
    """Samples one by one, or by the dataset's ``__getitems__`` (Hugging Face's reads them in one go)."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __call__(self, indices: np.ndarray) -> Any:
        wanted = indices.tolist()
        many = getattr(self._dataset, "__getitems__", None)
        return self._collate(many(wanted) if many else [self._dataset[index] for index in wanted])


def no_rows(batch: Any) -> Any:
    """A batch without rows, of the dtypes and shapes of ``batch``, which has one. Lists with an entry for it become empty;
    objects that hide tensors are refused."""
    if hidden := hidden_in(batch):
        raise BatchError(
            f"loader: this rank has no rows of the last batch, and makes one without rows of a sample's:\n{listing(hidden)}"
        )

    def emptied(leaf: Any) -> Any:
        if _is_array(leaf):
            return leaf[:0]
        return type(leaf)() if type(leaf) in (list, tuple) else leaf

    return optree.tree_map(emptied, batch, is_leaf=lambda value: by_row(value, 1))


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``; a pinned one is copied while the host goes on."""
    if device.type == "cpu":
        return batch
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf, batch)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim > 0


def _described(leaf: Any) -> str:
    return f"{len(leaf)} rows" if _is_array(leaf) else f"{type(leaf).__name__}, not an array with rows"


# What users give as numbers, as NumPy arrays.


def as_array(values: Any) -> np.ndarray:
    """Values as an array: tensors of any dtype and device, with gradients too, lists of such, and what NumPy takes.

    What makes no array, such as rows of different lengths, is an array without dimensions that holds it.
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        return (values.double() if values.dtype == torch.bfloat16 else values).numpy()
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError):
        if isinstance(values, (list, tuple)) and all(
            isinstance(each, torch.Tensor) and not each.dim() for each in values
        ):
            return np.asarray([each.item() for each in values])
        held = np.empty((), object)
        held[()] = values
        return held
