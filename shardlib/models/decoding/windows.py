"""Sliding windows of transformers' decoders: which layers have one, as each architecture computes them.

Configurations may have settings that their models ignore, so what a setting means is stated by kind of model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardlib.errors import TreeError

# ``windows(config)``: the sliding window of each layer, None for attention to all tokens.
Windows = Callable[[Any], Sequence[int | None]]


def nowhere(config: Any) -> list[int | None]:
    """No layer has a window, whatever the configuration says."""
    return [None] * config.num_hidden_layers


def everywhere(config: Any) -> list[int | None]:
    """Every layer has the window ``sliding_window``, or none where that is None; ``layer_types`` is not read."""
    return [config.sliding_window] * config.num_hidden_layers


def by_layer(config: Any) -> list[int | None]:
    """The layers have a window that ``layer_types`` calls "sliding_attention".

    Raises:
        TreeError: other kinds of layers than that and "full_attention".
    """
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    unknown = sorted(set(config.layer_types) - set(windows))
    if unknown:
        raise TreeError(f"generate cannot run layers of the types {', '.join(unknown)}; it knows {', '.join(windows)}")
    return [windows[kind] for kind in config.layer_types]
