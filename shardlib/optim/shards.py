"""Parameters in the optimizer's layout: what each rank owns, sums over all of it, and writing it back."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch

from shardlib.collectives.codecs.base import Residuals
from shardlib.collectives.primitives import sum_over
from shardlib.errors import IllegalComposition
from shardlib.mesh.chunks import chunks
from shardlib.mesh.index_map import IndexMap
from shardlib.mesh.mesh import Mesh
from shardlib.optim.axis_owner.owned_exchange import OwnedExchange
from shardlib.optim.locality import Locality
from shardlib.optim.whole import WholeLeaves
from shardlib.plan.buckets import Bucket
from shardlib.plan.claims import LeafInfo
from shardlib.plan.payload import share
from shardlib.plan.plan import Plan
from shardlib.sharded.counting import Counting
from shardlib.tree import Tree, flatten, leaves_of, unflatten


class Selection(NamedTuple):
    """Some of the parameters.

    Attributes:
        shards: what may be asked about them.
        take: a tree of all parameters -> what it holds of these (views).
        put: such a tree, and one of these -> the first with the second in it, neither written to.
    """

    shards: Shards
    take: Callable[[Tree], Tree]
    put: Callable[[Tree, Tree], Tree]


class Shards:
    """What a transformation may ask about all elements of a tree, on every rank of a mesh.

    This one is for whole trees; `MeshShards` for shards. What a transformation's locality does not include is refused.
    """

    _allowed = Locality.WHOLE

    def allowing(self, locality: Locality) -> Self:
        """The same, for a transformation that declares ``locality``; no more than one around it has declared."""
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
        """What each parameter of all ranks is as a whole, by number."""
        paths, leaves, _ = flatten(tree)
        return [LeafInfo(path, tuple(leaf.shape), leaf.dtype) for path, leaf in zip(paths, leaves, strict=True)]

    def select(self, choice: Callable[[LeafInfo], bool], tree: Tree) -> Selection:
        """The parameters that ``choice`` (hashable) takes of those of ``tree``."""
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
        """Σ fn(leaf) over the leaves, as a 0-d tensor; ``fn`` returns the sum over the elements it is given."""
        self._require(Locality.GLOBAL, "a sum over all elements")
        parts = [fn(leaf) for leaf in leaves_of(tree)]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """A vector summed in place over all ranks, each of which has put in its `shares`."""
        self._require(Locality.LEAF, "sums that ranks have shares of")
        return values

    def total_sends(self, elements: int) -> Mapping[str, int]:
        """Payload bytes by axis of `total` of so many float64."""
        return {}

    def whole(self, fn: Callable[[int, torch.Tensor], torch.Tensor], tree: Tree) -> Tree:
        """``fn(number, leaf)`` of every parameter, which it gets whole, in its shape; a new tree of what it returns.

        On a mesh each is computed on one of the ranks that share it, and every rank keeps its own part of the result.
        """
        self._require(Locality.WHOLE, "whole parameters")
        _, leaves, treedef = flatten(tree)
        return unflatten(treedef, [fn(number, leaf) for number, leaf in enumerate(leaves)])

    def whole_sends(self) -> Mapping[str, int]:
        """Payload bytes by axis of `whole`."""
        return {}

    def leaf_count(self, tree: Tree) -> int:
        """How many parameters there are, on all ranks together."""
        return len(leaves_of(tree))

    def leaves(self, *trees: Tree) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """For each parameter its number, below `leaf_count`, and what this rank holds of it in each tree: views."""
        for number, parts in enumerate(zip(*map(leaves_of, trees), strict=True)):
            yield number, list(parts)

    def located(self, *trees: Tree) -> Iterator[tuple[int, IndexMap, list[torch.Tensor]]]:
        """`leaves`, with where in the parameter the elements lie."""
        for number, parts in self.leaves(*trees):
            yield number, IndexMap.of_whole(tuple(parts[0].shape)), parts

    def shares(self, *trees: Tree) -> Iterator[tuple[int, IndexMap, list[torch.Tensor]]]:
        """`located`, as far as they are this rank's to work on: ranks that hold copies share the work."""
        return self.located(*trees)

    def leaf_sums(self, fns: Sequence[Callable[..., torch.Tensor]], *trees: Tree) -> torch.Tensor:
        """For each of ``fns`` and each parameter Σ fn(its elements in each tree), float64 ``[len(fns), leaf_count]``.

        A function gets as many flat tensors as there are trees, and returns the sum over their elements, 0-d.
        """
        self._require(Locality.LEAF, "sums over each parameter")
        return self._leaf_table(fns, trees, 0.0, torch.add)

    def leaf_max(self, fn: Callable[..., torch.Tensor], *trees: Tree) -> torch.Tensor:
        """For each parameter the largest fn(its elements in each tree), float64 ``[leaf_count]``.

        The function returns the largest over the elements it is given, 0-d. −∞ for a parameter without elements.
        """
        self._require(Locality.LEAF, "the largest of each parameter")
        return self._leaf_table([fn], trees, -math.inf, torch.maximum)[0]

    def _leaf_table(
        self,
        fns: Sequence[Callable[..., torch.Tensor]],
        trees: Sequence[Tree],
        nothing: float,
        join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """``[len(fns), leaf_count]`` from the elements whose share of the work is this rank's; ``nothing`` elsewhere."""
        shape = (len(fns), self.leaf_count(trees[0]))
        table = torch.full(shape, nothing, dtype=torch.float64, device=device_of(trees[0]))
        for number, _, parts in self.shares(*trees):
            if parts[0].numel():
                for chunk in chunks(parts):
                    for row, fn in zip(table, fns, strict=True):
                        row[number] = join(row[number], fn(*chunk))
        return table

    def compressed_mean(self, tree: Tree, out: Tree = None) -> Tree:
        """The mean over the axis that the transformation owns, in its codec's bits and with error feedback.

        May use up the memory of ``tree``, and of ``out`` (of the same shapes) for the result. The same tree where there is
        nobody to share with.
        """
        return tree

    def reset_residuals(self) -> None:
        """Replace the residuals of `compressed_mean` by zeros."""


WHOLE = Shards()


class MeshShards(Shards):
    """For flat shards on a mesh. In sums each element counts once, however many ranks hold it.

    Args:
        unreduced: axes along which the trees that are summed over differ: sums are then the means over these ranks'.
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

    def compressed_mean(
        self, tree: dict[str, torch.Tensor], out: dict[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        if self._owned is None or self._residuals is None:
            raise IllegalComposition(
                "this transformation reduces gradients itself, and its residuals live in a TrainState: use sl.make_train_step"
            )
        return self._owned.mean(tree, self._residuals, out)

    def reset_residuals(self) -> None:
        if self._owned is not None and self._residuals is not None:
            self._owned.reset(self._residuals)

    def about(self, tree: Tree) -> list[LeafInfo]:
        return list(self._plan.numbering.infos.values())

    def select(self, choice: Callable[[LeafInfo], bool], tree: Tree) -> Selection:
        plan = self._plan.select(choice)
        spans = {part.name: self._plan.numbering.span(part) for part in plan.buckets}

        def take(tree: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: tree[bucket][start:stop] for name, (bucket, start, stop) in spans.items()}

        def put(tree: dict[str, torch.Tensor], some: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            mixed = {bucket: tree[bucket].clone() for bucket, _, _ in spans.values()}
            for name, (bucket, start, stop) in spans.items():
                mixed[bucket][start:stop] = some[name]
            return tree | mixed

        return Selection(MeshShards(plan, self._mesh, self._unreduced).allowing(self._allowed), take, put)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        super().total(values)
        sum_over(self._mesh, tuple(self._mesh.shape), values, scalars=False)
        return values.div_(self._counting.differing)

    def total_sends(self, elements: int) -> Mapping[str, int]:
        return {axis: share(2 * 8 * elements, size) for axis, size in self._mesh.shape.items() if size > 1}

    def whole(self, fn: Callable[[int, torch.Tensor], torch.Tensor], tree: Tree) -> Tree:
        self._require(Locality.WHOLE, "whole parameters")
        return WholeLeaves(self._plan, self._mesh).map(fn, tree)

    def whole_sends(self) -> Mapping[str, int]:
        return WholeLeaves(self._plan, self._mesh).sends()

    def sum(self, fn: Callable[[torch.Tensor], torch.Tensor], tree: Tree) -> torch.Tensor:
        self._require(Locality.GLOBAL, "a sum over all elements")
        for known_fn, known_tree, value in self._known:
            if known_fn is fn and known_tree is tree:
                return value
        local = self._counting.added(fn(part) for part in self._unpadded(tree)).reshape(1)
        sum_over(self._mesh, tuple(self._mesh.shape), local)
        return local[0]

    def _unpadded(self, tree: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        """The elements whose share of the work is this rank's, without padding, in few pieces."""
        for name, leaf in tree.items():
            bucket = self._plan.bucket_of[name]
            mine = self._counting.share(bucket, leaf)
            for start, stop in _joined(bucket.filled(self._mesh.coords, bucket.levels)):
                start = max(start, mine.start)
                yield leaf[start : max(start, min(stop, mine.stop))]

    def leaf_count(self, tree: Tree) -> int:
        return len(self._plan.numbering.numbers)

    def leaves(self, *trees: Tree) -> Iterator[tuple[int, list[torch.Tensor]]]:
        for _, _, path, parts in self._by_bucket(trees):
            yield self._plan.numbering.numbers[path], parts

    def located(self, *trees: Tree) -> Iterator[tuple[int, IndexMap, list[torch.Tensor]]]:
        for bucket, owner, path, parts in self._by_bucket(trees):
            yield self._plan.numbering.numbers[path], self._index_map(bucket, owner, path), parts

    def shares(self, *trees: Tree) -> Iterator[tuple[int, IndexMap, list[torch.Tensor]]]:
        for bucket, owner, path, parts in self._by_bucket(trees):
            mine = self._counting.share(bucket, parts[0])
            yield (
                self._plan.numbering.numbers[path],
                self._index_map(bucket, owner, path).after(mine.start),
                [part[mine] for part in parts],
            )

    def _index_map(self, bucket: Bucket, owner: int, path: str) -> IndexMap:
        compute = self._plan.placement_of[path].compute
        window = compute.spec.window(compute.shape, self._plan.sizes, self._mesh.coords)
        return IndexMap(window, owner * bucket.chunks[bucket.paths.index(path)])

    def _by_bucket(self, trees: Sequence[Tree]) -> Iterator[tuple[Bucket, int, str, list[torch.Tensor]]]:
        """Without padding: it is zero, and among the largest of something that may be wrong."""
        for name in trees[0]:
            bucket = self._plan.bucket_of[name]
            owner = bucket.owner(self._mesh.coords, 0, bucket.levels)
            for path, (start, stop) in zip(bucket.paths, bucket.filled(self._mesh.coords, bucket.levels), strict=True):
                yield bucket, owner, path, [tree[name][start:stop] for tree in trees]

    def leaf_sums(self, fns: Sequence[Callable[..., torch.Tensor]], *trees: Tree) -> torch.Tensor:
        table = super().leaf_sums(fns, *trees)
        sum_over(self._mesh, tuple(self._mesh.shape), table)
        return table / self._counting.differing

    def leaf_max(self, fn: Callable[..., torch.Tensor], *trees: Tree) -> torch.Tensor:
        largest = super().leaf_max(fn, *trees)
        for axis, size in self._mesh.shape.items():
            # As a sum over rows of which each rank fills one.
            rows = largest.new_zeros((size, len(largest)))
            rows[self._mesh.coords[axis]] = largest
            sum_over(self._mesh, (axis,), rows)
            largest = rows.amax(dim=0)
        return largest

    def remember(self, fn: Callable[[torch.Tensor], torch.Tensor], tree: Tree, value: torch.Tensor) -> None:
        """Note a sum that was computed along with something else, so that asking again costs nothing."""
        self._known.append((fn, tree, value))


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order, one for each run of them that lie side by side; one that is empty where all are."""
    found = [(0, 0)]
    for start, stop in spans:
        if start == found[-1][1]:
            found[-1] = found[-1][0], stop
        elif start < stop:
            found.append((start, stop))
    return found[1:] if len(found) > 1 and found[0] == (0, 0) else found


def device_of(tree: Tree) -> torch.device | None:
    """Where a tree's first tensor is; None for a tree without."""
    return next((leaf.device for leaf in leaves_of(tree)), None)
