"""What a learning-rate range test says (Smith, arXiv 1506.01186)."""

from collections.abc import Sequence

import numpy as np

from shardlib.report.smoothing import running_mean

SMOOTHED_OVER = 1 / 10  # of the test: a batch is a noisy sample
_DIVERGED = 4.0  # times the smallest loss: past any noise of a batch


def has_diverged(losses: Sequence[float]) -> bool:
    """Whether a range test has seen enough: the last loss is not finite, or far above the smallest."""
    return not np.isfinite(losses[-1]) or losses[-1] > _DIVERGED * min(losses)


def propose_rate(rates: Sequence[float], losses: Sequence[float]) -> float:
    """The rate at which the loss falls fastest: most per factor of the rate, on the smoothed curve before its minimum.

    Args:
        rates: rising, one per step.
        losses: of the same steps, finite.

    Raises:
        ValueError: fewer than 10 steps, or a loss that never fell.
    """
    if len(losses) < 10:
        raise ValueError(
            f"a range test of {len(losses)} steps tells nothing; take 10 at least, and begin with a lower rate"
        )
    curve = running_mean(losses, SMOOTHED_OVER)
    lowest = int(curve.argmin())
    if lowest < 2:
        raise ValueError("the loss never fell in the range test; begin with a lower rate, or take more steps")
    slopes = np.gradient(curve[: lowest + 1], np.log(rates[: lowest + 1]))
    return float(rates[int(slopes.argmin())])
