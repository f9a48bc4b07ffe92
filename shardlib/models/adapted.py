"""peft's adapters of single parameters (``target_parameters``), such as those of experts, in the calls of a pure function.

For each call peft parametrizes the module that owns the parameter, which writes to the parameter, and makes it a buffer
unless it is an `nn.Parameter`. Here the adapted weight stands in the parameter's place for the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from shardlib.common._compat import own_parameters

_ACTIVATE = "_activate_lora"  # peft's context in which a wrapper calls the module that it adapts


def is_adapted_parameter(module: nn.Module) -> bool:
    """Whether a module is peft's wrapper of one parameter."""
    return hasattr(module, "parameter_name") and hasattr(module, _ACTIVATE)


def adapt_in_place(module: nn.Module) -> None:
    """Have peft's wrappers of parameters among the submodules put the adapted weight in the parameter's place."""
    for wrapper in filter(is_adapted_parameter, module.modules()):
        setattr(wrapper, _ACTIVATE, MethodType(_adapted, wrapper))


@contextmanager
def _adapted(wrapper: Any, active: Sequence[str]) -> Iterator[None]:
    held = own_parameters(wrapper.get_base_layer())
    name = wrapper.parameter_name
    weight = adapted = held[name]
    for adapter in (adapter for adapter in active if adapter in wrapper.lora_A):
        if wrapper.num_experts > 1:
            left, right, scale = wrapper.get_delta_factors(adapter)
            adapted = torch.baddbmm(adapted, left, right, alpha=scale)
        else:
            adapted = adapted + wrapper.get_delta_weight(adapter)
    held[name] = adapted
    try:
        yield
    finally:
        held[name] = weight
