"""Tensors without values that know which boxes of other tensors they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from shardlib.common._compat import no_torch_function
from shardlib.errors import TreeError
from shardlib.mesh.specs import Window


class Origin(NamedTuple):
    """A box of a tensor, and the box of another tensor that holds the same elements in the same order.

    Attributes:
        box: the box of the tensor.
        name: the other tensor's name.
        held: its box.
        dims: for each dimension of ``box`` the one of ``held`` in which it lies; None for one of size 1 that ``held`` lacks.
    """

    box: Window
    name: str
    held: Window
    dims: tuple[int | None, ...]

    def within(self, box: Window) -> Origin | None:
        """The part of it that lies in a box of the tensor, or None."""
        shared = self.box.overlap(box)
        if shared is None:
            return None
        first, sizes = list(self.held.first), list(self.held.sizes)
        for dim, held in enumerate(self.dims):
            if held is not None:
                first[held] += shared.first[dim] - self.box.first[dim]
                sizes[held] = shared.sizes[dim]
        return self._replace(box=shared, held=Window(self.held.shape, tuple(first), tuple(sizes)))

    def inverse(self, name: str) -> Origin:
        """The same of the other tensor, whose elements ``name`` holds."""
        dims = (self.dims.index(dim) if dim in self.dims else None for dim in range(len(self.held.shape)))
        return Origin(self.held, name, self.box, tuple(dims))


class Followed(torch.Tensor):
    """A tensor without values, made of other tensors by joining and cutting them.

    Attributes:
        origins: boxes that together are the tensor, and where their elements come from.

    Raises:
        TreeError: from any function that makes tensors in another way.
    """

    origins: tuple[Origin, ...]

    @staticmethod
    def make(like: torch.Tensor, origins: Iterable[Origin]) -> Followed:
        """A tensor of the dtype and shape of ``like``."""
        made = torch.empty(like.shape, dtype=like.dtype, device="meta").as_subclass(Followed)
        made.origins = tuple(origins)
        return made

    @staticmethod
    def whole(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Followed:
        """A tensor that is the one of this name."""
        window = Window.whole(shape)
        like = torch.empty(shape, dtype=dtype, device="meta")
        return Followed.make(like, [Origin(window, name, window, tuple(range(len(shape))))])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _RULES.get(func.__name__)
        with no_torch_function():
            result = (rule or func)(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        if rule is None and any(isinstance(each, torch.Tensor) for each in made):
            raise TreeError(
                f"transformers changes these tensors by {func.__name__}, and only joined and cut ones are read and written "
                "box by box: load the model with transformers' own from_pretrained, then sl.from_module"
            )
        return result


def _cat(tensors: Sequence[Followed], dim: int = 0) -> Followed:
    made = torch.cat(tensors, dim)  # type: ignore[arg-type]
    dim, starts = dim % made.dim(), [0]
    for tensor in tensors:
        starts.append(starts[-1] + tensor.shape[dim])
    return Followed.make(made, (_moved(o, made, dim, start) for t, start in zip(tensors, starts) for o in t.origins))


def _moved(origin: Origin, made: torch.Tensor, dim: int, start: int) -> Origin:
    first = list(origin.box.first)
    first[dim] += start
    return origin._replace(box=Window(tuple(made.shape), tuple(first), origin.box.sizes))


def _stack(tensors: Sequence[Followed], dim: int = 0) -> Followed:
    dim %= tensors[0].dim() + 1
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)


def _unsqueeze(tensor: Followed, dim: int) -> Followed:
    def wider(origin: Origin) -> Origin:
        shape, first, sizes = ((*part[:dim], one, *part[dim:]) for part, one in zip(origin.box, (1, 0, 1), strict=True))
        return origin._replace(box=Window(shape, first, sizes), dims=(*origin.dims[:dim], None, *origin.dims[dim:]))

    return Followed.make(tensor.unsqueeze(dim), map(wider, tensor.origins))


def _squeeze(tensor: Followed, dim: int) -> Followed:
    dim %= tensor.dim()
    if tensor.shape[dim] != 1:
        return tensor

    def narrower(origin: Origin) -> Origin:
        shape, first, sizes = ((*part[:dim], *part[dim + 1 :]) for part in origin.box)
        return origin._replace(box=Window(shape, first, sizes), dims=(*origin.dims[:dim], *origin.dims[dim + 1 :]))

    return Followed.make(tensor.squeeze(dim), map(narrower, tensor.origins))


def _split(tensor: Followed, sizes: int | list[int], dim: int = 0) -> tuple[Followed, ...]:
    return _cuts(tensor, torch.split(tensor, sizes, dim), dim)


def _chunk(tensor: Followed, chunks: int, dim: int = 0) -> tuple[Followed, ...]:
    return _cuts(tensor, torch.chunk(tensor, chunks, dim), dim)


def _unbind(tensor: Followed, dim: int = 0) -> tuple[Followed, ...]:
    return tuple(_squeeze(cut, dim) for cut in _split(tensor, 1, dim))


def _cuts(tensor: Followed, made: Sequence[torch.Tensor], dim: int) -> tuple[Followed, ...]:
    """The followed tensors of ``made``, into which ``tensor`` is cut along ``dim``."""
    found, start, dim = [], 0, dim % tensor.dim()
    for cut in made:
        first = tuple(start if each == dim else 0 for each in range(tensor.dim()))
        box = Window(tuple(tensor.shape), first, tuple(cut.shape))
        parts = (part for origin in tensor.origins if (part := origin.within(box)))
        found.append(Followed.make(cut, [_moved(part, cut, dim, -start) for part in parts]))
        start += cut.shape[dim]
    return tuple(found)


# By name, as a function of torch and the method have the same.
_RULES: dict[str, Callable[..., Any]] = {
    "cat": _cat,
    "stack": _stack,
    "squeeze": _squeeze,
    "split": _split,
    "chunk": _chunk,
    "unbind": _unbind,
    "contiguous": lambda tensor: tensor,
}
