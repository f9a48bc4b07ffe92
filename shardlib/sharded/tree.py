"""`Sharded`: a pytree whose leaves are this rank's shards."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Generic, NoReturn, cast

import torch
import torch.nn.functional as F

from shardlib.common._compat import func_transform, of_func, storage_id, version_of, without_func
from shardlib.common.devices import cloned
from shardlib.common.display.panels import Panel, Paragraph, Shown, Title
from shardlib.common.environment import environment
from shardlib.errors import DonatedStateError, TreeError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.plan.buckets import Bucket
from shardlib.plan.plan import Plan
from shardlib.plan.shown import leaf_folds
from shardlib.plan.tables import count, size
from shardlib.sharded.params_on_disk import BufferOnDisk, BuffersOnDisk
from shardlib.tree import T_co, Tree, flatten, register_node, unflatten


class _Held:
    """What trees under plans of one layout hold together, until a later state takes it over.

    Attributes:
        buffers: bucket name -> flat buffer; None if they are to be packed from the tree, and once they are taken.
        tree: the nested tree of shards; None until it is read.
        taken: why nothing is to be read any more, or None.
    """

    def __init__(self, buffers: Mapping[str, torch.Tensor] | None, tree: Tree) -> None:
        self.buffers, self.tree = buffers, tree
        self.taken: str | None = None


class Sharded(Shown, Generic[T_co]):
    """This rank's shards of a parameter pytree (role "param") or of its gradients (role "grad").

    A pytree: ``tree_map`` over it returns another `Sharded`; indexing reads the tree. The shards lie in one flat buffer per
    bucket, and leaves are views of the buffers. The result of a ``tree_map`` is packed into new buffers when they are next
    read. To torch's own pytrees the leaves are the buffers of what is trained, and what is not is a constant.

    Inside a loss, or a function that is evaluated, the tree has whole leaves, gathered on use, and a ``tree_map`` over it
    returns a plain tree: see `shardlib.execute.beside`.

    Attributes:
        plan: the plan; with several stages its part for this rank, in which other stages' leaves are None
            (``plan.everywhere`` is the whole plan).
        mesh: the mesh that the tree is sharded over.
        role: "param", or "grad" for anything in the layout of the optimizer (gradients, updates).
        tree: the nested tree of shards, in the local shape of their spec.
        in_batch: whether the tree is part of a batch, in which it has no leaves, so that nothing cuts or compares it.
    """

    plan: Plan
    mesh: Mesh
    role: str

    in_batch = False

    def __init__(
        self, plan: Plan, mesh: Mesh, role: str, buffers: Mapping[str, torch.Tensor] | None = None, tree: Tree = None
    ) -> None:
        self.plan, self.mesh, self.role = plan, mesh, role
        self._held = _Held(buffers, tree)

    @property
    def tree(self) -> T_co:
        self._check()
        read: Callable[[Sharded], Tree] | None = environment().reads
        return cast(T_co, self.shards if read is None else read(self))

    @property
    def shards(self) -> Tree:
        """`tree`, outside of any function that runs on parameters."""
        self._check()
        if self._held.tree is not None:
            return self._held.tree
        leveled = self.in_func
        with nullcontext() if leveled else without_func():  # what is kept must belong to no level of torch.func
            tree = unflatten(self.plan.shape.treedef, self._leaves())
        if self.on_disk is None:  # what was read from disk is not kept
            self._held.tree = tree
            if self.mesh.size > 1 and not leveled:
                _mark(self.buffers.values())
        return tree

    @property
    def in_func(self) -> bool:
        """Whether the shards belong to a level of torch.func, such as those that it differentiates with respect to."""
        return func_transform() is not None and any(map(of_func, self.in_memory.values()))

    @property
    def stacked(self) -> bool:
        """Whether the shards have dimensions in front, of a batch, as torch.func.vmap and jacrev return them."""
        return any(buffer.dim() > 1 for buffer in self.in_memory.values())

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Bucket name -> this rank's flat buffer; of parameters on disk each access reads a copy."""
        self._check()
        if self._held.buffers is None:
            self._held.buffers = self._pack()
        return self._held.buffers

    @property
    def on_disk(self) -> BuffersOnDisk | None:
        """`buffers`, if they are in files."""
        return buffers if isinstance(buffers := self.buffers, BuffersOnDisk) else None

    @property
    def in_memory(self) -> Mapping[str, torch.Tensor]:
        """`buffers`, if they are in memory; else none."""
        return self.buffers if self.on_disk is None else {}

    def versions(self) -> dict[str, int]:
        """Numbers that change when a parameter is written to in place."""
        if self.on_disk is not None:
            return {"on disk": self.on_disk.files.writes}
        return {name: version_of(buffer) for name, buffer in self.buffers.items()}

    def parts(self, bucket: Bucket) -> Sequence[torch.Tensor | BufferOnDisk]:
        """What the buckets of `Bucket.cut` are made of: views of the bucket's buffer, or what reads them from disk."""
        if self.on_disk is None:
            return bucket.of_tiles(self.buffers[bucket.name])
        return [BufferOnDisk(self.on_disk.files, part) for part in bucket.cut]

    def next(self) -> Sharded:
        """A tree over this one's memory, for a step that writes the next values there."""
        buffers = dict(self.buffers) if self.on_disk is None else self.on_disk.files.tree()
        return Sharded(self.plan, self.mesh, self.role, buffers)

    def memory(self, bucket: Bucket) -> str:
        """The memory of a bucket's buffer: one of `shardlib.mesh.memories.MEMORIES`."""
        return bucket.memory.param if self.role == "param" else bucket.memory.optimizer

    def level(self, bucket: Bucket) -> int:
        """The level at which a bucket's buffer is split."""
        return bucket.param_level if self.role == "param" else bucket.levels

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets that have a buffer."""
        return self.plan.buckets if self.role == "param" else self.plan.trained

    def under(self, plan: Plan) -> Sharded:
        """This tree under another plan with the same layout. All such trees share their memory; taking one takes all."""
        other = Sharded(plan, self.mesh, self.role)
        other._held = self._held
        return other

    def shares(self, other: Sharded) -> bool:
        """Whether taking one of the two takes both."""
        return self._held is other._held

    def for_batch(self) -> Sharded:
        """This tree as a part of a batch: see `in_batch`."""
        made = self.under(self.plan)
        made.in_batch = True
        return made

    def lent(self) -> Sharded:
        """A tree over this one's memory that stays readable when this one is taken, for who knows what is there then."""
        return Sharded(self.plan, self.mesh, self.role, self.buffers)

    def take(self, why: str) -> None:
        """Mark this tree, and those that share its memory, as used up, because the memory belongs to a later state now. Later
        reads raise an error with ``why``."""
        self._held.buffers = self._held.tree = None
        self._held.taken = why

    def keeping(self) -> Callable[[], None]:
        """What undoes a later `take`."""
        held = self._held
        fields = held.buffers, held.tree, held.taken

        def again() -> None:
            held.buffers, held.tree, held.taken = fields

        return again

    def _check(self) -> None:
        if self._held.taken:
            raise DonatedStateError(self._held.taken)

    def _leaves(self) -> list[torch.Tensor | None]:
        shards: dict[str, torch.Tensor | None] = {}
        for bucket in self.buckets:
            level = self.level(bucket)
            flats = self.buffers[bucket.name].split_with_sizes(bucket.segment_sizes(level), dim=-1)
            for path, flat in zip(bucket.paths, flats, strict=True):
                shape = self.plan.local_shape(self.plan.placement_of[path], self.role)
                shards[path] = flat[..., : math.prod(shape)].view((*flat.shape[:-1], *shape))
        return [shards.get(leaf.path) for leaf in self.plan.leaves]

    def _pack(self) -> dict[str, torch.Tensor]:
        paths, leaves, _ = flatten(self._held.tree)
        by_path = dict(zip(paths, leaves, strict=True))
        wrong = [
            f"{path}: {type(leaf).__name__}" for path, leaf in by_path.items() if not isinstance(leaf, torch.Tensor)
        ]
        if wrong:
            raise TreeError(f"leaves of a sharded tree must be tensors:\n{listing(wrong)}")
        check_same_tree(self.plan, paths, [tuple(leaf.shape) for leaf in leaves], self.role)
        if not any(map(of_func, leaves)):  # those have no values to compare
            check_ties(self.plan, by_path)
        buffers = {}
        for bucket in self.buckets:
            level = self.level(bucket)
            if any(of_func(by_path[path]) for path in bucket.paths):
                buffers[bucket.name] = _joined(bucket, level, [by_path[path] for path in bucket.paths])
                continue
            dtypes = {by_path[path].dtype for path in bucket.paths}
            # Gradients may be in a wider dtype than parameters, which could not hold them.
            dtype = bucket.dtype if self.role == "param" else functools.reduce(torch.promote_types, dtypes)
            buffer = self.mesh.zeros(bucket.size(level), dtype, self.memory(bucket))
            for path, flat in zip(bucket.paths, bucket.leaf_segments(buffer, level), strict=True):
                flat[: by_path[path].numel()].copy_(by_path[path].detach().reshape(-1))
            buffers[bucket.name] = buffer
        return buffers

    def __copy__(self) -> Sharded:
        """Another tree over the same memory."""
        return self.under(self.plan)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        """A tree with memory of its own, on the same mesh.

        Raises:
            TreeError: the parameters are on disk.
        """
        if self.on_disk is not None:
            raise TreeError("parameters on disk cannot be copied: save a checkpoint, or take sl.unshard(params)")
        buffers = {name: cloned(buffer) for name, buffer in self.buffers.items()}
        return Sharded(self.plan, self.mesh, self.role, buffers)

    def __reduce__(self) -> NoReturn:
        raise TreeError(
            "a Sharded tree, one rank's part, cannot be pickled: return sl.unshard(params), or save a checkpoint"
        )

    def __getitem__(self, key: Any) -> Any:
        tree: Any = self.tree
        return tree[key]

    def __iter__(self) -> Iterator[Any]:
        tree: Any = self.tree
        return iter(tree)

    def __len__(self) -> int:
        tree: Any = self.tree
        return len(tree)

    def __repr__(self) -> str:
        return f"Sharded {self.role} tree of rank {self.mesh.rank} on {self.mesh}\n{self.plan}"

    def shown(self) -> Iterator[Panel]:
        """What a notebook and a terminal show: this rank's shards. Nothing is read."""
        what = "Sharded parameters" if self.role == "param" else "Sharded gradients"
        buckets = self.buckets
        held = sum(bucket.size(self.level(bucket)) * bucket.dtype.itemsize for bucket in buckets)
        elements = count(self.plan.parameters)
        yield Title(f"{what}: rank {self.mesh.rank} of {self.mesh!r} holds {size(held)} of {elements} elements")
        if self._held.taken:
            yield Paragraph(self._held.taken)
        yield from leaf_folds(self.plan, self.role, local=True)


def _children(node: Sharded) -> tuple[Iterable[Any], Any]:
    if environment().reads is not None:
        return (node.tree,), None
    return ((), node) if node.in_batch else ((node.tree,), (node.plan, node.mesh, node.role))


def _build(static: Any, children: Iterable[Any]) -> Any:
    if isinstance(static, Sharded):
        return static
    (tree,) = children
    if static is None:
        return tree
    plan, mesh, role = static
    return Sharded(plan, mesh, role, tree=tree)


def _joined(bucket: Bucket, level: int, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """A buffer at a level as a differentiable function of its leaves' shards."""
    sizes = bucket.segment_sizes(level)
    flats = [F.pad(leaf.reshape(-1), (0, size - leaf.numel())) for leaf, size in zip(leaves, sizes, strict=True)]
    return torch.cat(flats)


class _Constants:
    """What of a tree torch's pytrees do not see: the buffers of leaves that are not trained, constants to torch.func."""

    def __init__(self, buffers: Mapping[str, torch.Tensor]) -> None:
        self.buffers = dict(buffers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constants) and self.buffers.keys() == other.buffers.keys()

    def __hash__(self) -> int:
        return hash(frozenset(self.buffers))


def _torch_children(node: Sharded) -> tuple[Iterable[Any], Any]:
    """To torch's pytrees, and so to torch.func, the leaves of a tree are the flat buffers of what is trained."""
    if environment().reads is not None or node.in_batch or node.on_disk is not None:
        return _children(node)
    buffers, trained = node.buffers, {bucket.name for bucket in node.plan.trained}
    constants = _Constants({name: buffer for name, buffer in buffers.items() if name not in trained})
    return [buffer for name, buffer in buffers.items() if name in trained], (node.plan, node.mesh, node.role, constants)


def _torch_build(static: Any, children: Iterable[Any]) -> Any:
    if not isinstance(static, tuple) or len(static) == 3:
        return _build(static, children)
    plan, mesh, role, constants = static
    made = Sharded(plan, mesh, role)
    given = dict(zip((bucket.name for bucket in plan.trained), children, strict=True))
    made._held.buffers = {
        bucket.name: given.get(bucket.name, constants.buffers.get(bucket.name)) for bucket in made.buckets
    }
    if any(isinstance(buffer, torch.Tensor) and not buffer.dim() for buffer in given.values()):
        raise TreeError("torch.func cannot map over a Sharded tree: pass None for it in in_dims")
    return made


register_node(Sharded, _children, _build, (_torch_children, _torch_build))


def check_ties(plan: Plan, leaves: Mapping[str, torch.Tensor]) -> None:
    """Refuse tied leaves, which are one parameter in the plan, whose values differ."""
    differing = [
        f"{placement.path} and {alias}"
        for placement in plan.placements
        for alias in placement.aliases
        if alias in leaves and not _same(leaves[placement.path], leaves[alias])
    ]
    if differing:
        raise TreeError(
            f"tied leaves hold different values:\n{listing(differing)}\nGive both the same, or shard a tree without "
            "ties."
        )


def _same(leaf: torch.Tensor, alias: torch.Tensor) -> bool:
    return leaf is alias or torch.allclose(leaf, alias.to(leaf.dtype), rtol=0, atol=0, equal_nan=True)


def check_same_tree(
    plan: Plan, paths: Sequence[str], shapes: Sequence[tuple[int, ...]], role: str = "param", *, whole: bool = False
) -> None:
    """Raise `TreeError` listing each leaf of a tree that is missing, new, or of another shape than in the plan.

    ``shapes`` are of this rank's shards, or with ``whole`` of whole leaves.
    """
    what = "parameters" if role == "param" else "gradients"
    # In a rank's tree the leaves of other stages are None; in one of gradients those of frozen leaves are, too.
    held = {bucket.name for bucket in (plan.buckets if role == "param" else plan.trained)}
    wanted = {path: leaf for path, leaf in zip(plan.shape.paths, plan.leaves, strict=True) if leaf.bucket in held}
    got = dict(zip(paths, shapes, strict=True))
    failures = [f"{path}: missing" for path in wanted if path not in got]
    failures += [f"{path}: not in the plan" for path in got if path not in wanted]
    for path, placement in wanted.items():
        planned = placement.compute.shape if whole else plan.local_shape(placement, role)
        if path in got and got[path] != planned:
            share = "" if whole else f" (this rank's share of {placement.param.shape})"
            failures.append(f"{path}: shape {got[path]}, planned {planned}{share}")
    if failures:
        remedy = (
            "Shard the changed tree with sl.shard."
            if role == "param"
            else "Give each trained parameter a gradient of its shape, zeros for none."
        )
        raise TreeError(f"the {what} differ from the plan:\n{listing(failures)}\n{remedy}")


# Marks on the memory of shards that were read out of sharded trees, so that none is taken for a plain tree of one device.


_marked: dict[int, Any] = {}  # identity of a storage -> a weak reference to it


def _mark(buffers: Iterable[torch.Tensor]) -> None:
    """Note that views of these buffers are shards."""
    for buffer in buffers:
        storage = buffer.untyped_storage()
        _marked[storage_id(storage)] = weakref.ref(storage)


def require_no_shards(what: str, tree: Any) -> None:
    """Refuse shards among the leaves of a plain tree.

    Args:
        what: the function that was given the tree, for the message.

    Raises:
        TreeError: lists them.
    """
    if not _marked:
        return
    paths, leaves, _ = flatten(tree)
    shards = [
        f"{path or 'the tree'}: {tuple(leaf.shape)}"
        for path, leaf in zip(paths, leaves, strict=True)
        if _is_shard(leaf)
    ]
    if shards:
        raise TreeError(
            f"{what} was given a part of a sharded tree:\n{listing(shards)}\nGive the whole tree, or a part of "
            "sl.unshard(params)"
        )


def _is_shard(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.device.type == "meta":
        return False
    try:
        key = storage_id(leaf.untyped_storage())
    except (NotImplementedError, RuntimeError):  # of a class without memory
        return False
    storage = _marked.get(key)
    if storage is not None and storage() is None:  # another one's memory now
        del _marked[key]
        return False
    return storage is not None
