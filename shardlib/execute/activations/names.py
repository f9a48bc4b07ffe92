"""A recompute policy that keeps named values (JAX's ``save_only_these_names``).

Operations of a block are numbered in the order in which they run, which recomputation repeats. A value is named after it was
made: the operation that made it is found by the value's memory, what it returned is kept, and recomputation takes that
instead of computing it. Where no operation has made the value as it is (it was written to, as by an all-reduce), it is
copied, and the copy is kept.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from shardlib.common._compat import SELECTIVE_MODES, OperatorMode, pytree, storage_id, version_of, without_top_mode
from shardlib.common.environment import within
from shardlib.errors import HandleError

_UNCOUNTED = {torch.ops.aten.detach.default}  # a checkpoint itself detaches what backward saves


class _Made(NamedTuple):
    """A tensor that an operation of the block made.

    Attributes:
        storage: a weak reference to its memory.
        version: the number of writes to it when it was made.
        operation: the number of the operation.
        layout: the tensor's sizes, strides, offset and dtype.
    """

    storage: Callable[[], Any]
    version: int
    operation: int
    layout: tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]


class _Kept(NamedTuple):
    """What an operation returned, with its version when it was kept."""

    value: torch.Tensor
    version: int


class _Numbering(OperatorMode):
    """Numbers operations, and meets names."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def __enter__(self) -> Any:
        self._next, self._names = 0, 0
        self._within = within(names=self._meet)
        self._within.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self._within.__exit__(*error)
        return super().__exit__(*error)

    def _take(self, operator: Any, args: Any, kwargs: Any) -> Any:
        if operator in _UNCOUNTED:
            return operator(*args, **kwargs)
        number, self._next = self._next, self._next + 1
        return self._numbered(number, operator, args, kwargs)

    @abstractmethod
    def _numbered(self, number: int, operator: Any, args: Any, kwargs: Any) -> Any:
        """The result of the operation of this number."""

    @abstractmethod
    def _meet(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """A value that the block names, as the block goes on with it."""


# The dispatch modes by which policies see what a block computes.
RECOMPUTE_MODES = (*SELECTIVE_MODES, _Numbering)


class Forward(_Numbering):
    """The first run of a block.

    Args:
        save: the names of what is kept.
        seen: the names that there are, which are added to.
    """

    def __init__(self, save: Iterable[str], seen: set[str]) -> None:
        super().__init__()
        self._save, self._seen = frozenset(save), seen
        self._made: dict[int, _Made] = {}
        self.functions: list[Any] = []
        self.kept: dict[int, _Kept] = {}
        self.copied: set[int] = set()  # numbers of the names whose values were copied

    def _numbered(self, number: int, operator: Any, args: Any, kwargs: Any) -> Any:
        given = {storage_id(t.untyped_storage()) for t in pytree.tree_leaves((args, kwargs)) if _is_plain(t)}
        result = operator(*args, **kwargs)
        # Of several results each would have to be kept.
        if _is_plain(result) and (key := storage_id(result.untyped_storage())) not in given:
            layout = tuple(result.size()), tuple(result.stride()), result.storage_offset(), result.dtype
            self._made[key] = _Made(weakref.ref(result.untyped_storage()), version_of(result), number, layout)
        self.functions.append(operator)
        return result

    def _meet(self, x: torch.Tensor, name: str) -> torch.Tensor:
        self._seen.add(name)
        self._names += 1
        if name not in self._save:
            return x
        made = self._maker(x)
        if made is None:
            x = x.clone()
            self.copied.add(self._names)
            made = self._maker(x)
            assert made is not None
        sizes, strides, offset, dtype = made.layout
        with torch.no_grad(), without_top_mode():  # this is no operation of the block
            value = x.detach().view(dtype).as_strided(sizes, strides, offset)
        self.kept[made.operation] = _Kept(value, version_of(x))
        return x

    def _maker(self, x: torch.Tensor) -> _Made | None:
        made = self._made.get(storage_id(x.untyped_storage()))
        alive = made is not None and made.storage() is not None and made.version == version_of(x)
        return made if alive else None


class Again(_Numbering):
    """A run in backward, which takes what the first run kept."""

    def __init__(self, first: Forward) -> None:
        super().__init__()
        self._first = first

    def _numbered(self, number: int, operator: Any, args: Any, kwargs: Any) -> Any:
        earlier = self._first.functions[number : number + 1]
        if earlier != [operator]:
            raise HandleError(
                f"a block with named values (sl.remat(save=)) ran {operator} in backward where it had run "
                f"{earlier[0] if earlier else 'nothing'}; let it run the same operations each time, or leave out save="
            )
        kept = self._first.kept.get(number)
        if kept is None:
            return operator(*args, **kwargs)
        if version_of(kept.value) != kept.version:
            raise HandleError("a named value (sl.remat(save=)) was written to in place; name a copy, or write to one")
        return kept.value.detach()

    def _meet(self, x: torch.Tensor, name: str) -> torch.Tensor:
        self._names += 1
        return x.clone() if self._names in self._first.copied else x


def contexts(save: Iterable[str], seen: set[str]) -> tuple[Forward, Again]:
    """The contexts of the first run of a block and of later ones."""
    first = Forward(save, seen)
    return first, Again(first)


@contextmanager
def noting(seen: set[str]) -> Iterator[None]:
    """A context in which values are named, and none is kept by its name."""

    def note(x: torch.Tensor, name: str) -> torch.Tensor:
        seen.add(name)
        return x

    with within(names=note):
        yield


def require_known(save: Iterable[str], seen: Iterable[str]) -> None:
    """Refuse names that no value has.

    Raises:
        HandleError: names the ones that there are.
    """
    if unknown := sorted(set(save) - set(seen)):
        raise HandleError(
            f"remat(save=...) names {', '.join(map(repr, unknown))}, and no block names a value so (sl.nn.checkpoint_name): "
            f"there {'are ' + ', '.join(map(repr, sorted(seen))) if seen else 'are no names'}"
        )


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided
