"""The parts of modules that a loss function calls: layers, and what stands beside them, by their paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from shardlib.common._compat import pytree
from shardlib.common.environment import environment, within


def parts_of(module: nn.Module) -> dict[str, nn.Module]:
    """Dotted name -> part of a module, by the module's own structure.

    The repeated elements of a list (children named 0, 1, …) are parts: layers. So are all other children that have no such
    list inside; those that have one are looked into.

    >>> layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> list(parts_of(torch.nn.ModuleDict({"layers": layers, "head": torch.nn.Linear(4, 2)})))
    ['layers.0', 'layers.1', 'head']
    """
    children = dict(module.named_children())
    alike = Counter(type(child) for child in children.values()) if _is_list(module) else Counter[type]()
    found: dict[str, nn.Module] = {}
    for name, child in children.items():
        if alike[type(child)] < 2 and any(map(_is_list, child.modules())):
            found |= {f"{name}.{inside}": part for inside, part in parts_of(child).items()}
        else:
            found[name] = child
    return found


def _is_list(module: nn.Module) -> bool:
    names = [name for name, _ in module.named_children()]
    return bool(names) and names == [str(number) for number in range(len(names))]


class ModuleHooks:
    """Hooks on the parts of modules while these run.

    Args:
        begin: ``begin(path, tensors)`` is called before a part runs, with the tensors that it is given.
        end: ``end(path, tensors)``, after it, with those that it returns.
        path_of: the path of a leaf that stands for a parameter; None for other tensors.
    """

    def __init__(
        self,
        begin: Callable[[str, list[torch.Tensor]], None],
        end: Callable[[str, list[torch.Tensor]], None],
        path_of: Callable[[torch.Tensor], str | None],
    ) -> None:
        self._begin, self._end, self._path_of = begin, end, path_of
        self._within = 0  # how many modules are followed now, one in another

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which the outermost modules that this thread calls with the plan's parameters are followed, whoever
        put these there (`torch.func.functional_call`)."""
        called = ExitStack()
        outermost: nn.Module | None = None

        def begins(module: nn.Module, args: Any) -> None:
            nonlocal outermost
            # Hooks on all modules are called in all threads: other ranks have followers of their own.
            if torch.compiler.is_compiling() or environment().follows != self.followed or self._within:
                return
            parameters = dict(module.named_parameters(remove_duplicate=False))
            if any(self._path_of(leaf) is not None for leaf in parameters.values()):
                outermost = module
                called.enter_context(self.followed(module, parameters))

        def ends(module: nn.Module, args: Any, result: Any) -> None:
            nonlocal outermost
            if not torch.compiler.is_compiling() and module is outermost and environment().follows == self.followed:
                outermost = None
                called.close()

        hooks = (
            register_module_forward_pre_hook(begins),
            register_module_forward_hook(ends, always_call=True),
        )
        try:
            with within(follows=self.followed):
                yield
        finally:
            for hook in hooks:
                hook.remove()
            called.close()

    @contextmanager
    def followed(self, module: nn.Module, parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """See `shardlib.nn.blocks.Follow`."""
        place = self._place(parameters)
        self._within += 1
        try:
            with ExitStack() as hooks:
                for name, part in parts_of(module).items():
                    path = place + name.replace(".", "/")
                    hooks.enter_context(part.register_forward_pre_hook(self._before(path), with_kwargs=True))
                    hooks.enter_context(part.register_forward_hook(self._after(path)))
                yield
        finally:
            self._within -= 1

    def _place(self, parameters: Mapping[str, torch.Tensor]) -> str:
        """What stands before the paths of a module's parameters in the plan."""
        for name, leaf in parameters.items():
            path = self._path_of(leaf) or ""
            for inside in (name.replace(".", "/"), name):  # a tree of nodes, or a dictionary of dotted names
                if f"/{path}".endswith(f"/{inside}"):  # a tied leaf has the path of one of its names
                    return path.removesuffix(inside)
        return ""

    def _before(self, path: str) -> Callable[..., None]:
        return lambda module, args, kwargs: self._tell(self._begin, path, (args, kwargs))

    def _after(self, path: str) -> Callable[..., None]:
        return lambda module, args, result: self._tell(self._end, path, result)

    def _tell(self, tell: Callable[[str, list[torch.Tensor]], None], path: str, tree: Any) -> None:
        if not torch.compiler.is_compiling():
            tell(path, [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)])
