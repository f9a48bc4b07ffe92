"""`shard`: puts a pytree on a mesh, by a transform or a ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch

from shardlib.errors import IllegalComposition, TreeError
from shardlib.mesh.mesh import AnyMesh, Mesh, as_mesh
from shardlib.mesh.transport import EchoGroup
from shardlib.plan.plan import Plan
from shardlib.plan.transform import Transform, chain, require_transform
from shardlib.sharded.shard import shard_alike, shard_by
from shardlib.sharded.tree import Sharded, require_no_shards
from shardlib.sharded.unshard import Resharded
from shardlib.transforms.zero import zero
from shardlib.tree import T, check_tensors, flatten, leaves_of, ties


def default_transform(transform: Transform | None, stage: int | None) -> Transform:
    """``transform`` with `zero`\\ (stage) added, if a stage is given; plain data parallelism for neither."""
    if stage is None:
        return zero(0) if transform is None else require_transform(transform)
    return zero(stage) if transform is None else chain(transform, zero(stage))


@overload
def shard(
    params: Sharded[T], mesh: AnyMesh, transform: Transform | None = None, *, stage: int | None = None
) -> Sharded[T]: ...
@overload
def shard(
    params: Callable[[], T], mesh: AnyMesh, transform: Transform | None = None, *, stage: int | None = None
) -> Sharded[T]: ...
@overload
def shard(params: T, mesh: AnyMesh, transform: Transform | None = None, *, stage: int | None = None) -> Sharded[T]: ...
def shard(params: Any, mesh: AnyMesh, transform: Transform | None = None, *, stage: int | None = None) -> Sharded:
    """Split a parameter pytree over a mesh; returns this rank's shards, with their specs.

    Integer and boolean leaves are held and not trained. Complex leaves and 8-bit floats are refused unless `freeze` covers
    them.

    Args:
        params: any pytree of tensors, with the same values on every rank; or a function without arguments that makes
            one, which is then run leaf by leaf, so that no rank ever holds the whole model. Tensors may be on any
            devices: only this rank's shard of each leaf is copied to the mesh's device, leaf by leaf. Or `Sharded`
            parameters, to be laid out by another transform, or on another mesh of the same ranks: they are gathered bucket
            by bucket, and stay as they are.
        mesh: a `Mesh`, or a torch DeviceMesh with named dimensions.
        transform: how to shard; by default plain data parallelism over axis "data".
        stage: short for ``zero(stage)``, added to ``transform``.

    Raises:
        TreeError: a leaf that is not a tensor, is of a dtype that is not trained, or is on the meta device; or a part of a
            sharded tree, gradients, or a train state.
        IllegalComposition: transforms that do not compose, or do not fit the mesh.
        RankMismatch: the ranks' trees, plans or values differ; names the leaves and the ranks.

    >>> params = {"w": torch.ones(8, 4)}
    >>> sl.simulate(lambda mesh: sl.shard(params, mesh, stage=3).tree["w"].shape, mesh=dict(data=2))
    [torch.Size([4, 4]), torch.Size([4, 4])]
    """
    mesh = mesh_of_ranks(mesh)
    role = params.role if isinstance(params, Sharded) else "param"
    if role != "param" or isinstance(getattr(params, "params", None), Sharded):
        raise TreeError(f"shard: {type(params).__name__} is not parameters; give the ones of a state, state.params")
    given = Resharded(params) if isinstance(params, Sharded) else params
    return shard_by(given, mesh, default_transform(transform, stage))


def mesh_of_ranks(mesh: AnyMesh) -> Mesh:
    """A `Mesh`, or a torch DeviceMesh as one. Raises `IllegalComposition` for a mesh without ranks."""
    mesh = as_mesh(mesh)
    if mesh.abstract:
        raise IllegalComposition(
            f"{mesh} has no ranks to hold shards; use sl.make_plan to plan on it, sl.make_mesh to run"
        )
    return mesh


def lift(params: Any) -> Sharded:
    """``params`` if they are `Sharded`; else a plain pytree sharded on a mesh of one, on its leaves' device.

    Raises:
        TreeError: the leaves are on several devices.
    """
    if isinstance(params, Sharded):
        return params
    require_no_shards("a function of parameters", params)
    return shard(params, Mesh({"data": 1}, 0, {"data": EchoGroup(1)}, _device_of(leaves_of(params))))


class Lifting:
    """`lift`, for a function that is called again and again: it plans anew only for a pytree of another form."""

    def __init__(self) -> None:
        self._form: Any = None
        self._under: tuple[Plan, Mesh] | None = None  # what a pytree of this form is sharded by

    def __call__(self, params: Any) -> Sharded:
        """See `lift`."""
        if isinstance(params, Sharded) or callable(params):  # an initialiser, or a module, which is refused
            return lift(params)
        paths, leaves, treedef = flatten(params)
        check_tensors(paths, leaves)
        form = treedef, [(leaf.shape, leaf.dtype) for leaf in leaves], ties(leaves), _device_of(leaves)
        if self._under is None or form != self._form:
            lifted = lift(params)
            self._form, self._under = form, (lifted.plan, lifted.mesh)
            return lifted
        return shard_alike(params, *self._under)


def _device_of(leaves: Iterable[Any]) -> torch.device:
    """The device of a plain pytree's leaves.

    Raises:
        TreeError: they are on several.
    """
    devices = {leaf.device: None for leaf in leaves if isinstance(leaf, torch.Tensor)}
    if len(devices) > 1:
        raise TreeError(
            f"leaves of a plain pytree are on {', '.join(map(str, devices))}: move all of them to one device, or pass "
            "sl.shard(params, sl.make_mesh()), which moves them to the mesh's device"
        )
    return next(iter(devices), torch.device("cpu"))
