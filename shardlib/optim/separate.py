"""Trees of buckets, cut to some of the buckets and joined again.

In a train step a tree of parameters is a dictionary from the name of a bucket, or of a run of its leaves, to a flat tensor.
An optimizer's state consists of such dictionaries, of dictionaries from a leaf's path to what is kept for it (in the fields
that the state names: see `shardlib.optim.base.StateMethods`), and of what all buckets share: counters, hyper-parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import optree
import torch

from shardlib.common._compat import storage_id
from shardlib.common.devices import cloned
from shardlib.mesh.memories import MEMORIES
from shardlib.plan.buckets import Bucket
from shardlib.plan.plan import Plan
from shardlib.plan.value import PlanValue
from shardlib.tree import Tree, tree_map


def turns(plan: PlanValue) -> list[tuple[Bucket, ...]]:
    """The groups of buckets of an optimizer that takes them one after the other: those whose states are on the device, and
    each of the others, in the order in which gradients land. Parameters on disk are in memory in their turn alone. A rank
    that trains none has one empty group, for what all buckets share."""
    on_device = tuple(bucket for bucket in plan.trained if bucket.memory.optimizer == "device")
    moved = [bucket for bucket in plan.trained if bucket.memory.optimizer != "device"]
    if any(MEMORIES[bucket.memory.param].rests for bucket in on_device):  # then those of all are
        return [(bucket,) for bucket in (*reversed(on_device), *reversed(moved))]
    return [*([on_device] if on_device or not moved else []), *((bucket,) for bucket in reversed(moved))]


class Separation:
    """Cuts trees over the trained buckets of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._number = {bucket.name: number for number, bucket in enumerate(plan.trained)}

    def cut(self, tree: Tree, names: Collection[str]) -> Tree:
        """``tree`` with the entries of the buckets ``names`` alone."""

        def chosen(node: dict[str, Any]) -> dict[str, Any]:
            return {name: leaf for name, leaf in node.items() if self._bucket(name) in names}

        return self._mapped(chosen, tree)

    def join(self, trees: Sequence[Tree]) -> Tree:
        """The tree of which ``trees`` are cut; counters are those of the last."""

        def joined(*nodes: dict[str, Any]) -> dict[str, Any]:
            merged = {name: leaf for node in nodes for name, leaf in node.items()}
            return {name: merged[name] for name in sorted(merged, key=self._position)}

        return self._mapped(joined, *trees)

    def _mapped(self, fn: Callable[..., dict[str, Any]], *trees: Tree) -> Tree:
        """``fn`` of the dictionaries that trees have by bucket and by path; of other leaves those of the last tree."""

        def mapped(*nodes: Any) -> Any:
            if self._by_bucket(nodes[0]):
                return fn(*nodes)
            if not _keeps_by_path(nodes[0]):
                return nodes[-1]
            kept, fields = nodes[0].by_path(), zip(nodes[0]._fields, *nodes, strict=True)
            return type(nodes[0])(
                *(fn(*parts) if field in kept else self._mapped(fn, *parts) for field, *parts in fields)
            )

        return optree.tree_map(mapped, *trees, is_leaf=lambda node: self._by_bucket(node) or _keeps_by_path(node))

    def _by_bucket(self, node: Any) -> bool:
        return isinstance(node, dict) and all(self._plan.numbering.run_named(name) is not None for name in node)

    def _position(self, name: str) -> tuple[int, int]:
        found, bucket = self._plan.numbering.run_named(name), self._bucket(name)
        assert bucket is not None
        if found is None:
            return self._number[bucket], self._plan.bucket_of[bucket].paths.index(name)
        return self._number[bucket], self._plan.numbering.span(found[1])[1]

    def _bucket(self, name: object) -> str | None:
        found = self._plan.numbering.run_named(name)
        return found[0] if found else self._plan.numbering.bucket_with(name)


def _keeps_by_path(node: Any) -> bool:
    return hasattr(node, "by_path")


# States in memory of their own, where an update writes to memory in place.


def separate_memory(state: Tree, others: Iterable[torch.Tensor]) -> Tree:
    """An optimizer's state none of whose tensors is in the memory of another one, or of ``others``, which are written to.

    Transformations are pure functions, so that one may keep the parameters or the updates that it returns in its state, or
    begin two means with the same zeros.
    """
    taken = defaultdict[int, list[range]](list)  # bytes of each storage
    for other in others:
        taken[storage_id(other.untyped_storage())].append(_bytes(other))

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        here, spans = _bytes(leaf), taken[storage_id(leaf.untyped_storage())]
        if any(here.start < span.stop and span.start < here.stop for span in spans):
            return cloned(leaf)
        spans.append(here)
        return leaf

    return tree_map(own, state)


def _bytes(tensor: torch.Tensor) -> range:
    """The bytes of its storage in which a tensor's elements lie."""
    first = tensor.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return range(first * tensor.itemsize, (last + 1) * tensor.itemsize if tensor.numel() else 0)
