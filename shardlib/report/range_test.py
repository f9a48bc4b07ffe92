"""Evaluation of a learning-rate range test (Smith, arXiv 1506.01186)."""

from collections.abc import Sequence

import numpy as np

SMOOTHED_OVER = 1 / 10  # of the test's steps, as the loss of a batch is noisy
_DIVERGED = 4.0  # times the smallest loss, far above the noise of a batch


def has_diverged(losses: Sequence[float]) -> bool:
    """Whether a range test can stop: the last loss is not finite, or far above the smallest."""
    return not np.isfinite(losses[-1]) or losses[-1] > _DIVERGED * min(losses)


def propose_rate(rates: Sequence[float], losses: Sequence[float]) -> float:
    """The rate at which the loss falls fastest per factor of the rate, on the smoothed curve before its minimum.

    Args:
        rates: one per step, rising.
        losses: one per step, finite.

    Raises:
        ValueError: there are fewer than 10 steps, or the loss never fell.
    """
    if len(losses) < 10:
        raise ValueError(
            f"a range test of {len(losses)} steps is too short; take at least 10, and begin with a lower rate"
        )
    curve = running_mean(losses, SMOOTHED_OVER)
    lowest = int(curve.argmin())
    if lowest < 2:
        raise ValueError("the loss never fell in the range test; begin with a lower rate, or take more steps")
    slopes = np.gradient(curve[: lowest + 1], np.log(rates[: lowest + 1]))
    return float(rates[int(slopes.argmin())])


def running_mean(values: Sequence[float], share: float) -> np.ndarray:
    """For each value, the mean over a ``share`` of all values around it; centred, so that it does not lag behind."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    # The window is narrower near both ends, so that it is centred there too.
    reach = np.minimum(int(len(values) * share / 2), np.minimum(at, len(values) - 1 - at))
    return (sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)
