"""Tensors without memory that stand, in a module's copy, wherever the module held a parameter or a buffer.

In its own dictionaries a module has the tensors of the present call. Whatever else holds a parameter (a plain object, a list,
a closure) has the placeholder, any use of which is a use of the tensor that the module has by its name.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import nn

from shardlib.common._compat import no_torch_function, own_buffers, own_parameters, pytree, wrapper_subclass
from shardlib.errors import TreeError
from shardlib.models.copying import Copy


class Placeholder(torch.Tensor):
    """A tensor that stands for a parameter or buffer of a module; see the module's docstring.

    Args:
        path: the name of the tensor in the whole module.
        like: the tensor.
    """

    _owner: nn.Module
    _path: str

    @staticmethod
    def __new__(cls, path: str, like: torch.Tensor) -> Placeholder:
        with no_torch_function():
            made = wrapper_subclass(cls, like.shape, dtype=like.dtype, device=torch.device("meta"))
        made._path, made._is_param = path, isinstance(like, nn.Parameter)  # what isinstance(made, nn.Parameter) asks
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def present(self) -> torch.Tensor:
        """The tensor that the module has now.

        Raises:
            TreeError: the module is in no call that has it.
        """
        name = self._path.rpartition(".")[2]
        held = own_parameters(self._owner).get(name, own_buffers(self._owner).get(name))
        if held is None or held is self:
            raise TreeError(
                f"{self._path} is used outside of a call that has it: by a block that it is not a parameter of, or after the "
                "call. Use it inside of apply(params, ...)"
            )
        if not torch.is_grad_enabled() and _in_function():
            raise TreeError(
                f"{self._path} was given to an autograd.Function, or to what runs in one, by what is no module (a closure, a "
                "list, a plain object), so that it would get no gradient. Give the function the module's own attribute, or a "
                "view: weight.view_as(weight)"
            )
        return held

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Placeholder, Placeholder.present, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        paths = {value._path for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Placeholder)}
        raise TreeError(
            f"{', '.join(sorted(paths))}: read by code below torch's functions, through what is no module (a closure, a "
            "list, a plain object). Read the module's own attribute"
        )


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def _in_function() -> bool:
    """Whether the forward of an autograd.Function runs, whose arguments alone are differentiated."""
    frame = sys._getframe()
    while frame.f_code is not _APPLY and frame.f_back:
        frame = frame.f_back
    return frame.f_code is _APPLY


class Copied(NamedTuple):
    """A copy of a module in which each parameter and buffer is one placeholder, wherever the module has it.

    Attributes:
        copier: what made the copy.
        placeholders: by the names of parameters and buffers; of tied ones the first.
    """

    module: nn.Module
    copier: Copy
    placeholders: dict[str, Placeholder]


def copy_with_placeholders(module: nn.Module) -> Copied:
    """A copy of a module, or of the module of another `Copied`."""
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    placeholders = {name: Placeholder(name, tensor) for name, tensor in tensors.items()}
    held: dict[int, Any] = {id(tensor): placeholders[name] for name, tensor in tensors.items()}
    copier = Copy(module.modules(), tensors, held)
    made = copier(module)
    for name, placeholder in placeholders.items():
        placeholder._owner = made.get_submodule(name.rpartition(".")[0])
    return Copied(made, copier, placeholders)
