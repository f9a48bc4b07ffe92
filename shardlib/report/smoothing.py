"""A curve without its noise."""

from collections.abc import Sequence

import numpy as np


def running_mean(values: Sequence[float], share: float) -> np.ndarray:
    """The mean over a ``share`` of all values around each of them: centred, so that it does not trail a fall."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    # Narrower towards both ends, to stay centred there too.
    reach = np.minimum(int(len(values) * share / 2), np.minimum(at, len(values) - 1 - at))
    return (sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)
