"""Questions that gradient transformations ask about the elements of all ranks: `Shards` and `MeshShards`."""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch

from shardlib.collectives.codecs.base import Residuals
from shardlib.collectives.primitives import sum_over
from shardlib.collectives.summation import IN_FLOAT64, Summation
from shardlib.common.thresholds import chunks
from shardlib.errors import IllegalComposition
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.specs import IndexMap
from shardlib.optim.axis_owner.owned_exchange import OwnedExchange
from shardlib.optim.whole import Exchanges, WholeLeaves
from shardlib.plan.buckets import Bucket
from shardlib.plan.claims import LeafInfo
from shardlib.plan.exchanges import share
from shardlib.plan.plan import Plan
from shardlib.sharded.counting import Counting
from shardlib.tree import Tree, flatten, leaves_of, unflatten

# `Locality`: what a gradient transformation reads beyond the element that it writes.


class Locality(enum.Enum):
    """The elements that a transformation reads beyond the element that it writes. Each locality includes the ones above
    it."""

    ELEMENTWISE = "elementwise"  # nothing (Adam, SGD)
    GLOBAL = "global"  # sums over all elements, through ``shards.sum`` (the global norm)
    LEAF = "leaf"  # sums over the same parameter, through ``shards.leaf_sums`` or ``shards.total`` (LAMB, Adafactor)
    WHOLE = "whole"  # the whole parameter, gathered on one rank, through ``shards.whole`` (Muon)

    def includes(self, other: Locality) -> bool:
        kinds = list(Locality)
        return kinds.index(other) <= kinds.index(self)


def widest(*localities: Locality | None) -> Locality | None:
    """The locality of several transformations together; None if one of them declares none."""
    if None in localities:
        return None
    return next(kind for kind in reversed(Locality) if kind in localities)


class Selection(NamedTuple):
    """Some of the parameters.

    Attributes:
        shards: the `Shards` of the selected parameters.
        take: ``take(tree)``: the selected leaves of a tree of all parameters, as views.
        put: ``put(tree, some)``: a tree of all parameters with the leaves of ``some`` in place of the selected ones. Writes
            to neither.
    """

    shards: Shards
    take: Callable[[Tree], Tree]
    put: Callable[[Tree, Tree], Tree]


class Shards:
    """Sums and other facts over all elements of a tree, also where ranks of a mesh hold shards of it.

    This class is for whole trees, `MeshShards` for shards. Methods that a transformation's locality does not include raise
    `IllegalComposition`.

    Attributes:
        used: the paths of the parameters that the step's loss used, on any rank; None where nobody knows.
    """

    used: frozenset[str] | None = None
    _allowed = Locality.WHOLE

    def allowing(self, locality: Locality) -> Self:
        """Shards for a transformation that declares ``locality``; what was not allowed before stays refused."""
        narrow = copy.copy(self)
        narrow._allowed = locality if self._allowed.includes(locality) else self._allowed
        return narrow

    def _require(self, needed: Locality, asked: str) -> None:
        if not self._allowed.includes(needed):
            raise IllegalComposition(
                f"a gradient transformation that declares Locality.{self._allowed.name} asks for {asked}; declare "
                f"Locality.{needed.name}"
            )

    def about(self, tree: Tree) -> list[LeafInfo]:
        """The path, shape and dtype of each whole parameter of all ranks, by number."""
        paths, leaves, _ = flatten(tree)
        return [LeafInfo(path, tuple(leaf.shape), leaf.dtype) for path, leaf in zip(paths, leaves, strict=True)]

    def select(self, choice: Callable[[LeafInfo], bool], tree: Tree) -> Selection:
        """The parameters of ``tree`` for which ``choice``, hashable, is true."""
        chosen = [choice(info) for info in self.about(tree)]

        def take(tree: Tree) -> Tree:
            _, leaves, treedef = flatten(tree)
            return unflatten(treedef, [leaf if taken else None for leaf, taken in zip(leaves, chosen, strict=True)])

        def put(tree: Tree, some: Tree) -> Tree:
            _, leaves, treedef = flatten(tree)
            given = iter(leaves_of(some))
            return unflatten(treedef, [next(given) if taken else leaf for leaf, taken in zip(leaves, chosen)])

        return Selection(self, take, put)

    def sum(self, fn: Callable[[torch.Tensor], torch.Tensor], tree: Tree) -> torch.Tensor:
        """Σ fn(leaf) over the leaves, as a 0-d tensor; ``fn`` returns a sum over the elements of its argument."""
        self._require(Locality.GLOBAL, "a sum over all elements")
        values = [fn(leaf) for leaf in leaves_of(tree)]
        return torch.stack(values).sum() if values else torch.zeros((), dtype=torch.float64)

    def max(self, fn: Callable[[torch.Tensor], torch.Tensor], tree: Tree) -> torch.Tensor:
        """The largest fn(leaf) over the leaves, float64, 0-d; ``fn`` returns a maximum over the elements of its argument. −∞
        without elements."""
        self._require(Locality.GLOBAL, "a maximum over all elements")
        return _largest([fn(leaf) for leaf in leaves_of(tree) if leaf.numel()], device_of(tree))

    @property
    def summation(self) -> Summation:
        """How sums over elements are made and held."""
        return IN_FLOAT64

    def total(self, sums: torch.Tensor) -> torch.Tensor:
        """The values of sums over all ranks, float64: ``[..., summation.width]`` to ``[...]``.

        Each rank's sums are over the elements that `shares` gives it. May use up the memory of ``sums``.
        """
        self._require(Locality.LEAF, "sums that ranks have shares of")
        return self.summation.values(sums)

    def total_sends(self, count: int) -> Mapping[str, int]:
        """Axis -> payload bytes of `total` of ``count`` sums."""
        return {}

    def whole(self, fn: Callable[[int, torch.Tensor], torch.Tensor], tree: Tree) -> Tree:
        """A new tree of ``fn(number, leaf)`` for every parameter, which ``fn`` gets whole, in its shape.

        On a mesh each parameter is computed on one of the ranks that it is split over, and every rank gets its shard of the
        result.
        """
        self._require(Locality.WHOLE, "whole parameters")
        _, leaves, treedef = flatten(tree)
        return unflatten(treedef, [fn(number, leaf) for number, leaf in enumerate(leaves)])

    def whole_sends(self) -> Mapping[str, int]:
        """Axis -> payload bytes of `whole`."""
        return {}

    def leaf_count(self, tree: Tree) -> int:
        """The number of parameters on all ranks together."""
        return len(leaves_of(tree))

    def leaves(self, *trees: Tree) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Each parameter's number, below `leaf_count`, and views of this rank's elements of it in each tree."""
        for number, views in enumerate(zip(*map(leaves_of, trees), strict=True)):
            yield number, list(views)

    def located(self, *trees: Tree) -> Iterator[tuple[int, IndexMap, list[torch.Tensor]]]:
        """`leaves`, with the `IndexMap` of the elements."""
        for number, views in self.leaves(*trees):
            yield number, IndexMap.of_whole(tuple(views[0].shape)), views

    def shares(self, *trees: Tree) -> Iterator[tuple[int, IndexMap, list[torch.Tensor]]]:
        """`located`, restricted to the elements that this rank works on, since ranks that hold copies divide the work."""
        return self.located(*trees)

    def leaf_sums(self, fns: Sequence[Callable[..., torch.Tensor]], *trees: Tree) -> torch.Tensor:
        """Σ fn(elements in each tree) for each of ``fns`` and each parameter, float64 ``[len(fns), leaf_count]``.

        A function gets as many flat tensors as there are trees, and returns a sum over their elements, 0-d.
        """
        self._require(Locality.LEAF, "sums over each parameter")
        return self.summation.values(self._leaf_sums(fns, trees))

    def _leaf_sums(self, fns: Sequence[Callable[..., torch.Tensor]], trees: Sequence[Tree]) -> torch.Tensor:
        """The sums over this rank's `shares`, ``[len(fns), leaf_count, summation.width]``."""
        shape = (len(fns), self.leaf_count(trees[0]), self.summation.width)
        table = torch.zeros(shape, dtype=torch.float64, device=device_of(trees[0]))
        for number, chunk in self._share_chunks(trees):
            for row, fn in zip(table, fns, strict=True):
                row[number] += self.summation.over(fn, *chunk)
        return table

    def leaf_max(self, fn: Callable[..., torch.Tensor], *trees: Tree) -> torch.Tensor:
        """The largest fn(elements in each tree) for each parameter, float64 ``[leaf_count]``.

        The function returns a maximum over the elements of its arguments, 0-d. −∞ for a parameter without elements.
        """
        self._require(Locality.LEAF, "a maximum over each parameter")
        shape = (self.leaf_count(trees[0]),)
        largest = torch.full(shape, -math.inf, dtype=torch.float64, device=device_of(trees[0]))
        for number, chunk in self._share_chunks(trees):
            largest[number] = torch.maximum(largest[number], fn(*chunk))
        return largest

    def _share_chunks(self, trees: Sequence[Tree]) -> Iterator[tuple[int, Sequence[torch.Tensor]]]:
        """Each parameter's number with a chunk of its elements among this rank's `shares`, in each tree."""
        for number, _, views in self.shares(*trees):
            if views[0].numel():
                for chunk in chunks(views):
                    yield number, chunk

    def compressed_mean(self, tree: Tree, out: Tree = None) -> Tree:
        """The mean of ``tree`` over the axis that the transformation owns, by its codec and with error feedback.

        May use up the memory of ``tree``, and the memory of ``out`` (of the same shapes) for the result. ``tree`` itself
        where there is no other rank.
        """
        return tree

    def reset_residuals(self) -> None:
        """Replace the residuals of `compressed_mean` by zeros."""


WHOLE = Shards()


class MeshShards(Shards):
    """`Shards` of flat shards on a mesh. In sums each element counts once, however many ranks hold it.

    Args:
        unreduced: axes along which the summed trees differ between ranks. The mean of their sums is then taken.
        owned: exchanges over the axis that the transformation owns; None if it owns none.
        residuals: the tensors that these keep, which they replace.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        unreduced: tuple[str, ...] = (),
        owned: OwnedExchange | None = None,
        residuals: Residuals | None = None,
    ) -> None:
        self._plan, self._mesh, self._unreduced = plan, mesh, unreduced
        self._owned, self._residuals = owned, residuals
        self._counting = Counting(plan, mesh, unreduced)
        self._known: list[tuple[Any, Any, torch.Tensor]] = []
        self._partial = False
        self.exchanges: Exchanges = Exchanges()

    def compressed_mean(
        self, tree: dict[str, torch.Tensor], out: dict[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        if self._owned is None or self._residuals is None:
            raise IllegalComposition(
                "this transformation reduces gradients itself, and its residuals live in a TrainState: use sl.make_train_step"
            )
        sent = {name: leaf.to(self._mesh.device) for name, leaf in tree.items()}
        means = self._owned.mean(sent, self._residuals, out if device_of(tree) == self._mesh.device else None)
        return {name: mean.to(tree[name].device) for name, mean in means.items()}

    def of(self, buckets: Sequence[Bucket], locality: Locality | None) -> MeshShards:
        """The shards of some buckets of the plan, for a transformation that reads no other ones."""
        some = MeshShards(replace(self._plan, buckets=tuple(buckets)), self._mesh)
        some._partial, some.used = True, self.used
        return some.allowing(locality or Locality.ELEMENTWISE)

    def reset_residuals(self) -> None:
        if self._owned is not None and self._residuals is not None:
            self._owned.reset(self._residuals)

    def about(self, tree: Tree) -> list[LeafInfo]:
        return list(self._plan.numbering.infos.values())

    def select(self, choice: Callable[[LeafInfo], bool], tree: Tree) -> Selection:
        plan = self._plan.select(choice)
        spans = {run.name: self._plan.numbering.span(run) for run in plan.buckets}

        def take(tree: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: tree[bucket][start:stop] for name, (bucket, start, stop) in spans.items()}

        def put(tree: dict[str, torch.Tensor], some: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            mixed = {bucket: tree[bucket].clone() for bucket, _, _ in spans.values()}
            for name, (bucket, start, stop) in spans.items():
                mixed[bucket][start:stop] = some[name]
            return tree | mixed

        shards = MeshShards(plan, self._mesh, self._unreduced).allowing(self._allowed)
        shards._partial, shards.exchanges, shards.used = self._partial, self.exchanges, self.used
        return Selection(shards, take, put)

    @property
    def summation(self) -> Summation:
        return self._plan.reductions.summation

    def total(self, sums: torch.Tensor) -> torch.Tensor:
        return super().total(self._over_ranks(sums, scalars=False)) / self._counting.differing

    def _over_ranks(
        self, sums: torch.Tensor, axes: tuple[str, ...] | None = None, *, scalars: bool = True
    ) -> torch.Tensor:
        """The sums over all ranks (along ``axes``), exchanged from their devices. May use up the memory of ``sums``."""
        if not self.exchanges.due():
            return sums
        there = sums.to(self._mesh.device)
        sum_over(self._mesh, tuple(self._mesh.shape) if axes is None else axes, there, scalars=scalars)
        return there.to(sums.device)

    def total_sends(self, count: int) -> Mapping[str, int]:
        sent = 2 * 8 * count * self.summation.width
        return {axis: share(sent, size) for axis, size in self._mesh.shape.items() if size > 1}

    def whole(self, fn: Callable[[int, torch.Tensor], torch.Tensor], tree: Tree) -> Tree:
        self._require(Locality.WHOLE, "whole parameters")
        return WholeLeaves(self._plan, self._mesh, self.exchanges).map(fn, tree)

    def whole_sends(self) -> Mapping[str, int]:
        return WholeLeaves(self._plan, self._mesh, self.exchanges).sends()

    def sum(self, fn: Callable[[torch.Tensor], torch.Tensor], tree: Tree) -> torch.Tensor:
        self._require(Locality.GLOBAL, "a sum over all elements")
        self._require_all()
        for known_fn, known_tree, value in self._known:
            if known_fn is fn and known_tree is tree:
                return value
        local = self._counting.added(fn, self._unpadded(tree))
        return self.summation.values(self._over_ranks(local)).to(device_of(tree))

    def max(self, fn: Callable[[torch.Tensor], torch.Tensor], tree: Tree) -> torch.Tensor:
        self._require(Locality.GLOBAL, "a maximum over all elements")
        self._require_all()
        local = _largest([fn(leaf) for leaf in self._unpadded(tree) if leaf.numel()], device_of(tree))
        return self._largest_over_ranks(local.view(1))[0]

    def _require_all(self) -> None:
        if self._partial:
            raise IllegalComposition(
                "an optimizer sums over all elements after other transformations, and its states are on disk: put clips "
                "first in the outermost chain, or use offload('host')"
            )

    def _unpadded(self, tree: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        """The elements that this rank works on, without padding, in as few views as possible."""
        for name, leaf in tree.items():
            bucket = self._plan.bucket_of[name]
            counted = self._counting.share(bucket, leaf)
            for start, stop in _joined(bucket.filled(self._mesh.coords, bucket.levels)):
                start = max(start, counted.start)
                yield leaf[start : max(start, min(stop, counted.stop))]

    def leaf_count(self, tree: Tree) -> int:
        return len(self._plan.numbering.numbers)

    def leaves(self, *trees: Tree) -> Iterator[tuple[int, list[torch.Tensor]]]:
        for _, _, path, views in self._by_bucket(trees):
            yield self._plan.numbering.numbers[path], views

    def located(self, *trees: Tree) -> Iterator[tuple[int, IndexMap, list[torch.Tensor]]]:
        for bucket, owner, path, views in self._by_bucket(trees):
            yield self._plan.numbering.numbers[path], self._index_map(bucket, owner, path), views

    def shares(self, *trees: Tree) -> Iterator[tuple[int, IndexMap, list[torch.Tensor]]]:
        for bucket, owner, path, views in self._by_bucket(trees):
            counted = self._counting.share(bucket, views[0])
            yield (
                self._plan.numbering.numbers[path],
                self._index_map(bucket, owner, path).after(counted.start),
                [view[counted] for view in views],
            )

    def _index_map(self, bucket: Bucket, owner: int, path: str) -> IndexMap:
        compute = self._plan.placement_of[path].compute
        window = compute.spec.window(compute.shape, self._plan.sizes, self._mesh.coords)
        return IndexMap(window, owner * bucket.chunks[bucket.paths.index(path)])

    def _by_bucket(self, trees: Sequence[Tree]) -> Iterator[tuple[Bucket, int, str, list[torch.Tensor]]]:
        """Bucket, owner, path, and views in each tree, of this rank's elements of each parameter, without padding."""
        for name in trees[0]:
            bucket = self._plan.bucket_of[name]
            owner = bucket.owner(self._mesh.coords, 0, bucket.levels)
            for path, (start, stop) in zip(bucket.paths, bucket.filled(self._mesh.coords, bucket.levels), strict=True):
                yield bucket, owner, path, [tree[name][start:stop] for tree in trees]

    def _leaf_sums(self, fns: Sequence[Callable[..., torch.Tensor]], trees: Sequence[Tree]) -> torch.Tensor:
        return self._over_ranks(super()._leaf_sums(fns, trees)) / self._counting.differing

    def leaf_max(self, fn: Callable[..., torch.Tensor], *trees: Tree) -> torch.Tensor:
        return self._largest_over_ranks(super().leaf_max(fn, *trees))

    def _largest_over_ranks(self, largest: torch.Tensor) -> torch.Tensor:
        """The largest of each number over all ranks."""
        for axis, size in self._mesh.shape.items():
            # The maximum by a sum of rows, of which each rank fills one.
            rows = largest.new_zeros((size, len(largest)))
            rows[self._mesh.coords[axis]] = largest
            rows = self._over_ranks(rows, axes=(axis,))
            largest = rows.amax(dim=0)
        return largest

    def remember(self, fn: Callable[[torch.Tensor], torch.Tensor], tree: Tree, value: torch.Tensor) -> None:
        """Store a sum that was computed along with something else, for `sum` to return."""
        self._known.append((fn, tree, value))


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """One span for each run of adjacent spans, in order; one empty span if all are empty."""
    joined = [(0, 0)]
    for start, stop in spans:
        if start == joined[-1][1]:
            joined[-1] = joined[-1][0], stop
        elif start < stop:
            joined.append((start, stop))
    return joined[1:] if len(joined) > 1 and joined[0] == (0, 0) else joined


def _largest(values: Sequence[torch.Tensor], device: torch.device | None) -> torch.Tensor:
    """The largest of these numbers, float64; −∞ for none."""
    none = torch.full((), -math.inf, dtype=torch.float64, device=device)
    return torch.stack([none, *(value.to(none) for value in values)]).max()


def device_of(tree: Tree) -> torch.device | None:
    """The device of a tree's first tensor that has memory; None for a tree without tensors."""
    devices = [leaf.device for leaf in leaves_of(tree)]
    return next((device for device in devices if device.type != "meta"), next(iter(devices), None))
