"""A module whose values lie in shards: what stands for its parameters has none meanwhile; they are whole again afterwards."""

from __future__ import annotations

import glob
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardlib.common._compat import own_parameters, wrapper_subclass
from shardlib.errors import TreeError
from shardlib.optim.train_state import TrainState
from shardlib.sharded.unshard import stream_weights
from shardlib.tree import leaves_of


class Elsewhere(torch.Tensor):
    """What stands for a parameter whose value lies in shards: it has a shape, and refuses what would compute with it, which
    on the meta device would do nothing (an average of weights, a weight that is clamped).

    Args:
        name: the parameter's.
        like: a tensor of its shape and dtype.
    """

    _path: str

    @staticmethod
    def __new__(cls, name: str, like: torch.Tensor) -> Elsewhere:
        made: Elsewhere = wrapper_subclass(cls, like.shape, dtype=like.dtype, device=torch.device("meta"))
        made._path = name
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return Elsewhere(args[0]._path, args[0])
        name = next(each._path for each in leaves_of((args, kwargs or {})) if isinstance(each, Elsewhere))
        raise TreeError(
            f"{name} has its value in shards while the model trains: wait for the end, when the module has it, or read "
            "sl.unshard(train_state), on all ranks, of the Trainer or its strategy"
        )


def empty(module: nn.Module) -> dict[int, nn.Parameter]:
    """Take the values out of a module's parameters; returns the new ones by the ``id`` of those before."""
    return _replace(module, Elsewhere)


def fill(module: nn.Module, state: TrainState) -> None:
    """Give a module the state's parameters and buffers, whole. Every rank must call it."""
    values = whole_weights(module, state)
    _replace(module, lambda name, _: values[name])
    for name, buffer in state.buffers.items():
        if buffer is not None:
            module.get_buffer(name).copy_(buffer)


def whole_weights(
    module: nn.Module, state: TrainState, *, kept: bool = True, trained: bool = False
) -> dict[str, torch.Tensor]:
    """What ``module.state_dict()`` would be with the state's values, on the CPU. Every rank must call it.

    Args:
        kept: whether this rank keeps them; one that does not holds a bucket at a time, and is given an empty dictionary.
        trained: whether parameters that are not trained are left out.
    """
    leaves = {
        name: leaf
        for name, leaf in module.named_parameters(remove_duplicate=False)
        if leaf.requires_grad or not trained
    }
    only = [glob.escape(name.replace(".", "/")) for name in leaves]
    streamed = {leaves[name]: leaf.to("cpu", copy=True) for name, leaf in stream_weights(state, only) if kept}
    if not kept:
        return {}
    weights = {name: streamed[leaf] for name, leaf in leaves.items() if leaf in streamed}  # tied ones by each name
    stored = module.state_dict().keys()
    return weights | {name: leaf.cpu() for name, leaf in state.buffers.items() if name in stored and leaf is not None}


def _replace(module: nn.Module, value: Callable[[str, nn.Parameter], torch.Tensor]) -> dict[int, nn.Parameter]:
    new: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in new:
            new[id(parameter)] = nn.Parameter(value(name, parameter), parameter.requires_grad)
    for owner in module.modules():
        held: dict[str, Any] = own_parameters(owner)
        held.update({leaf: new[id(parameter)] for leaf, parameter in held.items() if parameter is not None})
    return new
