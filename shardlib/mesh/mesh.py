"""Named device meshes: over real processes, simulated in this process, or abstract (no ranks at all)."""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlib.common.devices import default_device, with_index
from shardlib.common.display.panels import Panel, Shown, Title
from shardlib.errors import MeshError
from shardlib.mesh.memories import MEMORIES, KeptMemory, Transfers
from shardlib.mesh.picture import mesh_picture
from shardlib.mesh.transport import EchoGroup, Group, ProcessGroup, SimulatedGroup, Simulation
from shardlib.mesh.transport.process import limit_of, start_processes

_log = logging.getLogger("shardlib.mesh")

# What launchers that name no world to torch tell their processes of their number.
_OTHER_LAUNCHERS = {"OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec", "SLURM_STEP_NUM_TASKS": "srun"}


class Traffic:
    """Payload bytes a rank sent, per axis, by the algorithm's own volume.

    An all-gather or reduce-scatter whose gathered tensor has W bytes counts W·(n−1)/n over n ranks, an all-reduce twice that.
    What a backend sends beyond this (headers, retries, a less frugal algorithm) is not counted.

    Attributes:
        payload: axis -> bytes.
        scalars: axis -> bytes of a step's own scalars (losses, norms, flags), which the payload excludes.
        activations: axis -> bytes of the payload that the loss function sent.
        calls: axis -> number of exchanges.
        activation_calls: axis -> number of those that the loss function made.
    """

    payload: dict[str, int]
    scalars: dict[str, int]
    activations: dict[str, int]
    calls: dict[str, int]
    activation_calls: dict[str, int]

    def __init__(self) -> None:
        self.payload, self.scalars, self.activations = dict[str, int](), dict[str, int](), dict[str, int]()
        self.calls, self.activation_calls = dict[str, int](), dict[str, int]()
        self._by_the_loss = False

    @contextmanager
    def by_the_loss(self) -> Iterator[None]:
        """Count the payload of the enclosed code among the activations too."""
        before, self._by_the_loss = self._by_the_loss, True
        try:
            yield
        finally:
            self._by_the_loss = before

    def add(self, axis: str, sent_bytes: int, scalars: bool = False) -> None:
        for table, number in ((self.scalars if scalars else self.payload, sent_bytes), (self.calls, 1)):
            table[axis] = table.get(axis, 0) + number
        if self._by_the_loss:
            for table, number in ((self.activations, 0 if scalars else sent_bytes), (self.activation_calls, 1)):
                table[axis] = table.get(axis, 0) + number

    def reset(self) -> None:
        for table in (self.payload, self.scalars, self.activations, self.calls, self.activation_calls):
            table.clear()


class Mesh(Shown):
    """Named axes and their sizes, this rank's coordinates, and a transport per axis.

    Build one with `make_mesh`, `abstract_mesh`, or let `launch` and `simulate` pass it to you.

    Attributes:
        shape: axis name -> size, in row-major order of ranks.
        coords: axis name -> this rank's coordinate.
        device: where this rank's tensors live.
        abstract: whether the mesh has no ranks, and serves for plans alone.
        traffic: payload bytes this rank has sent so far.
        transfers: copies between the device's memory and the host's.
        kept: host memory that this rank keeps between steps.
    """

    def __init__(
        self,
        shape: Mapping[str, int],
        rank: int,
        groups: Mapping[str, Group],
        device: torch.device,
        abstract: bool = False,
    ) -> None:
        self.shape: dict[str, int] = dict(shape)
        self.rank = rank
        self.coords: dict[str, int] = coordinates(self.shape, rank)
        self.device: torch.device = with_index(device)
        self.abstract = abstract
        self.traffic: Traffic = Traffic()
        self.transfers: Transfers = Transfers(device, abstract)
        self.kept: KeptMemory = KeptMemory(self.transfers)
        self._groups = dict(groups)

    @property
    def size(self) -> int:
        return math.prod(self.shape.values())

    @property
    def ranks_per_host(self) -> int:
        """Ranks that share a host's memory: those that torchrun started beside this one; all of a mesh without ranks."""
        return self.size if self.abstract else int(os.environ.get("LOCAL_WORLD_SIZE", self.size))

    @property
    def alone(self) -> bool:
        """Whether no other rank exists: on a mesh of one, and on an abstract mesh."""
        return all(isinstance(group, EchoGroup) for group in self._groups.values())

    def zeros(self, numel: int, dtype: torch.dtype, memory: str) -> torch.Tensor:
        """A flat buffer of zeros of this rank, in one of `shardlib.mesh.memories.MEMORIES`."""
        return MEMORIES[memory].zeros(numel, dtype, self.device)

    def device_for(self, memory: str) -> torch.device:
        """The device by which torch calls one of `shardlib.mesh.memories.MEMORIES` of this rank."""
        return MEMORIES[memory].device(self.device)

    def group(self, axis: str) -> Group:
        """The transport of this rank's group along ``axis``.

        Raises:
            MeshError: no such axis.
        """
        if axis not in self.shape:
            raise MeshError(
                f"axis {axis!r} is not on {self}; use one of {', '.join(map(repr, self.shape)) or '(none)'}"
            )
        return self._groups[axis]

    def with_transport(self, make: Callable[[str, Group], Group]) -> Mesh:
        """A mesh of the same ranks and axes with other transports. Its ``traffic`` starts from zero.

        Args:
            make: ``make(axis, group)`` returns the transport for an axis instead of ``group``: see `shardlib.mesh.transport`.
                Axes along which no other rank exists keep their groups.
        """
        return Mesh(self.shape, self.rank, self._made(make), self.device, self.abstract)

    @contextmanager
    def through(self, make: Callable[[str, Group], Group]) -> Iterator[None]:
        """A context in which this mesh itself uses other transports: see `with_transport`."""
        before, self._groups = self._groups, self._made(make)
        try:
            yield
        finally:
            self._groups = before

    def _made(self, make: Callable[[str, Group], Group]) -> dict[str, Group]:
        """The groups that ``make`` makes of those along which there are other ranks, and the others."""
        return {
            axis: make(axis, group) if group.size > 1 and not isinstance(group, EchoGroup) else group
            for axis, group in self._groups.items()
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        """This mesh: what is copied with it stays on the same ranks."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self.alone:
            raise MeshError(
                f"{self} belongs to this rank and cannot be pickled: make one where it is used (sl.make_mesh)"
            )
        return super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        kind = "abstract_mesh" if self.abstract else "mesh"
        return f"{kind}({', '.join(f'{axis}={size}' for axis, size in self.shape.items())})"

    def shown(self) -> Iterator[Panel]:
        """What a notebook and a terminal show: the ranks as a grid, this one marked."""
        here = ", ".join(f"{axis}={place}" for axis, place in self.coords.items())
        own = "no ranks, for plans" if self.abstract else f"this is rank {self.rank} ({here}) on {self.device}"
        yield Title(f"{self!r}: {self.size:,} rank{'s' * (self.size != 1)}; {own}")
        yield mesh_picture(self.shape, None if self.abstract else self.rank)


def coordinates(shape: Mapping[str, int], rank: int) -> dict[str, int]:
    """Row-major coordinates of ``rank``: the last axis varies fastest."""
    coords = {}
    for axis, size in reversed(list(shape.items())):
        rank, coords[axis] = divmod(rank, size)
    return {axis: coords[axis] for axis in shape}


def axis_groups(shape: Mapping[str, int], axis: str) -> list[list[int]]:
    """The groups of global ranks along ``axis``. The ranks of a group differ in this coordinate alone."""
    others = [name for name in shape if name != axis]
    groups = []
    for fixed in itertools.product(*(range(shape[name]) for name in others)):
        base = dict(zip(others, fixed, strict=True))
        groups.append([rank_of(shape, base | {axis: index}) for index in range(shape[axis])])
    return groups


def rank_of(shape: Mapping[str, int], coords: Mapping[str, int]) -> int:
    """The rank at ``coords``: the inverse of `coordinates`."""
    rank = 0
    for axis, size in shape.items():
        rank = rank * size + coords[axis]
    return rank


def check_shape(shape: Mapping[str, int]) -> dict[str, int]:
    """``shape`` as a dictionary. Raises `MeshError` for sizes that are not positive integers, TypeError for other things."""
    if not isinstance(shape, Mapping):
        raise TypeError(
            f"mesh={shape!r}: a mesh is given by the names and sizes of its axes, such as mesh=dict(data=2)"
        )
    bad = [f"{axis}={size!r}" for axis, size in shape.items() if not isinstance(size, int) or size < 1]
    if bad:
        raise MeshError(f"axis sizes must be positive integers: {', '.join(bad)}")
    return dict(shape)


def abstract_mesh(**shape: int) -> Mesh:
    """A mesh without ranks, to plan on: ``abstract_mesh(data=512, model=8)``.

    Raises:
        MeshError: a size is not a positive integer.

    >>> mesh = sl.abstract_mesh(data=512, model=8)
    >>> mesh.size
    4096
    """
    sizes = check_shape(shape)
    groups = {axis: EchoGroup(size) for axis, size in sizes.items()}
    return Mesh(sizes, 0, groups, torch.device("cpu"), abstract=True)


def make_mesh(device: str | torch.device | None = None, timeout: float = 600.0, **shape: int) -> Mesh:
    """The mesh of the processes that torchrun (or `launch`) started.

    ``make_mesh()`` puts every rank on one axis "data"; one process alone is a mesh of one. ``make_mesh(data=2,
    model=4)`` names and sizes the axes, the last varying fastest over ranks. Starts torch.distributed (gloo on CPU, NCCL on
    CUDA) if the environment names a world of several processes and nothing has started it.

    Args:
        device: where this rank's tensors live; by default its CUDA device when there is one, else the CPU. Without an index
            it is the one of LOCAL_RANK, or torch's current one where the launcher sets no LOCAL_RANK.
        timeout: seconds after which a collective fails that other ranks have not joined. Every rank then reports what it
            does, and stops: see docs/faults.md. Where the program has started torch.distributed itself, an axis of all
            ranks has the timeout that was given there.

    Raises:
        MeshError: a size is not a positive integer, the sizes' product is not the number of processes, or there is no such
            device.
        TypeError: axes that are not given by name.
        RankFailure: processes have not started within the timeout; names them.

    >>> mesh = sl.make_mesh()  # one process: a mesh of one
    >>> mesh.shape, mesh.rank
    ({'data': 1}, 0)
    """
    _require_device(device)
    shape = check_shape(shape)
    where = _device_of(device)
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        start_processes(where, timeout)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if not dist.is_initialized():
        _tell_of_other_launchers()
    shape = shape or {"data": world}
    if math.prod(shape.values()) != world:
        sizes, ranks = " × ".join(f"{axis}={size}" for axis, size in shape.items()), math.prod(shape.values())
        raise MeshError(
            f"the mesh {sizes} has {ranks} ranks and {world} process{'es run' if world > 1 else ' runs'}; start it with "
            f"torchrun --nproc-per-node={ranks}, or change the sizes"
        )
    rank = dist.get_rank() if world > 1 else 0
    return Mesh(shape, rank, _process_groups(shape, rank, limit_of(where, timeout)), where)


def _tell_of_other_launchers() -> None:
    """Log that this process, a mesh of one, is one of several that would train alone, each the same."""
    for variable, launcher in _OTHER_LAUNCHERS.items():
        count = os.environ.get(variable, "")
        if count.isdigit() and int(count) > 1 and "WORLD_SIZE" not in os.environ:
            _log.warning(
                "this process is a mesh of one, and one of %s that %s started (%s): they do not know of each other. Start "
                "them by torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                count,
                launcher,
                variable,
            )
            return


def _require_device(device: Any) -> None:
    if isinstance(device, (int, Mapping)):
        sizes = (
            ", ".join(f"{axis}={size}" for axis, size in device.items()) if isinstance(device, Mapping) else "data=..."
        )
        raise TypeError(
            f"make_mesh({device!r}): axes are given by name, make_mesh({sizes}); the first argument is the device"
        )


def _device_of(device: str | torch.device | None) -> torch.device:
    if device is None:
        return default_device()
    found = torch.device(device)
    if found.type not in ("cpu", "meta") and torch.get_device_module(found).device_count() == 0:
        raise MeshError(
            f"make_mesh({str(device)!r}): this process sees no {found.type} device; pass device='cpu', or look at the "
            "build of torch and at CUDA_VISIBLE_DEVICES"
        )
    return with_index(found)


AnyMesh: TypeAlias = Mesh | DeviceMesh


def as_mesh(mesh: AnyMesh) -> Mesh:
    """A `Mesh`, from itself or from a torch `DeviceMesh` with named dimensions.

    Raises:
        MeshError: ``mesh`` is neither, or is a DeviceMesh without names or without this rank.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"{type(mesh).__name__} is not a mesh; pass sl.make_mesh(...) or a torch DeviceMesh")
    names = mesh.mesh_dim_names
    if not names:
        raise MeshError("the DeviceMesh has no dimension names; pass mesh_dim_names=(...) when you make it")
    shape = {name: int(mesh.size(dim)) for dim, name in enumerate(names)}
    groups: dict[str, Group] = {
        name: ProcessGroup(mesh.get_group(name), name) if shape[name] > 1 else EchoGroup(1) for name in names
    }
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise MeshError(f"rank {dist.get_rank()} is not part of the DeviceMesh {mesh}")
    rank = rank_of(shape, dict(zip(names, coordinate, strict=True)))
    return Mesh(shape, rank, groups, torch.device(mesh.device_type))


def simulated_mesh(
    shape: Mapping[str, int], rank: int, simulation: Simulation, exchanges: dict[Any, Any], device: torch.device
) -> Mesh:
    """Rank ``rank``'s view of a mesh whose ranks share ``simulation``; ``exchanges`` is the record that they share."""
    groups: dict[str, Group] = {}
    for axis in shape:
        members: Sequence[int] = next(group for group in axis_groups(shape, axis) if rank in group)
        exchange = exchanges.setdefault((axis, tuple(members)), SimulatedGroup.exchange())
        groups[axis] = SimulatedGroup(simulation, exchange, members, members.index(rank), axis)
    return Mesh(shape, rank, groups, device)


def _process_groups(shape: Mapping[str, int], rank: int, limit: timedelta) -> dict[str, Group]:
    groups: dict[str, Group] = {}
    for axis, size in shape.items():
        if size == 1:
            groups[axis] = EchoGroup(1)
        elif size == math.prod(shape.values()):
            assert dist.group.WORLD is not None
            groups[axis] = ProcessGroup(dist.group.WORLD, axis)
        else:
            # torch requires that every rank makes every group, in the same order.
            for members in axis_groups(shape, axis):
                made = dist.new_group(members, timeout=limit)
                if rank in members:
                    groups[axis] = ProcessGroup(made, axis)
    return groups
