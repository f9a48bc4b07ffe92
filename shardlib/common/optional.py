"""Optional packages, which only some functions need."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from shardlib.errors import ShardlibError


class MissingPackage(ShardlibError, ImportError):
    """A package that is not installed, and how to install it."""


def require(module: str, purpose: str, package: str, extra: str) -> ModuleType:
    """Import ``module`` of ``package``, which the library's optional dependencies ``extra`` install.

    Raises:
        MissingPackage: the module cannot be imported; says that ``purpose`` needs the package.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        remedy = f"pip install 'shardlib[{extra}]', or {package} alone"
        raise MissingPackage(f"{purpose} needs {package}: {remedy} ({error})") from error


def new_figure(width: float, height: float) -> Any:
    """An empty figure of matplotlib's, in inches, without pyplot, global state or a display.

    Raises:
        MissingPackage: matplotlib is not installed.
    """
    figure = require("matplotlib.figure", "a plot", "matplotlib", "notebooks")
    canvas = require("matplotlib.backends.backend_agg", "a plot", "matplotlib", "notebooks")
    made = figure.Figure(figsize=(width, height), dpi=150, layout="constrained")
    canvas.FigureCanvasAgg(made)
    return made


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure; missing folders are created."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
