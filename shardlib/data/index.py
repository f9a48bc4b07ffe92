"""The samples of a dataset by a metric: the value of each sample, and the samples in the order of their values."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np

from shardlib.errors import BatchError


class Index:
    """A metric of each sample of a dataset. ``len(index)`` is the number of samples.

    Args:
        values: the value of each sample, (N,): finite numbers.
        samples: the samples in the order of their values, (N,); those of one value in their own order. By default they are
            sorted now.

    Raises:
        BatchError: values that are not a list of finite numbers, or none.

    >>> index = sl.data.Index([0.5, 0.1, 0.9, 0.1])
    >>> index.samples.tolist(), index.up_to(0.5)
    ([1, 3, 0, 2], 3)
    """

    def __init__(self, values: Any, samples: np.ndarray | None = None) -> None:
        self.values = np.asarray(values)
        if self.values.ndim != 1 or self.values.dtype.kind not in "iuf" or not len(self.values):
            raise BatchError(
                f"Index: values of {self.values.dtype} and shape {self.values.shape}: give one number for each sample"
            )
        if samples is None:
            refuse_unordered(self.values, 0)
            samples = np.argsort(self.values, kind="stable")
        self.samples = samples

    def __len__(self) -> int:
        return len(self.values)

    def up_to(self, value: float) -> int:
        """The number of samples with at most ``value``: they are the first in ``samples``. Reads log₂ N values."""
        return bisect.bisect_right(range(len(self)), value, key=lambda rank: self.values[self.samples[rank]])


def refuse_unordered(values: np.ndarray, first: int) -> None:
    """Raise `BatchError` for values that are not finite; the first belongs to sample ``first``."""
    wrong = np.flatnonzero(~np.isfinite(values))
    if wrong.size:
        raise BatchError(
            f"the metric of sample {first + int(wrong[0])} is {values[wrong[0]]}, as of {wrong.size} samples: it must be a "
            "finite number for every sample"
        )
