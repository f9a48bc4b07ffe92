"""A look at the first call of a module in each of its modes, for writes that no version counter sees, and for uses of the
parameters of the module that it is a copy of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from shardlib.common._compat import version_of
from shardlib.common.originals import Names, function_of_user
from shardlib.common.writes import Observer, has_place, owner_of, place_of
from shardlib.common.writes import written as written_to
from shardlib.errors import TreeError


class FirstCalls:
    """The first calls of a module, one in each mode: what it writes to its inputs through ``.data``, or by operators that do
    not say so, and whether it reads the parameters of the module that it is a copy of. Later calls are taken to write to the
    same buffers.

    Args:
        modules: all of the module's parts.
        originals: the names of the parameters that have others in their place.
    """

    def __init__(self, modules: Sequence[nn.Module], originals: Names) -> None:
        self._modules, self._originals = modules, originals
        self._written: dict[tuple[bool, ...], set[str]] = {}  # by mode: names of buffers

    def call(
        self, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor | None], written: set[str]
    ) -> AbstractContextManager[None]:
        """A context for one call, which adds to ``written`` the names of buffers that it writes to.

        Raises:
            HandleError: the call writes to a parameter; names it.
            TreeError: the call reads a parameter of the original; names it, and the function that does.
        """
        if torch.compiler.is_compiling():
            return nullcontext()
        mode = tuple(module.training for module in self._modules)
        if mode not in self._written:
            return self._watched(mode, parameters, buffers, written)
        written |= self._written[mode]
        return nullcontext()

    def forget(self) -> None:
        """Look at calls again, of which one was refused: it may be another that a later call in its mode makes."""
        self._written.clear()

    @contextmanager
    def _watched(self, mode: Any, parameters: Any, buffers: Any, written: set[str]) -> Iterator[None]:
        plain = {name: leaf for name, leaf in parameters.items() if has_place(leaf)}
        before = {name: (_state(leaf), leaf.detach()) for name, leaf in plain.items()}
        held = [(name, buffer) for name, buffer in buffers.items() if buffer is not None and has_place(buffer)]

        def writes(tensor: torch.Tensor, operator: str) -> None:
            if (name := owner_of(tensor, held)) is not None:
                written.add(name)
            elif (name := owner_of(tensor, plain.items())) is not None:
                raise written_to(operator, name)

        def reads(tensor: torch.Tensor) -> None:
            if (name := self._originals.get(tensor)) is not None:
                raise TreeError(
                    f"{name} itself is used, not the parameter that is due, by {function_of_user()}. Reach it through the "
                    "module or a closure, which a copy of the module follows, not through a global or a class"
                )

        with Observer(writes, reads if self._originals else None):
            yield
        if changed := [name for name, leaf in plain.items() if _state(leaf) != before[name][0]]:
            for name in changed:
                plain[name].data = before[name][1]  # what was assigned to .data is undone
            raise written_to("the module", *changed)
        self._written[mode] = set(written)


def _state(leaf: torch.Tensor) -> tuple[Any, ...]:
    """What a write in place, or an assignment to ``.data``, changes of a tensor."""
    return place_of(leaf), 0 if leaf.is_inference() else version_of(leaf)
