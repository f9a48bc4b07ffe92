"""Smoothing of noisy curves."""

from collections.abc import Sequence

import numpy as np


def running_mean(values: Sequence[float], share: float) -> np.ndarray:
    """For each value, the mean over a ``share`` of all values around it; centred, so that it does not lag behind."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    # The window is narrower near both ends, so that it is centred there too.
    reach = np.minimum(int(len(values) * share / 2), np.minimum(at, len(values) - 1 - at))
    return (sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)
