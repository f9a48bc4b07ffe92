"""What a LightningModule has besides its layers, the trainer, numbers, lists, metrics: the same for all of its copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardlib.common._compat import own_children
from shardlib.models.copying import Copy, joined

_OF_ALL = vars(nn.Module()).keys()  # what every module has
_SIMPLE = (torch.Tensor, bool, int, float, complex, str, bytes, type(None))


class Belongings:
    """Attributes that hold no part of the model, and metrics, of a module that runs as copies.

    They are one and the same in the module and in the copy that runs: what a step appends, counts and measures is there in
    the module's hooks, and the other way round.

    Args:
        module: the module.
        owner: the class of those parts whose attributes these are.
        metric: classes of parts without parameters that are taken along whole.
    """

    def __init__(self, module: nn.Module, owner: Any, metric: Any) -> None:
        self._module, self._owner, self._metric = module, owner, metric
        self._checked: dict[tuple[str, str], tuple[Any, bool]] = {}  # path, name -> a value, and whether it holds parts
        self._held: dict[str, dict[str, Any]] = {}  # path of a part -> its attributes
        self._children: dict[str, dict[str, nn.Module | None]] = {}  # path of a part with metrics -> all that is in it
        self._metrics: list[tuple[str, str, nn.Module]] = []  # path of a part, name in it

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """A context in which the module is copied, or compared with its copies, and has none of them."""
        self._take()
        try:
            yield
        finally:
            self._give_back()

    @contextmanager
    def lent(self, copied: nn.Module) -> Iterator[None]:
        """A context, inside of the other, in which a copy of the module runs and has them, as the module itself has."""
        owners = {path: copied.get_submodule(path) for path in self._held}
        own = {path: vars(part).keys() - self._held[path].keys() for path, part in owners.items()}
        for path, part in owners.items():
            vars(part).update(self._held[path])
        for path, name, metric in self._metrics:
            own_children(copied.get_submodule(path))[name] = metric
        self._give_back()
        try:
            yield
        finally:
            self._take()
            for path, name, _ in self._metrics:
                del own_children(copied.get_submodule(path))[name]
            for path, part in owners.items():
                self._held[path] |= {name: vars(part).pop(name) for name in vars(part).keys() - own[path]}

    def _take(self) -> None:
        parts: dict[str, nn.Module] = dict(self._module.named_modules())
        self._held = {path: self._taken(path, part) for path, part in parts.items() if isinstance(part, self._owner)}
        inside: set[str] = set()  # paths of metrics, and of what is in them
        children = {path: dict(own_children(part)) for path, part in parts.items()}
        self._metrics = []
        for path, named in children.items():
            for name, child in named.items():
                if path in inside:
                    inside.add(joined(path, name))
                elif isinstance(child, self._metric) and not [*child.parameters(), *child.buffers()]:
                    inside.add(joined(path, name))
                    self._metrics.append((path, name, child))
        self._children = {path: children[path] for path, *_ in self._metrics}
        for path, name, _ in self._metrics:
            del own_children(parts[path])[name]

    def _give_back(self) -> None:
        for path, held in self._held.items():
            vars(self._module.get_submodule(path)).update(held)
        for path, named in self._children.items():  # in their order
            children = own_children(self._module.get_submodule(path))
            children.clear()
            children.update(named)

    def _taken(self, path: str, part: nn.Module) -> dict[str, Any]:
        names = [
            name for name, value in vars(part).items() if name not in _OF_ALL and self._is_apart(path, name, value)
        ]
        return {name: vars(part).pop(name) for name in names}

    def _is_apart(self, path: str, name: str, value: Any) -> bool:
        """Whether an attribute holds no part of the module. The trainer does, and is no attribute of copies."""
        if name == "_trainer" or isinstance(value, _SIMPLE):
            return True
        known, apart = self._checked.get((path, name), (self, False))
        if known is not value:
            module = self._module
            tensors = dict((*module.named_parameters(), *module.named_buffers()))
            apart = not Copy(module.modules(), tensors, {}).holds_parts(value)
            self._checked[path, name] = value, apart
        return apart
