"""Partition specs: on which mesh axes each dimension of a tensor lies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from shardlib.common.thresholds import chunks
from shardlib.errors import SpecError, axes_named, listing

Entry = str | tuple[str, ...] | None
Sizes = Mapping[str, int]


class Window(NamedTuple):
    """The elements of a tensor that a slice holds: the tensor's shape, and the slice's first index and size per dimension."""

    shape: tuple[int, ...]
    first: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Window:
        """The window of all elements."""
        return cls(shape, (0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def overlap(self, other: Window) -> Window | None:
        """The window of the elements that this one and another one of the same tensor share, or None."""
        first = tuple(map(max, self.first, other.first))
        ends = (min(a + m, b + n) for a, m, b, n in zip(self.first, self.sizes, other.first, other.sizes, strict=True))
        sizes = tuple(end - start for start, end in zip(first, ends, strict=True))
        return Window(self.shape, first, sizes) if all(size > 0 for size in sizes) else None

    def inside(self, outer: Window) -> Window:
        """This window as one of the slice ``outer``, in which it lies."""
        return Window(outer.sizes, tuple(a - b for a, b in zip(self.first, outer.first, strict=True)), self.sizes)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The slice of a whole tensor: a view."""
        for dim, (first, size) in enumerate(zip(self.first, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, first, size)
        return tensor


class P:
    """A partition spec, immutable and refused at construction when it is malformed.

    ``P("data", None, ("model", "expert"))`` has one entry per dimension: an axis, none, or several axes major
    to minor. Missing trailing entries mean none. ``P.flat("data")`` is the flattened tensor, padded with
    zeros to a multiple of the axis and cut into equal chunks, for sizes that do not divide. Entries and flat
    axes combine: the entries slice the tensor first, then the slice is flattened (``P(None, "model", flat=("data",))``).

    ``P("model", padded=True)`` pads dimension 0 with rows of zeros to a multiple of the number of ranks, so that every slice
    has equally many rows. A tensor's shape never includes padding. `local_shape`, the shape of what a rank holds, does;
    `window` says which of the tensor's elements a rank holds. Only dimension 0 can be padded, since a slice's padding then
    follows all of its elements in memory, as a flat chunk's does.

    Raises:
        SpecError: an axis twice, an entry that is not an axis name, a tuple of names or None, or ``padded`` without an
            entry for dimension 0.
    """

    __slots__ = ("entries", "flat_axes", "padded")

    entries: tuple[tuple[str, ...], ...]
    flat_axes: tuple[str, ...]
    padded: bool

    def __init__(self, *entries: Entry, flat: Sequence[str] = (), padded: bool = False) -> None:
        normal = [_entry(entry) for entry in entries]
        while normal and not normal[-1]:
            normal.pop()
        object.__setattr__(self, "entries", tuple(normal))
        object.__setattr__(self, "flat_axes", _entry(tuple(flat)))
        object.__setattr__(self, "padded", padded)
        axes = self.axes
        repeated = sorted({axis for axis in axes if axes.count(axis) > 1})
        if repeated:
            raise SpecError(f"{self!r} uses {axes_named(repeated)} twice; each axis may appear once")
        if padded and not (normal and normal[0]):
            raise SpecError(f"{self!r} pads dimension 0, which no axis lies on; P.flat(axis) pads the flattened tensor")

    @classmethod
    def flat(cls, *axes: str) -> P:
        """The flattened, padded tensor cut along ``axes``, major to minor."""
        return cls(flat=axes)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis the spec uses, in order of dimension, flat axes last."""
        return tuple(axis for entry in self.entries for axis in entry) + self.flat_axes

    def split(self, axes: Sequence[str], shape: Sequence[int], sizes: Sizes) -> P:
        """This spec with ``axes`` added: on dimension 0 where its size divides, else on the flattened tensor.

        Where dimension 0 divides both give the same memory layout (a chunk of the contiguous tensor is its shard), so the
        choice is only one of description. ``shape`` is the global shape. Axes of size one are left out.
        """
        axes = tuple(axis for axis in axes if sizes[axis] > 1)
        if not axes:
            return self
        local = self.local_shape(shape, sizes) if not self.flat_axes else ()
        ways = math.prod(sizes[axis] for axis in axes)
        if local and local[0] % ways == 0 and local[0] > 0:
            head = self.entries[0] if self.entries else ()
            return P(head + axes, *self.entries[1:], padded=self.padded)
        return P(*self.entries, flat=self.flat_axes + axes, padded=self.padded)

    def beside(self, other: P) -> P | None:
        """The spec with the entries of both; None where both lay axes on one dimension, have an axis in common, or cut the
        flattened tensor."""
        length = max(len(self.entries), len(other.entries))
        mine, yours = ((*spec.entries, *[()] * (length - len(spec.entries))) for spec in (self, other))
        if {*self.axes} & {*other.axes} or self.flat_axes or other.flat_axes or any(map(all, zip(mine, yours))):
            return None
        return P(*(a or b for a, b in zip(mine, yours)), padded=self.padded or other.padded)

    def problems(self, shape: Sequence[int], sizes: Sizes) -> list[str]:
        """Why this spec does not fit ``shape`` on a mesh of these ``sizes``; empty when it does."""
        problems = [
            f"axis {axis!r} is not on the mesh (axes: {', '.join(map(repr, sizes)) or 'none'})"
            for axis in self.axes
            if axis not in sizes
        ]
        if len(self.entries) > len(shape):
            problems.append(f"{self!r} has {len(self.entries)} entries for {len(shape)} dimensions")
        if problems:
            return problems
        for dim, (entry, size) in enumerate(zip(self.entries, self._whole(shape, sizes), strict=False)):
            ways = math.prod(sizes[axis] for axis in entry)
            if ways and size % ways:
                names = " × ".join(f"{axis}={sizes[axis]}" for axis in entry)
                problems.append(f"dimension {dim} of size {size} is not divisible by {ways} ({names})")
        return problems

    def local_shape(self, shape: Sequence[int], sizes: Sizes) -> tuple[int, ...]:
        """The shape of one rank's shard, padding included; one-dimensional under flat axes."""
        local = list(self._whole(shape, sizes))
        for dim, entry in enumerate(self.entries):
            for axis in entry:
                local[dim] //= sizes[axis]
        if not self.flat_axes:
            return tuple(local)
        return (chunk_size(math.prod(local), math.prod(sizes[axis] for axis in self.flat_axes)),)

    def window(self, shape: Sequence[int], sizes: Sizes, coords: Mapping[str, int]) -> Window:
        """The slice of the rank at ``coords``, without padding. Flat axes are not applied."""
        first, steps = [0] * len(shape), list(self._whole(shape, sizes))
        for dim, entry in enumerate(self.entries):
            for axis in entry:
                steps[dim] //= sizes[axis]
                first[dim] += coords[axis] * steps[dim]
        first = [min(start, size) for start, size in zip(first, shape, strict=True)]
        held = [min(step, size - start) for step, size, start in zip(steps, shape, first, strict=True)]
        return Window(tuple(shape), tuple(first), tuple(held))

    def _whole(self, shape: Sequence[int], sizes: Sizes) -> tuple[int, ...]:
        """The shape of all slices together, padding included."""
        if not self.padded:
            return tuple(shape)
        ways = math.prod(sizes[axis] for axis in self.entries[0])
        return (chunk_size(shape[0], ways) * ways, *shape[1:])

    def local_numel(self, shape: Sequence[int], sizes: Sizes) -> int:
        return math.prod(self.local_shape(shape, sizes))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a spec is immutable; build a new one instead of setting {name!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self._key

    @property
    def _key(self) -> tuple[Any, ...]:
        return self.entries, self.flat_axes, self.padded

    def __repr__(self) -> str:
        if self.flat_axes and not self.entries:
            return f"P.flat({', '.join(map(repr, self.flat_axes))})"
        arguments = [repr(entry[0] if len(entry) == 1 else entry or None) for entry in self.entries]
        if self.flat_axes:
            arguments.append(f"flat={self.flat_axes!r}")
        if self.padded:
            arguments.append("padded=True")
        return f"P({', '.join(arguments)})"


def _rebuild(entries: tuple[tuple[str, ...], ...], flat_axes: tuple[str, ...], padded: bool) -> P:
    return P(*entries, flat=flat_axes, padded=padded)


def _entry(entry: Entry) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, tuple) and all(isinstance(axis, str) for axis in entry):
        return entry
    raise SpecError(f"{entry!r} is not a spec entry; use an axis name, a tuple of axis names, or None")


def chunk_size(numel: int, ways: int) -> int:
    """Elements per chunk when ``numel`` elements are padded and cut into ``ways`` equal chunks."""
    return -(-numel // ways)


WHOLE = P()


@dataclass(frozen=True)
class Leaf:
    """The path, global shape, dtype, spec and memory of one tensor of the training state."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: P = WHOLE
    memory: str = "device"

    def local_bytes(self, sizes: Sizes) -> int:
        """Bytes one rank holds, padding included."""
        return self.spec.local_numel(self.shape, sizes) * self.dtype.itemsize


def check_leaves(leaves: Sequence[Leaf], sizes: Sizes) -> None:
    """Raise one `SpecError` that lists every leaf whose spec does not fit its shape and the mesh."""
    failures = [
        f"{leaf.path}: shape {tuple(leaf.shape)} with {leaf.spec!r}: {problem}"
        for leaf in leaves
        for problem in leaf.spec.problems(leaf.shape, sizes)
    ]
    if failures:
        mesh = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise SpecError(
            f"{len(failures)} specs do not fit the mesh ({mesh}):\n{listing(failures)}\nUse another axis or mesh, or "
            "P.flat(axis), whose sizes need not divide"
        )


def shard_of(tensor: torch.Tensor, spec: P, sizes: Sizes, coords: Mapping[str, int]) -> torch.Tensor:
    """The view of a whole tensor that `P.window` describes: the slice of the rank at ``coords``, without padding."""
    return spec.window(tensor.shape, sizes, coords).of(tensor)


# `IndexMap`: the elements of a whole parameter that a rank holds.


class Box(NamedTuple):
    """Whole rows (along dimension 0) of a slice of a parameter, which hold some consecutive elements of the slice.

    Attributes:
        shape: the number of rows, and the slice's sizes in the other dimensions.
        first: the box's first index in each dimension of the parameter.
        skip: elements of the box before the consecutive elements.
    """

    shape: tuple[int, ...]
    first: tuple[int, ...]
    skip: int

    def without(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The view of ``tensor`` that this box covers; ``tensor`` has the parameter's dimensions except ``dim``."""
        kept = [param_dim for param_dim in range(len(self.shape)) if param_dim != dim]
        for tensor_dim, param_dim in enumerate(kept):
            tensor = tensor.narrow(tensor_dim, self.first[param_dim], self.shape[param_dim])
        return tensor


@dataclass(frozen=True)
class IndexMap:
    """Consecutive elements of a slice of a parameter, in row-major order, and their indices in the parameter.

    Attributes:
        window: the slice.
        start: the index in the flattened slice of the first element.
    """

    window: Window
    start: int

    @classmethod
    def of_whole(cls, shape: tuple[int, ...]) -> IndexMap:
        """The map of all elements of a parameter that is not sliced."""
        return cls(Window.whole(shape), 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return self.window.shape

    def chunks(self, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, IndexMap]]:
        """Flat views of a contiguous tensor that holds the mapped elements, a chunk each, with each chunk's own map."""
        done = 0
        for (chunk,) in chunks((tensor,)) if tensor.numel() else ():
            yield chunk.view(-1), self.after(done)
            done += chunk.numel()

    def box(self, count: int) -> Box:
        """The fewest rows that hold the first ``count`` elements."""
        _, first, sizes = self.window
        inner = math.prod(sizes[1:])
        row, skip = divmod(self.start, max(inner, 1))
        rows = -(-(skip + count) // max(inner, 1))
        return Box((rows, *sizes[1:]), (first[0] + row, *first[1:]), skip)

    def after(self, count: int) -> IndexMap:
        """The map of the elements that follow the first ``count``."""
        return replace(self, start=self.start + count)

    def flat(self, count: int, device: torch.device | None = None) -> torch.Tensor:
        """Indices in the flattened parameter of the first ``count`` elements, int64 ``[count]``."""
        numbers = torch.arange(self.start, self.start + count, device=device)
        shape, first, sizes = self.window
        if sizes == shape or not count:
            return numbers
        indices, stride, inner = torch.zeros_like(numbers), math.prod(shape), math.prod(sizes)
        for size, offset, whole in zip(sizes, first, shape, strict=True):
            stride, inner = stride // whole, inner // size
            indices += (numbers // inner % size + offset) * stride
        return indices
