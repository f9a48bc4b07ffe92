"""Pictures of layouts, in which rows are queries and columns are keys."""

from __future__ import annotations

from pathlib import Path

import torch

from shardlib.common.optional import new_figure, save_figure
from shardlib.sparse.cells import cells_text, share_of_cells
from shardlib.sparse.layout import Layout

_PIXELS = 1024


def draw(layout: Layout, head: int = 0, width: int = 64) -> str:
    """One head as text, two characters per block.

    With more than ``width`` blocks a side one cell stands for several blocks, and is the darker the more of them are
    computed. (Blocks on the diagonal count as whole, also in a causal layout.)

    Raises:
        ValueError: a head that the layout does not have, or a width below 1.

    >>> print(sl.sparse.draw(sl.sparse.fixed(96, local=2, causal=True)))
    ██
    ████
      ████
      ██████
      ██  ████
      ██  ██████
    """
    return cells_text(coverage(layout, head, width))


def plot(path: str | Path, layout: Layout, title: str | None = None) -> None:
    """Write a PNG with a panel for each head, making its folder if needed.

    Raises:
        MissingPackage: matplotlib is not installed; names what to install. An ImportError.

    >>> sl.sparse.plot("layout.png", sl.sparse.bigbird(1024))
    """
    figure = new_figure(4 * layout.heads, 4.4)
    positions = layout.size * layout.block
    for head, axes in enumerate(figure.subplots(1, layout.heads, squeeze=False)[0]):
        picture = coverage(layout, head, _PIXELS).numpy()
        axes.imshow(picture, cmap="Blues", vmin=0, vmax=1, extent=(0, positions, positions, 0), interpolation="nearest")
        axes.set(xlabel="key", ylabel="query", title=f"head {head}" if layout.heads > 1 else "")
    kind = ", causal" if layout.causal else ""
    figure.suptitle(title or f"{layout.density:.2%} of {layout.size} × {layout.size} blocks of {layout.block}{kind}")
    save_figure(figure, path)


def coverage(layout: Layout, head: int, width: int) -> torch.Tensor:
    """The share of computed blocks in each of at most ``width`` × ``width`` cells, fp32 ``[cells, cells]``."""
    if not 0 <= head < layout.heads or width < 1:
        raise ValueError(f"head={head} and width={width}: heads are 0 to {layout.heads - 1}, and a width is at least 1")
    return share_of_cells(*layout.pairs(head), layout.size, width)
