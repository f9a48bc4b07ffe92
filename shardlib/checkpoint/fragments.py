"""A train state as named fragments: each a range of one flattened leaf (or slice of a leaf).

Every rank owns a range of every parameter (the optimizer's layout). Parameters, fp32 masters and each tree of the optimizer's
state are cut into these ranges. The names do not depend on the mesh or the ZeRO stage, so a state saved on one mesh is
restored on another by copying the ranges that overlap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardlib.checkpoint.trees import CheckpointTrees
from shardlib.common._compat import storage_id
from shardlib.common.thresholds import Threshold
from shardlib.mesh.mesh import Mesh, rank_of
from shardlib.mesh.specs import Window
from shardlib.optim.base import Packed
from shardlib.plan.buckets import Bucket
from shardlib.plan.plan import Plan
from shardlib.sharded.tree import Sharded
from shardlib.tree import named_leaves, path_name

# Bytes: of a leaf with at least so many for each rank that holds a copy, each of these ranks saves a part.
_DIVIDED = Threshold(1 << 16)

PARAMS, MASTERS, BUFFERS, PENDING, GRADS = "params/", "opt/masters/", "buffers/", "opt/pending/", "grads/"


class Fragment(NamedTuple):
    """A run of elements of one tensor of the state.

    Attributes:
        name: the tensor's name, which all its fragments share.
        start: the index of the first element in the flattened slice.
        data: the elements, flat: a view of the state, or of a file.
        window: the slice, which may be the whole tensor.
    """

    name: str
    start: int
    data: torch.Tensor
    window: Window

    @property
    def stop(self) -> int:
        """The index after the last element's in the flattened slice."""
        return self.start + self.data.numel()

    def part(self, first: int, stop: int) -> Fragment:
        """Elements ``first`` to ``stop`` of this fragment."""
        return self._replace(start=self.start + first, data=self.data[first:stop])

    def parts(self, elements: int) -> Iterator[Fragment]:
        """This fragment cut into fragments of at most ``elements`` elements."""
        for first in range(0, self.data.numel(), elements):
            yield self.part(first, first + elements)

    def boxes(self) -> Iterator[tuple[Window, torch.Tensor]]:
        """The boxes of the tensor that this fragment is, each with its elements, flat."""
        first = 0
        for box in boxes(self.window, self.start, self.stop):
            yield box, self.data[first : first + box.numel]
            first += box.numel


def whole(tensor: torch.Tensor, name: str) -> Fragment:
    """A whole tensor as a fragment: a view of it, or a copy if its elements do not follow each other."""
    return Fragment(name, 0, tensor.detach().reshape(-1).contiguous(), Window.whole(tuple(tensor.shape)))


def without_memory(name: str, like: torch.Tensor) -> Fragment:
    """A whole tensor as a fragment on the meta device."""
    return whole(torch.empty(like.shape, dtype=like.dtype, device="meta"), name)


def owned_fragments(trees: CheckpointTrees, diverged: str | None = None) -> Iterator[Fragment]:
    """The fragments of sharded tensors that this rank saves: the ranges it owns, which ranks with copies share out.

    Args:
        diverged: an axis whose ranks do not have equal parameters now; the first rank's are saved.
    """
    plan, mesh = trees.params.plan, trees.params.mesh
    if diverged is not None and mesh.coords[diverged]:
        return
    for bucket in plan.buckets:
        if plan.counts(bucket, mesh.coords):
            copies = [axis for axis in plan.copies(bucket) if axis != diverged]
            yield from _shared_out(bucket_fragments(trees, bucket), mesh, copies)


def _shared_out(fragments: Iterable[Fragment], mesh: Mesh, copies: Sequence[str]) -> Iterator[Fragment]:
    """This rank's share of fragments of which ranks along the axes ``copies`` hold copies: of large ones each a part."""
    sizes = {axis: mesh.shape[axis] for axis in copies}
    share, shares = rank_of(sizes, mesh.coords), math.prod(sizes.values())
    for number, fragment in enumerate(fragments):
        numel = fragment.data.numel()
        if numel * fragment.data.element_size() >= shares * _DIVIDED():
            first, stop = (numel * index // shares for index in (share, share + 1))
            yield fragment.part(first, stop)
        elif number % shares == share:
            yield fragment


def needed_fragments(trees: CheckpointTrees) -> Iterator[Fragment]:
    """Every range of the sharded tensors that this rank holds, as views to fill."""
    yield from sharded_fragments(trees.params)
    for bucket in trees.params.plan.buckets:
        yield from _of_states(trees, bucket)


def bucket_fragments(trees: CheckpointTrees, bucket: Bucket) -> Iterator[Fragment]:
    """The ranges of a bucket's parameters, and of the optimizer's trees for them, that this rank owns: views."""
    yield from _of_bucket(trees.params, bucket, owned=True)
    yield from _of_states(trees, bucket)


def sharded_fragments(sharded: Sharded, *, owned: bool = False) -> Iterator[Fragment]:
    """Every range that this rank holds of parameters, or of gradients, as views; the ``owned`` ones are each on one rank."""
    plan, mesh = sharded.plan, sharded.mesh
    for bucket in sharded.buckets:
        if not owned:
            yield from _of_bucket(sharded, bucket)
        elif plan.counts(bucket, mesh.coords):
            yield from _shared_out(_of_bucket(sharded, bucket, owned=True), mesh, plan.copies(bucket))


def _of_bucket(sharded: Sharded, bucket: Bucket, *, owned: bool = False) -> Iterator[Fragment]:
    """The ranges of a bucket's parameters or gradients that this rank holds, or owns."""
    prefix, level = (PARAMS, bucket.param_level) if sharded.role == "param" else (GRADS, bucket.levels)
    held = _cut(sharded, bucket, prefix, sharded.buffers[bucket.name], level)
    if not owned or bucket.owners(level) == 1:
        yield from held
        return
    index = bucket.owner(sharded.mesh.coords, level, bucket.levels)
    for fragment, chunk in zip(held, bucket.chunks, strict=True):
        yield fragment.part(*(min(edge * chunk, fragment.data.numel()) for edge in (index, index + 1)))


def _of_states(trees: CheckpointTrees, bucket: Bucket) -> Iterator[Fragment]:
    for prefix, subset, tensor in flat_states(trees, bucket):
        yield from _cut(trees.params, subset, prefix, tensor, subset.levels)


def _cut(sharded: Sharded, bucket: Bucket, prefix: str, buffer: torch.Tensor, level: int) -> Iterator[Fragment]:
    """The fragment of each leaf that this rank's flat ``buffer`` of a bucket holds, without padding."""
    slices, extents = windows(sharded.plan, sharded.mesh, bucket), bucket.extents(sharded.mesh.coords, level)
    for path, extent, shard in zip(bucket.paths, extents, bucket.leaf_segments(buffer, level), strict=True):
        yield Fragment(prefix + path, extent.start, shard[: len(extent)], slices[path])


def windows(plan: Plan, mesh: Mesh, bucket: Bucket) -> dict[str, Window]:
    """Path -> the slice of each leaf of a bucket that this rank holds."""
    if not bucket.slices:
        return {path: Window.whole(shape) for path, shape in zip(bucket.paths, bucket.shapes, strict=True)}
    computes = ((path, plan.placement_of[path].compute) for path in bucket.paths)
    return {path: leaf.spec.window(leaf.shape, plan.sizes, mesh.coords) for path, leaf in computes}


def source_of(name: str, saved: Container[str]) -> str:
    """The name of the saved tensor that fills fragments called ``name``.

    A parameter and its fp32 master stand for each other. The master is preferred, since it has more digits.
    """
    for prefix in (MASTERS, PARAMS):
        if name.startswith(prefix):
            path = name.removeprefix(prefix)
            return MASTERS + path if MASTERS + path in saved else PARAMS + path
    return name


def flat_states(trees: CheckpointTrees, bucket: Bucket) -> Iterator[tuple[str, Bucket, torch.Tensor]]:
    """The flat tensors in the optimizer's layout for a bucket or a subset of its leaves: the path of the tree that a tensor
    belongs to, which begins its names; the bucket of these leaves; the tensor."""
    for prefix, tree in (("opt", trees.opt), ("also", trees.also)):
        for path, leaf in named_leaves(tree):
            for state in flat_tensors(trees.params.plan, path, leaf):
                if state.bucket == bucket.name:
                    yield f"{prefix}/{path_name(state.tree)}/", state.subset, state.data


class FlatState(NamedTuple):
    """A flat tensor in the optimizer's layout.

    Attributes:
        bucket: the name of a bucket.
        subset: the bucket, or the subset of its leaves, whose elements the tensor has.
        tree: the path of the tree that it belongs to, with one such tensor for each bucket.
        data: the tensor, a view of the state.
    """

    bucket: str
    subset: Bucket
    tree: tuple[Any, ...]
    data: torch.Tensor


def flat_tensors(plan: Plan, path: tuple[Any, ...], leaf: Any) -> list[FlatState]:
    """The flat tensors in the optimizer's layout that ``leaf`` is, or is a stack of; none for any other leaf, such as a
    number for each bucket.

    What stands for a bucket may also be a list or another tree of such tensors, or of stacks of them along dimensions before
    the last.
    """
    place = next((at for at in reversed(range(len(path))) if plan.numbering.run_named(path[at])), None)
    if place is None or not isinstance(leaf, torch.Tensor):
        return []
    bucket, subset = plan.numbering.run_named(path[place])  # type: ignore[misc]
    tree = (*path[:place], *path[place + 1 :])
    if place == len(path) - 1 and leaf.numel() == subset.owned:
        return [FlatState(bucket, subset, tree, leaf)]
    if leaf.shape[-1:] != (subset.owned,) or not leaf.is_contiguous():
        return []
    return [
        FlatState(bucket, subset, (*tree, *index), leaf[index])
        for index in itertools.product(*map(range, leaf.shape[:-1]))
    ]


@dataclass(frozen=True)
class Saving:
    """What a rank saves. Iteration gives the fragments with their elements, which are dropped where the caller drops them.

    Attributes:
        trees: with tensors without memory in place of packed ones.
        outlines: the fragments; those of packed tensors have no elements.
    """

    trees: CheckpointTrees
    outlines: Sequence[Fragment]

    def __iter__(self) -> Iterator[Fragment]:
        return decoded(self.trees, self.outlines)


def decoded(trees: CheckpointTrees, fragments: Iterable[Fragment]) -> Iterator[Fragment]:
    """``fragments`` with the elements of packed tensors, decoded or read from disk. Those of one tensor come one after the
    other, so that it is decoded once, and no two are held here."""
    node: Packed | None = None
    values = torch.empty(0)
    for fragment in fragments:
        packed = trees.packed.get(storage_id(fragment.data.untyped_storage()))
        if packed is None:
            yield fragment
            continue
        if node is not packed:
            node, values = packed, torch.empty(0)  # gone before the next is there
            values = packed.unpacked().reshape(-1)
        first = int(fragment.data.storage_offset())
        yield fragment._replace(data=values[first : first + fragment.data.numel()])


# Boxes: a range of a flattened slice as hyper-rectangles of the whole tensor, which other layouts can be compared with.
# A box is a `Window`. A flat chunk of a tensor with N dimensions is at most 2N−1 boxes, each contiguous in the chunk.


def boxes(window: Window, start: int, stop: int) -> list[Window]:
    """The boxes that hold elements ``start`` to ``stop`` of a flattened slice, in the order of the elements."""
    return [
        Window(window.shape, tuple(map(sum, zip(window.first, first, strict=True))), sizes)
        for first, sizes in _rectangles(window.sizes, start, stop)
    ]


def _rectangles(sizes: tuple[int, ...], start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """First index and size in each dimension of the rectangles of a range."""
    if start >= stop:
        return []
    if not sizes:
        return [((), ())]
    inner = sizes[1:]
    row = math.prod(inner)
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:  # the range lies inside one row
        return [((last, *at), (1, *size)) for at, size in _rectangles(inner, start - last * row, stop - last * row)]
    head = [((first - 1, *at), (1, *size)) for at, size in _rectangles(inner, start % row, row)] if start % row else []
    rows = [((first, *(0 for _ in inner)), (last - first, *inner))] if first < last else []
    tail = [((last, *at), (1, *size)) for at, size in _rectangles(inner, 0, stop % row)]
    return head + rows + tail


class Runs(NamedTuple):
    """The elements of a box inside another one's memory: runs of equal length.

    Attributes:
        length: elements of a run.
        ranges: the indices of the runs' first elements in the flattened outer box, as sums of one number of each range.
    """

    length: int
    ranges: tuple[range, ...]

    def starts(self) -> Iterator[int]:
        """The index of each run's first element in the flattened outer box."""
        return (sum(at) for at in itertools.product(*self.ranges))


def runs(inner: Window, outer: Window) -> Runs:
    """The runs of ``inner``, which lies in ``outer``, in the memory of ``outer``, in order."""
    length, stride, covered = 1, 1, True
    ranges: list[range] = []
    for at, size, first, extent in reversed(list(zip(inner.first, inner.sizes, outer.first, outer.sizes, strict=True))):
        begin = (at - first) * stride
        if covered:  # all dimensions so far from end to end, so the elements of this one follow each other
            length, ranges = length * size, [range(begin, begin + 1), *ranges]
        else:
            ranges = [range(begin, begin + size * stride, stride), *ranges]
        covered = covered and size == extent
        stride *= extent
    return Runs(length, tuple(ranges))
