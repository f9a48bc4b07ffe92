"""`Sharded`: a pytree whose leaves are this rank's shards; `shard` makes one and `unshard` gives the whole back."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from shardlib.checksum import checksum
from shardlib.claims import Transform, chain
from shardlib.collectives import primitives
from shardlib.deferred import Deferred, defer
from shardlib.errors import DonatedStateError, IllegalComposition, TreeError, listing
from shardlib.exchange import Gather
from shardlib.init import Draw
from shardlib.layout import Bucket
from shardlib.mesh import Mesh, as_mesh
from shardlib.places import Places
from shardlib.plan import ROLES, Plan, check_same_tree
from shardlib.planning import build_plan
from shardlib.specs import Leaf, P, shard_of
from shardlib.transforms.zero import zero
from shardlib.tree import Tree, check_tensors, flatten, register_node, unflatten


class Sharded:
    """This rank's shards of a parameter pytree (role "param") or of its gradients (role "grad").

    A pytree: ``tree_map`` over it yields another `Sharded`; indexing reads the tree. Underneath, the shards lie in
    one flat buffer per bucket; leaves are views. A tree that a ``tree_map`` made is packed into buffers when they
    are next asked for.

    Attributes:
        plan: where every tensor lives; under a pipeline, the part of it that concerns this rank (``plan.everywhere`` is
            all of it), and other stages' leaves are None.
        mesh: the mesh it is sharded over.
        role: "param", or "grad" for anything in the layout of the optimizer (gradients, updates).
        tree: the nested tree of shards, in the local shape of their spec.
    """

    def __init__(
        self, plan: Plan, mesh: Mesh, role: str, buffers: dict[str, torch.Tensor] | None = None, tree: Tree = None
    ) -> None:
        self.plan, self.mesh, self.role = plan, mesh, role
        self._buffers = buffers
        self._tree = tree
        self._taken: str | None = None
        self._origin: Sharded | None = None

    @property
    def tree(self) -> Tree:
        self._check()
        if self._tree is None:
            self._tree = unflatten(self.plan.treedef, self._leaves())
        return self._tree

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Bucket name -> this rank's flat buffer."""
        self._check()
        if self._buffers is None:
            self._buffers = self._pack()
        return self._buffers

    def level(self, bucket: Bucket) -> int:
        return bucket.param_level if self.role == "param" else bucket.levels

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self.plan.buckets if self.role == "param" else self.plan.trained

    def under(self, plan: Plan) -> Sharded:
        """The same memory under a plan with the same layout; used up together with it."""
        other = Sharded(plan, self.mesh, self.role, self.buffers)
        other._origin = self
        return other

    def take(self, why: str) -> None:
        """Mark this value as used up: its memory now belongs to a later state."""
        self._taken = why
        if self._origin is not None:
            self._origin.take(why)

    def _check(self) -> None:
        if self._taken:
            raise DonatedStateError(self._taken)

    def _leaves(self) -> list[torch.Tensor | None]:
        shards: dict[str, torch.Tensor | None] = {}
        placements = {placement.path: placement for placement in self.plan.placements}
        for bucket in self.buckets:
            level = self.level(bucket)
            for path, part in zip(bucket.paths, bucket.leaf_parts(self.buffers[bucket.name], level), strict=True):
                shape = self.plan.local_shape(placements[path], self.role)
                shards[path] = part[: math.prod(shape)].view(shape)
        return [shards.get(self.plan.placements[owner].path) for owner in self.plan.owners]

    def _pack(self) -> dict[str, torch.Tensor]:
        paths, leaves, _ = flatten(self._tree)
        found = dict(zip(paths, leaves, strict=True))
        if self.role == "param":
            wrong = [
                f"{path}: {type(leaf).__name__}" for path, leaf in found.items() if not isinstance(leaf, torch.Tensor)
            ]
            if wrong:
                raise TreeError(f"leaves of a sharded tree must be tensors:\n{listing(wrong)}")
            check_same_tree(self.plan, paths, [tuple(leaf.shape) for leaf in leaves], "parameters")
            _check_ties(self.plan, found)
        buffers = {}
        for bucket in self.buckets:
            level = self.level(bucket)
            buffer = torch.zeros(bucket.size(level), dtype=bucket.dtype, device=self.mesh.device)
            for path, part in zip(bucket.paths, bucket.leaf_parts(buffer, level), strict=True):
                part[: found[path].numel()].copy_(found[path].detach().reshape(-1))
            buffers[bucket.name] = buffer
        return buffers

    def __getitem__(self, key: Any) -> Any:
        return self.tree[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def __repr__(self) -> str:
        return f"Sharded {self.role} tree of rank {self.mesh.rank} on {self.mesh}\n{self.plan}"


def _children(node: Sharded) -> tuple[Iterable[Any], Any]:
    return (node.tree,), (node.plan, node.mesh, node.role)


def _build(static: Any, children: Iterable[Any]) -> Sharded:
    plan, mesh, role = static
    (tree,) = children
    return Sharded(plan, mesh, role, tree=tree)


register_node(Sharded, _children, _build)


def require_same_copies(params: Sharded) -> None:
    """Refuse parameters that ranks hold copies of with different values; every rank calls it.

    Raises:
        RankMismatch: names the buckets and the ranks.
    """
    mesh = params.mesh
    sums: dict[str, str] = {}
    for bucket in params.buckets:
        apart = {*bucket.axes[: params.level(bucket)], *bucket.slices}
        at = [f"{axis}={mesh.coords[axis]}" for axis in mesh.shape if axis in apart]
        sums[" ".join([bucket.name, *at])] = checksum(params.buffers[bucket.name])
    remedy = "Compute them alike on every rank: from the same seed, file or collective."
    primitives.require_equal(mesh, "parameters", sums, remedy, absent=True)


def default_transform(transform: Transform | None, stage: int | None) -> Transform:
    """``stage=n`` is short for `zero`\\ (n); with neither, plain data parallelism."""
    if stage is None:
        return transform if transform is not None else zero(0)
    return zero(stage) if transform is None else chain(transform, zero(stage))


def shard(
    params: Tree | Callable[[], Tree], mesh: Any, transform: Transform | None = None, *, stage: int | None = None
) -> Sharded:
    """Split a parameter pytree over a mesh; returns this rank's shards, with their specs.

    Integers and booleans are held and not trained; so are complex leaves and floats of 8 bits under `freeze`, without which
    they are refused.

    Args:
        params: any pytree of tensors, the same values on every rank; or a function without arguments that makes
            one, which is then run piece by piece, so that no rank ever holds the whole model. Tensors may be on any
            devices: leaf by leaf, what this rank holds of each is copied to the mesh's, and no more.
        mesh: a `Mesh`, or a torch DeviceMesh with named dimensions.
        transform: how to shard; by default plain data parallelism over axis "data".
        stage: short for ``zero(stage)``, added to ``transform``.

    Raises:
        TreeError: a leaf that is not a tensor, is of a dtype that is not trained, or is on the meta device.
        IllegalComposition: transforms that do not compose, or do not fit the mesh.
        RankMismatch: the ranks' trees, plans or values differ; names the leaves and the ranks.
    """
    mesh = as_mesh(mesh)
    if mesh.abstract:
        raise IllegalComposition(
            f"{mesh} has no ranks to hold shards; use sl.make_plan to plan on it, sl.make_mesh to run"
        )
    source = defer(params) if callable(params) else None
    tree = source.tree if source else params
    plan = build_plan(tree, mesh, default_transform(transform, stage))
    _check_ranks_agree(plan, mesh)
    return _placed(plan.at(mesh.coords), mesh, tree, source)


def shard_alike(params: Tree, like: Sharded) -> Sharded:
    """A whole pytree, the same values on every rank, cut as ``like`` is.

    Raises:
        TreeError: leaves that are missing, new or of another shape; lists them.
        RankMismatch: the ranks' values differ.
    """
    paths, leaves, _ = flatten(params)
    check_tensors(paths, leaves)
    check_same_tree(like.plan.everywhere, paths, [tuple(leaf.shape) for leaf in leaves], "parameters", whole=True)
    _check_ties(like.plan, dict(zip(paths, leaves, strict=True)))
    return _placed(like.plan, like.mesh, params)


def _placed(plan: Plan, mesh: Mesh, tree: Tree, source: Deferred | None = None) -> Sharded:
    """This rank's shards of the values in ``tree``, or of those that ``source`` makes."""
    buffers = {
        bucket.name: torch.zeros(bucket.size(bucket.param_level), dtype=bucket.dtype, device=mesh.device)
        for bucket in plan.buckets
    }
    parts = {
        path: (bucket, part)
        for bucket in plan.buckets
        for path, part in zip(bucket.paths, bucket.leaf_parts(buffers[bucket.name], bucket.param_level), strict=True)
    }
    paths, leaves, _ = flatten(tree)
    compute = {placement.path: placement.compute.spec for placement in plan.placements}
    sums: dict[str, str] = {}

    def place(path: str, value: torch.Tensor | Draw) -> None:
        if mesh.size > 1 and path in compute:
            sums[path] = str(value) if isinstance(value, Draw) else checksum(value)
        if path in parts:
            bucket, part = parts[path]
            if isinstance(value, Draw):
                _draw(part, value, compute[path], mesh, bucket)
            else:
                _fill(part, shard_of(value, compute[path], mesh.shape, mesh.coords), mesh, bucket)

    _check_values(paths, leaves, mesh)
    if source:
        source.replay(dict(enumerate(paths)), place)
    else:
        for path, leaf in zip(paths, leaves, strict=True):
            place(path, leaf.detach())
    primitives.require_equal(
        mesh,
        "initial values",
        sums,
        "Start every rank from the same seed or checkpoint before sl.shard.",
    )
    return Sharded(plan, mesh, "param", buffers)


def unshard(params: Sharded) -> Tree:
    """Gather the full pytree on every rank. Tied leaves come back as one tensor; gradients of frozen leaves as None."""
    whole: dict[str, torch.Tensor] = {}
    plan = params.plan.everywhere
    compute = {placement.path: placement.compute for placement in plan.placements}
    for bucket, buffer in _whole_buffers(params):
        for path, leaf in zip(bucket.paths, bucket.leaves(buffer), strict=True):
            whole[path] = _gather_slices(leaf, compute[path], params.mesh).clone()
    return unflatten(plan.treedef, [whole.get(plan.placements[owner].path) for owner in plan.owners])


def _whole_buffers(params: Sharded) -> Iterator[tuple[Bucket, torch.Tensor]]:
    """Every bucket gathered; other stages' come from the first rank along the pipeline's axis that has them."""
    plan, mesh, buffers = params.plan, params.mesh, params.buffers
    pipeline = plan.pipeline
    if pipeline is None or mesh.shape[pipeline.axis] == 1:
        for bucket in params.buckets:
            yield bucket, _gathered(params, bucket)
        return
    mine = {name: buffer.dtype for name, buffer in buffers.items()}
    dtypes = {
        name: dtype
        for held in primitives.all_gather_object(mesh, [pipeline.axis], mine)
        for name, dtype in held.items()
    }
    for bucket in plan.everywhere.buckets:
        if bucket.name not in dtypes:
            continue
        if bucket.name in buffers:
            buffer = _gathered(params, bucket).clone()  # a broadcast writes, and this may be the stored one
        else:
            buffer = torch.empty(bucket.size(0), dtype=dtypes[bucket.name], device=mesh.device)
        primitives.broadcast(mesh, pipeline.axis, buffer, bucket.homes[0]).wait()
        yield bucket, buffer


def _gathered(params: Sharded, bucket: Bucket) -> torch.Tensor:
    buffer, level = params.buffers[bucket.name], params.level(bucket)
    return Gather(params.mesh, bucket, buffer, 0, level).wait() if level else buffer


def _gather_slices(part: torch.Tensor, leaf: Leaf, mesh: Mesh) -> torch.Tensor:
    for dim, entry in enumerate(leaf.spec.entries):
        for axis in reversed(entry):
            out = part.new_empty((mesh.shape[axis], *part.shape))
            primitives.all_gather(mesh, axis, out, part.contiguous()).wait()
            part = out.movedim(0, dim).flatten(dim, dim + 1)
    return part[: leaf.shape[0]] if leaf.spec.padded else part


def _fill(part: torch.Tensor, value: torch.Tensor, mesh: Mesh, bucket: Bucket) -> None:
    """Copy this rank's piece of a whole leaf; what the padding covers stays zero."""
    start = bucket.owner(mesh.coords, 0, bucket.param_level) * part.numel()
    flat = value.reshape(-1)[start : start + part.numel()]
    part[: flat.numel()].copy_(flat)


def _draw(part: torch.Tensor, draw: Draw, spec: P, mesh: Mesh, bucket: Bucket) -> None:
    """Draw this rank's piece of a leaf, and no more of it; what the padding covers stays zero."""
    first = bucket.owner(mesh.coords, 0, bucket.param_level) * part.numel()
    window = spec.window(draw.shape, mesh.shape, mesh.coords)
    held = min(part.numel(), max(0, window.numel - first))
    draw.fill(part[:held], Places(*window, first))


def _check_values(paths: list[str], leaves: list[torch.Tensor], mesh: Mesh) -> None:
    """Refuse leaves without values, unless the mesh's device has none either."""
    hollow = [
        f"{path}: shape {tuple(leaf.shape)}"
        for path, leaf in zip(paths, leaves, strict=True)
        if leaf.device.type == "meta" != mesh.device.type
    ]
    if hollow:
        raise TreeError(
            f"{len(hollow)} parameters are on the meta device and have no values for {mesh.device}:\n{listing(hollow)}\n"
            "Pass sl.shard the function that makes the model; for a module on the meta device that is what "
            "sl.from_module(module) returns as params."
        )


def _check_ties(plan: Plan, leaves: Mapping[str, torch.Tensor]) -> None:
    """Refuse leaves that are one parameter in the plan and have come to differ: one of them would be lost."""
    apart = [
        f"{placement.path} and {alias}"
        for placement in plan.placements
        for alias in placement.aliases
        if alias in leaves and not _same(leaves[placement.path], leaves[alias])
    ]
    if apart:
        raise TreeError(
            f"leaves that are one parameter, tied when it was sharded, hold different values:\n{listing(apart)}\nGive both "
            "the same values, or shard a tree in which they are not tied anew with sl.shard."
        )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or torch.allclose(one, other.to(one.dtype), rtol=0, atol=0, equal_nan=True)


def _check_ranks_agree(plan: Plan, mesh: Mesh) -> None:
    items: dict[str, Any] = {
        "micro-batches": plan.microbatches,
        "transforms": plan.log,
        "batch axes": plan.batch_axes,
    }
    if plan.pipeline is not None:
        schedule = plan.pipeline.schedule
        items["pipeline"] = f"{schedule.name}, checksum {zlib.crc32(str(schedule).encode()):08x}"
        items["blocks of stages"] = plan.pipeline.spans
    for placement in plan.placements:
        items[placement.path] = (placement.compute.shape, str(placement.compute.dtype), placement.aliases)
        lies = {role: leaf and leaf.spec for role in ("compute", *ROLES) for leaf in (getattr(placement, role),)}
        items[f"{placement.path} lies"] = f"{lies}, style {placement.style!r}"
    primitives.require_equal(mesh, "parameter trees or plans", items, "Build the same model and plan on every rank.")
