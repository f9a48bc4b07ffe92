"""Operating systems: what some of them lack is said where it is used, so that all of the library can be imported on each."""

from __future__ import annotations

import sys

from shardlib.errors import UnsupportedError

LINUX, MACOS = "linux", "darwin"
_NAMES = {LINUX: "Linux", MACOS: "macOS"}


def require_system(what: str, *systems: str) -> None:
    """Raise `UnsupportedError` unless this is one of ``systems``, which have the calls that ``what`` makes."""
    if sys.platform not in systems:
        names = " and ".join(_NAMES[system] for system in systems)
        have = "has" if len(systems) == 1 else "have"
        remedy = " (on Windows, WSL is Linux)" if sys.platform == "win32" else ""
        raise UnsupportedError(
            f"{what} makes system calls that only {names} {have}, and this is {sys.platform}. Run it there{remedy}"
        )
