"""The check of a configuration of transformers for settings that a decoder does not compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardlib.errors import TreeError, listing


def require_settings(config: Any, known: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuses a configuration that has a setting with another value than those ``known``.

    Raises:
        TreeError: lists the settings.
    """
    wrong = [
        f"{name}={getattr(config, name)!r}, and {' or '.join(map(repr, values))} is computed"
        for name, values in known.items()
        if hasattr(config, name) and getattr(config, name) not in values
    ]
    if wrong:
        raise TreeError(
            f"generate cannot run this {type(config).__name__}:\n{listing(wrong)}\nWrite a shardlib.models.decoding.Decoder "
            "for it, and pass that as the model."
        )
