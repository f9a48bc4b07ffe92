"""`unshard`: the full pytree from its shards, `stream_weights`: one leaf after the other; and `Resharded`, its values for
another plan or another mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol, overload

import torch

from shardlib.collectives import primitives
from shardlib.errors import TreeError
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.specs import Leaf
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import gathers
from shardlib.sharded.gather import Gather
from shardlib.sharded.given import sharded_params
from shardlib.sharded.tree import Sharded
from shardlib.tree import T, T_co, matches, unflatten


class HoldsParams(Protocol[T_co]):
    """A train state, to what needs its parameters alone."""

    @property
    def params(self) -> Sharded[T_co]: ...


@overload
def unshard(params: Sharded[T]) -> T: ...
@overload
def unshard(params: HoldsParams[T]) -> T: ...
def unshard(params: Any) -> Any:
    """Gather the full pytree on every rank, in the memory that the shards lie in. Tied leaves come back as one tensor;
    gradients of frozen leaves as None.

    Args:
        params: `Sharded` parameters or gradients; or a `TrainState`, whose parameters are gathered.

    Raises:
        TreeError: anything else.

    >>> params = {"w": torch.ones(8, 4)}
    >>> sl.simulate(lambda mesh: sl.unshard(sl.shard(params, mesh, stage=3))["w"].shape, mesh=dict(data=2))
    [torch.Size([8, 4]), torch.Size([8, 4])]
    """
    params = sharded_params("unshard", params)
    whole, plan = dict(whole_leaves(params)), params.plan.everywhere
    return unflatten(plan.shape.treedef, [whole.get(leaf.path) for leaf in plan.leaves])


def stream_weights(params: Any, only: str | Sequence[str] = "*") -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors by name, one bucket gathered at a time, for what takes a model's weights while no rank has room for all
    of them: an inference engine, or files of adapters.

    Every rank must take all of them: each is gathered when it is taken. Buckets without such leaves are not gathered.

    Args:
        params: `Sharded` parameters, or a `TrainState`.
        only: globs over paths.

    Yields:
        The name, a path with dots for slashes (of parameters of `from_module` the module's name), and the tensor, in the
        memory that its shards lie in. Tied leaves come once, by their first name.

    Raises:
        TreeError: ``params`` are anything else, or no path matches.

    >>> params = sl.shard({"layer": {"weight": torch.ones(2, 3), "bias": torch.zeros(3)}}, sl.make_mesh(), stage=3)
    >>> [(name, tuple(weight.shape)) for name, weight in sl.stream_weights(params, only="*weight")]
    [('layer.weight', (2, 3))]
    """
    params = sharded_params("stream_weights", params)
    paths = {placement.path for placement in params.plan.everywhere.placements}
    taken = {path for path in paths if matches(path, only)}
    if not taken:
        raise TreeError(f"stream_weights: only={only!r} matches none of {len(paths)} leaves, such as {min(paths)!r}")
    return ((path.replace("/", "."), leaf) for path, leaf in whole_leaves(params, taken))


def whole_leaves(params: Sharded, only: AbstractSet[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Path and whole value of each leaf, copied to the memory that its shards lie in; tied leaves once, by the first path.

    One bucket is gathered at a time. Collective: every rank takes all of them.

    Args:
        only: the paths that are wanted; all by default.
    """
    compute = {placement.path: placement.compute for placement in params.plan.everywhere.placements}
    for bucket, buffer in _whole_buffers(params, only):
        for path, leaf in zip(bucket.paths, bucket.leaves(buffer), strict=True):
            if only is not None and path not in only:
                continue
            where = params.mesh.device_for(params.memory(bucket))
            yield path, _gather_slices(leaf, compute[path], params.mesh).to(where, copy=True)


def _whole_buffers(params: Sharded, only: AbstractSet[str] | None) -> Iterator[tuple[Bucket, torch.Tensor]]:
    """Every bucket with leaves of these paths, with its gathered buffer. Buckets of other stages are broadcast by the first
    rank that holds them."""
    plan, mesh, buffers = params.plan, params.mesh, params.buffers
    axes = [axis for axis in plan.stages.axes if mesh.shape[axis] > 1]
    if not axes:
        for bucket in params.buckets:
            if only is None or not only.isdisjoint(bucket.paths):
                yield bucket, _gathered(params, bucket)
        return
    (axis,) = axes
    if params.on_disk is None:
        local = {name: buffer.dtype for name, buffer in buffers.items()}
    else:  # without a read
        local = {bucket.name: bucket.dtype for bucket in params.buckets}
    dtypes = {name: dtype for held in primitives.all_gather_object(mesh, [axis], local) for name, dtype in held.items()}
    for bucket in plan.everywhere.buckets:
        if bucket.name not in dtypes or (only is not None and only.isdisjoint(bucket.paths)):
            continue
        if bucket.name in buffers:
            buffer = _gathered(params, bucket).clone()  # a broadcast writes, and this may be the stored buffer
        else:
            buffer = torch.empty(bucket.size(0), dtype=dtypes[bucket.name], device=mesh.device)
        primitives.broadcast(mesh, axis, buffer, bucket.homes[0]).wait()
        yield bucket, buffer


def _gathered(params: Sharded, bucket: Bucket) -> torch.Tensor:
    buffer, level = params.buffers[bucket.name], params.level(bucket)
    return Gather(params.mesh, gathers(bucket, 0, level, {}), buffer).wait()


def _gather_slices(local: torch.Tensor, leaf: Leaf, mesh: Mesh) -> torch.Tensor:
    """The whole leaf from this rank's slice."""
    for dim, entry in enumerate(leaf.spec.entries):
        for axis in reversed(entry):
            out = local.new_empty((mesh.shape[axis], *local.shape))
            primitives.all_gather(mesh, axis, out, local.contiguous()).wait()
            local = out.movedim(0, dim).flatten(dim, dim + 1)
    return local[: leaf.shape[0]] if leaf.spec.padded else local


class Resharded:
    """Sharded parameters as something to be sharded: its tree has the whole leaves' shapes, and `replay` their values, one
    bucket after the other."""

    def __init__(self, params: Sharded) -> None:
        self._params, plan = params, params.plan.everywhere
        like = {
            leaf.path: torch.empty(leaf.compute.shape, dtype=leaf.compute.dtype, device="meta") for leaf in plan.leaves
        }
        self.tree: Any = unflatten(plan.shape.treedef, [like[leaf.path] for leaf in plan.leaves])  # tied leaves are one

    def replay(self, paths: Mapping[int, str], take: Callable[[str, torch.Tensor], None]) -> None:
        """Give each leaf's path and value to ``take``."""
        for path, value in whole_leaves(self._params):
            take(path, value)
