"""Plots of training runs, with the losses of n-gram models, and of learning-rate range tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardlib.common.display.colours import BLUE, GREY, VERMILLION
from shardlib.common.optional import new_figure, save_figure
from shardlib.report.range_test import SMOOTHED_OVER, running_mean

Curve = Sequence[tuple[int, float]]

_TRAIN, _VALIDATION, _LEVEL = BLUE, VERMILLION, GREY
_LABEL: dict[str, Any] = {"textcoords": "offset points", "ha": "right"}


def plot_losses(
    path: str | Path,
    train: Curve,
    validation: Curve = (),
    ngrams: Sequence[float] = (),
    title: str = "Loss",
) -> None:
    """Writes a PNG with the training loss, its running mean, the validation loss, and a line per n-gram model.

    Args:
        path: the file; missing folders are created.
        train, validation: (step, nats per byte) pairs in the order of their steps.
        ngrams: the losses of `ngram_losses`.

    Raises:
        MissingPackage: matplotlib is not installed; the message says what to install.
    """
    figure, axes = _figure()
    steps = [step for step, _ in train]
    losses = [loss for _, loss in train]
    axes.plot(steps, losses, color=_TRAIN, alpha=0.3, linewidth=0.8)
    axes.plot(steps, running_mean(losses, 1 / 50), color=_TRAIN, linewidth=1.6, label="training")
    if validation:
        points = [step for step, _ in validation], [loss for _, loss in validation]
        axes.plot(*points, color=_VALIDATION, marker="o", markersize=4, linewidth=1.2, label="validation")
        axes.annotate(f"{validation[-1][1]:.3f}", validation[-1], (0, -14), color=_VALIDATION, **_LABEL)
    for order, level in enumerate(ngrams):
        axes.axhline(level, color=_LEVEL, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        at_right_edge = {"xycoords": axes.get_yaxis_transform(), "fontsize": 8, **_LABEL}
        axes.annotate(f"order {order}: {level:.2f}", (1, level), (-4, 3), color=_LEVEL, **at_right_edge)
    axes.set(xlabel="step", ylabel="nats per byte", title=title)
    _save(figure, axes, path)


def plot_range_test(path: str | Path, rates: Sequence[float], losses: Sequence[float], proposed: float) -> None:
    """Writes a PNG with the loss against the learning rate, and the proposed rate.

    Raises:
        MissingPackage: matplotlib is not installed; the message says what to install.
    """
    figure, axes = _figure()
    axes.plot(rates, losses, color=_TRAIN, alpha=0.3, linewidth=0.8, label="loss")
    axes.plot(rates, running_mean(losses, SMOOTHED_OVER), color=_TRAIN, linewidth=1.6, label="smoothed")
    axes.axvline(proposed, color=_VALIDATION, linewidth=1.2, label=f"falls fastest: {proposed:.2g}")
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss", title="Learning-rate range test")
    _save(figure, axes, path)


def _figure() -> tuple[Any, Any]:
    figure = new_figure(8, 4.5)
    return figure, figure.add_subplot()


def _save(figure: Any, axes: Any, path: str | Path) -> None:
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    axes.legend(frameon=False, loc="upper center")
    save_figure(figure, path)
