"""What a module that runs as a function of its parameters is told by those around it: who follows its parts by their names,
and whether it trains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

# ``follow(module, parameters)`` is a context in which the module is called with these parameters (dotted name -> tensor).
Follow = Callable[[nn.Module, Mapping[str, torch.Tensor]], AbstractContextManager[None]]


class _Mode(threading.local):  # no ContextVar, which compiled functions cannot read
    training: bool | None = None


_mode = _Mode()


@contextmanager
def evaluating() -> Iterator[None]:
    """A context in which modules run in eval mode."""
    before, _mode.training = _mode.training, False
    try:
        yield
    finally:
        _mode.training = before


def mode_of_modules() -> bool | None:
    """Whether modules run in train mode (True), in eval mode (False), or as each of them is set (None)."""
    return _mode.training
