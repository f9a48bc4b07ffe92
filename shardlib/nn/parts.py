"""The parts of a module that runs as a function of its parameters, for what follows it by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch
from torch import nn

# ``follow(module, parameters)`` is a context in which the module is called with these parameters (dotted name -> tensor).
Follow = Callable[[nn.Module, Mapping[str, torch.Tensor]], AbstractContextManager[None]]

# What follows the parts of modules. A profile sets it for the duration of a loss.
following: ContextVar[Follow | None] = ContextVar("following", default=None)
