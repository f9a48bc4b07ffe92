"""A picture of a training run: its losses, and the byte models they have to get below."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Curve = Sequence[tuple[int, float]]

_TRAIN, _VALIDATION, _LEVEL = "#3b6ea8", "#c8553d", "#8a8a8a"
_BESIDE: dict[str, Any] = {"textcoords": "offset points", "ha": "right"}


def plot_losses(
    path: str | Path,
    train: Curve,
    validation: Curve = (),
    ngrams: Sequence[float] = (),
    title: str = "Loss",
) -> None:
    """Write a PNG with the training loss (a line, and its running mean), the validation loss (points) and
    one level per n-gram model.

    ``train`` and ``validation`` are (step, nats per byte) pairs in the order of their steps; ``ngrams`` the
    losses of the models of order 0, 1, …, as ``ngram_losses`` gives them. Folders on the way are made.

    Raises ImportError, naming the extra to install, where matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'shardlib[notebooks]'") from error

    # A figure of its own, not pyplot's: nothing global is touched, and no display is asked for.
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [step for step, _ in train]
    losses = [loss for _, loss in train]
    axes.plot(steps, losses, color=_TRAIN, alpha=0.3, linewidth=0.8)
    axes.plot(steps, _running_mean(losses), color=_TRAIN, linewidth=1.6, label="training")
    if validation:
        points = [step for step, _ in validation], [loss for _, loss in validation]
        axes.plot(*points, color=_VALIDATION, marker="o", markersize=4, linewidth=1.2, label="validation")
        axes.annotate(f"{validation[-1][1]:.3f}", validation[-1], (0, -14), color=_VALIDATION, **_BESIDE)
    for order, level in enumerate(ngrams):
        axes.axhline(level, color=_LEVEL, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        at_the_right = {"xycoords": axes.get_yaxis_transform(), "fontsize": 8, **_BESIDE}
        axes.annotate(f"order {order}: {level:.2f}", (1, level), (-4, 3), color=_LEVEL, **at_the_right)
    axes.set(xlabel="step", ylabel="nats per byte", title=title)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    axes.legend(frameon=False, loc="upper center")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _running_mean(losses: Sequence[float]) -> np.ndarray:
    """The mean over a fiftieth of the run around each step: centred, so that it does not trail a fall."""
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    at = np.arange(len(losses))
    # Narrower towards both ends, to stay centred there too.
    reach = np.minimum(len(losses) // 100, np.minimum(at, len(losses) - 1 - at))
    return (sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)
