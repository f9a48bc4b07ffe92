"""Parameters as torch's DTensors, for its own tools (`torch.distributed.checkpoint`, `torch.optim`, torchao), and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardlib.common._compat import strided_shard
from shardlib.errors import IllegalComposition, MeshError, TreeError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.specs import P
from shardlib.mesh.transport import ProcessGroup
from shardlib.plan.plan import Plan
from shardlib.sharded.given import sharded_params
from shardlib.sharded.shard import put_together
from shardlib.sharded.tree import Sharded
from shardlib.sharded.unshard import whole_leaves
from shardlib.tree import Tree, flatten, unflatten


def to_dtensors(params: Any) -> Tree:
    """The pytree with a DTensor in the place of each leaf, over the mesh's axes that have several ranks.

    A leaf that is cut along its dimensions has those placements (``Shard``, and where an earlier axis of the mesh is the
    minor one ``_StridedShard``); no rank sends anything. A leaf that is cut as a flat tensor, since no dimension divides, has
    no placement that says so: it is gathered, one bucket at a time, and cut along dimension 0 in pieces of unequal size,
    ``Shard(0)``. As soon as there is one, all buckets are gathered once, which `unshard` would cost too.

    The DTensors are copies: what changes them changes no parameter. `from_dtensors` brings them back.

    Args:
        params: `Sharded` parameters, or a `TrainState`, whose parameters are taken.

    Raises:
        TreeError: ``params`` is neither.
        MeshError: the ranks are simulated, or there is one alone: torch has no mesh of these.
        IllegalComposition: ranks hold the blocks of their stages, or parameters are on disk.

    >>> def placements(mesh):
    ...     params = sl.shard({"w": torch.ones(8, 4)}, mesh, stage=3)
    ...     return str(sl.to_dtensors(params)["w"].placements)
    >>> sl.launch(placements, mesh=dict(data=2))
    ['(Shard(dim=0),)', '(Shard(dim=0),)']
    """
    params = sharded_params("to_dtensors", params)
    _require_whole_model("to_dtensors", params)
    plan, device_mesh = params.plan, _device_mesh(params.mesh)
    axes = tuple(device_mesh.mesh_dim_names or ())
    paths, leaves, _ = flatten(params.tree)
    planned = dict(zip(plan.shape.paths, plan.leaves, strict=True))
    told = {path: _placements(planned[path].param.spec, axes, params.mesh.shape) for path in paths}
    made: dict[str, DTensor] = {}
    whole = dict(whole_leaves(params)) if None in told.values() else {}
    for path, leaf in zip(paths, leaves, strict=True):
        placement, placements = planned[path], told[path]
        if placements is None:
            local, placements = _cut(whole[placement.path], placement.param.spec, axes, params.mesh)
        else:
            local = leaf.detach().clone()
        shape = torch.Size(placement.compute.shape)
        stride = torch.empty(shape, device="meta").stride()
        made[path] = DTensor.from_local(local, device_mesh, placements, run_check=False, shape=shape, stride=stride)
    return unflatten(plan.shape.treedef, [made[path] for path in paths])


def from_dtensors(tree: Tree, like: Any) -> Sharded:
    """Parameters from a pytree as `to_dtensors` makes it, in the layout of ``like``. For a train state give the result to
    `replace_params`.

    A DTensor with the placements of its leaf is taken as it is; others are gathered, one at a time, and cut anew, and so are
    whole tensors.

    Args:
        tree: DTensors, or whole tensors with the same values on every rank, or both.
        like: `Sharded` parameters, or a `TrainState`.

    Raises:
        TreeError: other leaves or shapes than those of ``like``; or ``like`` is neither.
        MeshError, IllegalComposition: as for `to_dtensors`.

    >>> def there_and_back(mesh):
    ...     params = sl.shard({"w": torch.arange(8.0)}, mesh, stage=3)
    ...     twice = {"w": sl.to_dtensors(params)["w"] * 2}
    ...     return sl.unshard(sl.from_dtensors(twice, params))["w"].sum().item()
    >>> sl.launch(there_and_back, mesh=dict(data=2))
    [56.0, 56.0]
    """
    like = sharded_params("from_dtensors", like)
    _require_whole_model("from_dtensors", like)
    plan, device_mesh = like.plan, _device_mesh(like.mesh)
    axes = tuple(device_mesh.mesh_dim_names or ())
    paths, leaves, treedef = flatten(tree)
    planned = dict(zip(plan.shape.paths, plan.leaves, strict=True))
    if wrong := [path for path in paths if path not in planned]:
        raise TreeError(f"from_dtensors: these leaves are not among the parameters:\n{listing(wrong)}\nTake them out.")

    def taken(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        placements = _placements(planned[path].param.spec, axes, like.mesh.shape)
        same = leaf.device_mesh.mesh.tolist() == device_mesh.mesh.tolist()
        local = same and placements is not None and tuple(leaf.placements) == placements
        return (leaf.to_local() if local else leaf.full_tensor()).detach()

    return put_together(unflatten(treedef, list(map(taken, paths, leaves))), like)


def _require_whole_model(what: str, params: Sharded) -> None:
    plan: Plan = params.plan
    if plan.stages.axes:
        raise IllegalComposition(
            f"{what}: parameters are in stages; shard them without pipeline: sl.shard(params, mesh, chain)"
        )
    if params.on_disk is not None:
        raise IllegalComposition(f"{what}: parameters are on disk; shard them in memory: sl.shard(params, mesh, chain)")


def _device_mesh(mesh: Mesh) -> DeviceMesh:
    """torch's mesh of the axes with several ranks, of the groups that there are."""
    axes = [axis for axis, size in mesh.shape.items() if size > 1]
    groups = [group.group for axis in axes if isinstance(group := mesh.group(axis), ProcessGroup)]
    if not axes or len(groups) < len(axes):
        why = "one rank alone" if not axes else "simulated ranks"
        raise MeshError(f"{mesh} has {why} and no DeviceMesh; use torchrun or sl.launch, or sl.unshard(params)")
    sizes = [mesh.shape[axis] for axis in axes]
    ranks = torch.arange(math.prod(sizes)).reshape(sizes)
    if len(axes) == 1:
        return DeviceMesh.from_group(groups[0], mesh.device.type, mesh_dim_names=tuple(axes))
    return DeviceMesh.from_group(groups, mesh.device.type, mesh=ranks, mesh_dim_names=tuple(axes))


def _placements(spec: P, axes: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[Placement, ...] | None:
    """The placements that say the same as a spec; None where none do."""
    if any(axis in axes for axis in spec.flat_axes) or spec.padded:
        return None
    found: dict[str, Placement] = {}
    for dim, entry in enumerate(spec.entries):
        cut = [axis for axis in entry if axis in axes]  # major to minor
        for number, axis in enumerate(cut):
            # An axis of the mesh cuts what earlier ones have left. Where later axes cut first, it has a share of each part.
            later = [major for major in cut[:number] if axes.index(major) > axes.index(axis)]
            factor = math.prod(sizes[major] for major in later)
            found[axis] = strided_shard(dim, factor) if factor > 1 else Shard(dim)
    return tuple(found.get(axis, Replicate()) for axis in axes)


def _cut(whole: torch.Tensor, spec: P, axes: tuple[str, ...], mesh: Mesh) -> tuple[torch.Tensor, tuple[Placement, ...]]:
    """This rank's piece of a whole leaf along dimension 0, over the axes that it is cut over, as torch.chunk cuts."""
    used = [axis for axis in axes if axis in spec.axes] if whole.dim() else []
    for axis in used:
        pieces = whole.chunk(mesh.shape[axis])
        at = mesh.coords[axis]
        whole = pieces[at] if at < len(pieces) else whole[:0]
    return whole.clone(), tuple(Shard(0) if axis in used else Replicate() for axis in axes)
