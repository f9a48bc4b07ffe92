"""Modules that a plan runs in tiles of their tokens (``sl.tile(..., along="tokens")``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardlib.errors import LossError, listing
from shardlib.nn.tiled import tiled


class TiledModules:
    """The modules that run in tiles.

    Args:
        tiles: path of a module's parameters -> number of tiles.
        paths: the paths of all parameters.
    """

    def __init__(self, tiles: Mapping[str, int], paths: Collection[str]) -> None:
        self._tiles, self._paths = dict(tiles), frozenset(paths)
        self._ran = False
        self._known: dict[tuple[str, ...], str] = {}  # names of a tree's parameters -> where the tree is in the plan's

    @contextmanager
    def installed(self, modules: Mapping[str, nn.Module], names: tuple[str, ...]) -> Iterator[None]:
        """A context in which those of ``modules`` (path -> module) that the plan names run in tiles.

        Args:
            names: the paths of the modules' parameters, which may be a part of a larger tree.

        Raises:
            LossError: the plan has several such trees, whose modules run in other numbers of tiles.
        """
        place = self._place(names, modules)
        before = []
        try:
            for path, module in modules.items():
                count = self._tiles.get(f"{place}{path}")
                if count is not None and not isinstance(module.forward, _InTiles):
                    before.append((module, module.__dict__.get("forward")))
                    module.__dict__["forward"] = _InTiles(self, path, count, module.forward)
            yield
        finally:
            for module, forward in before:
                del module.__dict__["forward"]
                if forward is not None:
                    module.__dict__["forward"] = forward

    def _place(self, names: tuple[str, ...], modules: Iterable[str]) -> str:
        """What stands before the paths of parameters, and of their modules, in the plan."""
        if names not in self._known:
            first = next(iter(names), "")
            ends = [path for path in self._paths if f"/{path}".endswith(f"/{first}")] if first else []
            before = [path[: len(path) - len(first)] for path in ends]
            places = sorted(place for place in before if all(f"{place}{name}" in self._paths for name in names))
            counts = {tuple(self._tiles.get(f"{place}{path}") for path in modules) for place in places}
            if len(counts) > 1:
                raise LossError(
                    f"the modules of {' and '.join(place or '(the tree)' for place in places)} have parameters of the same "
                    "names, and the plan runs them in other numbers of tiles; give both the same"
                )
            self._known[names] = places[0] if places else "/"  # which begins no path
        return self._known[names]

    def note(self) -> None:
        """Note that a module ran in tiles."""
        self._ran = True

    def require_some(self) -> None:
        """Refuse a loss in which none of the modules ran.

        Raises:
            LossError: see above.
        """
        if self._tiles and not self._ran:
            raise LossError(
                f"none of the modules that the plan runs in tiles ran:\n{listing(sorted(self._tiles))}\n"
                "sl.tile(along='tokens') finds the modules of sl.from_module by the paths of their parameters; in functions "
                "of your own call sl.nn.tiled"
            )


class _InTiles:
    """The forward of a module, in tiles."""

    def __init__(self, modules: TiledModules, path: str, count: int, forward: Callable[..., Any]) -> None:
        self._modules, self._path, self._count, self._forward = modules, path, count, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._modules.note()
        if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor) or args[0].dim() < 2:
            raise LossError(
                f"{self._path} runs in tiles of its tokens and is called with {len(args)} arguments and {sorted(kwargs)}; it "
                "must be called with one tensor, (batch, tokens, ...) or (tokens, width), and treat every token alone"
            )
        return tiled(self._forward, args[0], self._count, dim=1 if args[0].dim() > 2 else 0)
