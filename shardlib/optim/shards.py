"""Parameters in the optimizer's layout: what each rank owns, sums over all of it, and writing it back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch

from shardlib.collectives import primitives
from shardlib.collectives.sums import Errors, Exchange, Item
from shardlib.errors import IllegalComposition
from shardlib.exchange import Gather, compact
from shardlib.mesh import Mesh
from shardlib.optim.pieces import pieces
from shardlib.plan import Plan
from shardlib.sharded import Sharded
from shardlib.tree import Tree, flatten, leaves_of, tree_map


class Shards:
    """What a transformation may ask about all elements of a tree, on every rank of a mesh.

    This one is for whole trees; `MeshShards` for shards.
    """

    def sum(self, fn: Callable[[torch.Tensor], torch.Tensor], tree: Tree) -> torch.Tensor:
        """Σ fn(leaf) over the leaves, as a 0-d tensor; ``fn`` returns the sum over the elements it is given."""
        return torch.stack([fn(leaf) for leaf in leaves_of(tree)]).sum()

    def leaf_count(self, tree: Tree) -> int:
        """How many parameters there are, on all ranks together."""
        return len(leaves_of(tree))

    def leaves(self, *trees: Tree) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """For each parameter its number, below `leaf_count`, and what this rank holds of it in each tree: views."""
        for number, parts in enumerate(zip(*map(leaves_of, trees), strict=True)):
            yield number, list(parts)

    def elements(self, *trees: Tree) -> Iterator[tuple[str, torch.Tensor, list[torch.Tensor]]]:
        """For each parameter its path, what this rank holds of it in each tree (flat views), and where that lies in it.

        The latter are int64 indices into the flattened whole parameter: the same for an element on every mesh.
        """
        paths, *_ = flatten(trees[0])
        for path, (_, parts) in zip(paths, self.leaves(*trees), strict=True):
            flat = [part.reshape(-1) for part in parts]
            yield path, torch.arange(flat[0].numel(), device=flat[0].device), flat

    def leaf_sums(self, fns: Sequence[Callable[..., torch.Tensor]], *trees: Tree) -> torch.Tensor:
        """For each of ``fns`` and each parameter Σ fn(its elements in each tree), float64 ``[len(fns), leaf_count]``.

        A function gets as many flat tensors as there are trees, and returns the sum over their elements, 0-d.
        """
        return self._leaf_table(fns, trees, 0.0, torch.add)

    def leaf_max(self, fn: Callable[..., torch.Tensor], *trees: Tree) -> torch.Tensor:
        """For each parameter the largest fn(its elements in each tree), float64 ``[leaf_count]``.

        The function returns the largest over the elements it is given, 0-d. −∞ for a parameter without elements.
        """
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
        for number, parts in self._shares(trees):
            if parts[0].numel():
                for piece in pieces(parts):
                    for row, fn in zip(table, fns, strict=True):
                        row[number] = join(row[number], fn(*piece))
        return table

    def _shares(self, trees: Sequence[Tree]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """`leaves`, as far as they are this rank's to work on."""
        return self.leaves(*trees)

    def compressed_mean(self, tree: Tree, out: Tree = None) -> Tree:
        """The mean over the axis that the transformation owns, in its codec's bits and with error feedback.

        May use up the memory of ``tree``, and of ``out`` (of the same shapes) for the result. The same tree where there is
        nobody to share with.
        """
        return tree

    def reset_errors(self) -> None:
        """Forget what compressed means left out."""


WHOLE = Shards()


class MeshShards(Shards):
    """For flat shards on a mesh. In sums each element counts once, however many ranks hold it.

    Args:
        unreduced: axes along which the trees that are summed over differ: sums are then the means over these ranks'.
        own: exchanges over the axis that the transformation owns; None where it owns none.
        errors: what they left out; written to.
    """

    def __init__(
        self,
        tree: Sharded,
        unreduced: tuple[str, ...] = (),
        own: OwnExchange | None = None,
        errors: Errors | None = None,
    ) -> None:
        self._plan, self._mesh, self._unreduced = tree.plan, tree.mesh, unreduced
        self._own, self._errors = own, errors
        self._known: list[tuple[Any, Any, torch.Tensor]] = []

    def compressed_mean(
        self, tree: dict[str, torch.Tensor], out: dict[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        if self._own is None or self._errors is None:
            raise IllegalComposition(
                "this transformation reduces gradients itself, with errors that live in a TrainState: use sl.make_train_step"
            )
        return self._own.mean(tree, self._errors, out)

    def reset_errors(self) -> None:
        if self._own is not None and self._errors is not None:
            self._own.reset(self._errors)

    def sum(self, fn: Callable[[torch.Tensor], torch.Tensor], tree: Tree) -> torch.Tensor:
        for known_fn, known_tree, value in self._known:
            if known_fn is fn and known_tree is tree:
                return value
        local = self.local_sum(fn, tree).reshape(1)
        sum_over(self._mesh, tuple(self._mesh.shape), local)
        return local[0]

    def local_sum(self, fn: Callable[[torch.Tensor], torch.Tensor], tree: dict[str, torch.Tensor]) -> torch.Tensor:
        """This rank's part of the sum: ranks that hold copies share the work."""
        parts = [fn(self._part(name, leaf)) for name, leaf in tree.items()]
        total = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        return total / self._differing

    def leaf_count(self, tree: Tree) -> int:
        return len(self._numbers)

    def leaves(self, *trees: Tree) -> Iterator[tuple[int, list[torch.Tensor]]]:
        for _, number, parts in self._by_bucket(trees):
            yield number, parts

    def elements(self, *trees: Tree) -> Iterator[tuple[str, torch.Tensor, list[torch.Tensor]]]:
        placements = {placement.path: placement for placement in self._plan.placements}
        for name in trees[0]:
            bucket = self._plan.bucket_of[name]
            owner = bucket.owner(self._mesh.coords, 0, bucket.levels)
            spans = zip(bucket.paths, bucket.chunks, bucket.filled(owner, 1), strict=True)
            for path, chunk, (start, stop) in spans:
                leaf, first = placements[path].compute, owner * chunk
                index = leaf.spec.global_indices(
                    leaf.shape, self._mesh.shape, self._mesh.coords, first, first + stop - start
                )
                yield path, index.to(self._mesh.device), [tree[name][start:stop] for tree in trees]

    def _shares(self, trees: Sequence[Tree]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        for bucket, number, parts in self._by_bucket(trees):
            yield number, [self._part(bucket, part) for part in parts]

    def _by_bucket(self, trees: Sequence[Tree]) -> Iterator[tuple[str, int, list[torch.Tensor]]]:
        """Without padding: it is zero, and among the largest of something that may be wrong."""
        for name in trees[0]:
            bucket = self._plan.bucket_of[name]
            spans = bucket.filled(bucket.owner(self._mesh.coords, 0, bucket.levels), 1)
            for path, (start, stop) in zip(bucket.paths, spans, strict=True):
                yield name, self._numbers[path], [tree[name][start:stop] for tree in trees]

    def leaf_sums(self, fns: Sequence[Callable[..., torch.Tensor]], *trees: Tree) -> torch.Tensor:
        table = super().leaf_sums(fns, *trees)
        sum_over(self._mesh, tuple(self._mesh.shape), table)
        return table / self._differing

    def leaf_max(self, fn: Callable[..., torch.Tensor], *trees: Tree) -> torch.Tensor:
        largest = super().leaf_max(fn, *trees)
        for axis, size in self._mesh.shape.items():
            # As a sum over rows of which each rank fills one.
            rows = largest.new_zeros((size, len(largest)))
            rows[self._mesh.coords[axis]] = largest
            sum_over(self._mesh, (axis,), rows)
            largest = rows.amax(dim=0)
        return largest

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """Path -> number, of the parameters of all ranks."""
        paths = [path for bucket in self._plan.everywhere.trained for path in bucket.paths]
        return {path: number for number, path in enumerate(paths)}

    @property
    def _differing(self) -> int:
        """Ranks whose trees differ though they are of the same elements."""
        return math.prod(self._mesh.shape[axis] for axis in self._unreduced)

    def remember(self, fn: Callable[[torch.Tensor], torch.Tensor], tree: Tree, value: torch.Tensor) -> None:
        """Note a sum that was computed along with something else, so that asking again costs nothing."""
        self._known.append((fn, tree, value))

    def _part(self, bucket: str, leaf: torch.Tensor) -> torch.Tensor:
        about = self._plan.bucket_of[bucket]
        if not self._plan.counts(about, self._mesh.coords):
            return leaf[:0]
        for axis in self._plan.copies(about):
            if axis in self._unreduced:
                continue
            leaf = leaf.tensor_split(self._mesh.shape[axis])[self._mesh.coords[axis]]
        return leaf


# Elements from which an exchange is large enough: two fewer cost 1 to 2 ms on gloo, and on a slow network what is encoded
# while another is under way costs nothing.
_TOGETHER = 1 << 22


class OwnExchange:
    """The compressed means of an optimizer that owns an axis; see `shardlib.plan.OwnedAxis`."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        assert plan.owned is not None
        self._plan, self._mesh, self._owned = plan, mesh, plan.owned
        self._lines = {channel.bucket.name: (channel, channel.line(mesh.coords)) for channel in plan.owned_channels}

    def mean(
        self, tree: dict[str, torch.Tensor], errors: Errors, out: dict[str, torch.Tensor] | None
    ) -> dict[str, torch.Tensor]:
        """Several buckets to an exchange; all are under way before the first is waited for."""
        groups: list[list[str]] = [[]]
        for name in tree:
            if sum(tree[other].numel() for other in groups[-1]) >= _TOGETHER:
                groups.append([])
            if name in self._lines:
                groups[-1].append(name)
        started = [(names, self._start([(name, tree[name]) for name in names], errors)) for names in groups if names]
        found = dict(tree)
        for names, exchange in started:
            places = [None if out is None else out[name] for name in names]
            for name, result in zip(names, exchange.wait(places), strict=True):
                found[name] = result.to(tree[name].dtype)
        return {name: compact(mean) for name, mean in found.items()}  # optimizers keep it

    def _start(self, buffers: list[tuple[str, torch.Tensor]], errors: Errors) -> Exchange:
        items = []
        for name, buffer in buffers:
            channel, line = self._lines[name]
            items.append(Item(line, compact(line.pad(buffer.to(channel.dtype))), tuple(channel.keeps)))
        return self._owned.codec.exchange(self._mesh, self._owned.axis, items, errors)

    def reset(self, errors: Errors) -> None:
        for channel, _ in self._lines.values():
            errors.after |= channel.start(self._mesh.device)


def device_of(tree: Tree) -> torch.device | None:
    """Where a tree's first tensor is; None for a tree without."""
    return next((leaf.device for leaf in leaves_of(tree)), None)


def sum_of_squares(leaf: torch.Tensor) -> torch.Tensor:
    """Σ x², accumulated in fp32 (fp64 for fp64); not finite when an element is not."""
    wide = torch.float64 if leaf.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(leaf, dtype=wide).square().to(torch.float64)


def sum_over(mesh: Mesh, axes: tuple[str, ...], values: torch.Tensor, *, scalars: bool = True) -> None:
    """Sum a small vector in place over several axes."""
    for axis in axes:
        if mesh.shape[axis] > 1:
            primitives.all_reduce(mesh, axis, values, scalars=scalars).wait()


def optimizer_shards(params: Sharded) -> dict[str, torch.Tensor]:
    """This rank's flat shards of the trained parameters in the optimizer's layout.

    Where parameters are stored in that layout these are the stored buffers themselves, not copies.
    """
    shards = {}
    for bucket in params.plan.trained:
        index = bucket.owner(params.mesh.coords, bucket.param_level, bucket.levels)
        shards[bucket.name] = bucket.owned_part(params.buffers[bucket.name], bucket.param_level, index)
    return shards


def store(params: Sharded, shards: dict[str, torch.Tensor]) -> None:
    """Write the optimizer's shards into the stored parameters in place, gathering what must be whole again."""
    plan: Plan = params.plan
    gathers = []
    for bucket in plan.trained:
        shard, stored = shards[bucket.name], params.buffers[bucket.name]
        if bucket.parts(bucket.param_level) > 1:
            narrow = shard.to(bucket.dtype)
            gathers.append(Gather(params.mesh, bucket, narrow, bucket.param_level, bucket.levels, out=stored))
        elif shard is not stored:
            stored.copy_(shard)
    for gather in gathers:
        gather.wait()


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """``params + updates``, leaf by leaf, in the wider dtype and then rounded to the parameter's; changes nothing in place.

    `Sharded` or plain pytrees.
    """
    if not isinstance(params, Sharded):
        return tree_map(lambda param, update: (param + update).to(param.dtype), params, updates)
    shards = optimizer_shards(params)
    moved = {name: (shard + updates.buffers[name]).to(shard.dtype) for name, shard in shards.items()}
    result = Sharded(params.plan, params.mesh, "param", {name: b.clone() for name, b in params.buffers.items()})
    store(result, moved)
    return result
