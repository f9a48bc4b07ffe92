"""peft's adapters: what must be known of their modules.

Of single parameters (``target_parameters``), such as those of experts: for each call peft parametrizes the module that owns
the parameter, which writes to the parameter, and makes it a buffer unless it is an `nn.Parameter`. Here the adapted weight
stands in the parameter's place for the call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from shardlib.common._compat import own_parameters
from shardlib.errors import TreeError, listing
from shardlib.models.copying import joined

_ACTIVATE = "_activate_lora"  # peft's context in which a wrapper calls the module that it adapts


def require_no_adapters(module: nn.Module, names: Collection[str]) -> None:
    """Refuse to draw adapters as other modules are drawn: an adapter starts by its own rule, most as no change. Raises
    `TreeError`: some are adapters; lists them. ``names``: of the parameters that are to be drawn."""
    inside = [
        f"{joined(path, part)}."
        for path, owner in module.named_modules()
        for part in getattr(owner, "adapter_layer_names", ())
    ]
    if adapters := [name for name in sorted(names) if name.startswith(tuple(inside))]:
        raise TreeError(
            f"adapters of peft on the meta device have lost how they start:\n{listing(adapters)}\nAdd them by "
            "sl.checkpoint.from_pretrained(..., change=lambda model: peft.get_peft_model(model, config)), or to a model with "
            "values"
        )


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
