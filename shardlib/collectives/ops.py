"""Exchanges as functions of tensors, which a traced function has as operators.

In eager an `ExchangeFunction` calls its primitive and waits. Where a function is traced (`make_fx`, `torch.compile`) tensors
have no values, and an exchange is two operators, between which a pass may move other work::

    ticket = torch.ops.shardlib.all_gather_start(x, [], mesh, axis, [], "what it is for")
    out = torch.ops.shardlib.wait(ticket, x, shape)

Neither writes to an argument nor returns memory of one, so that compilers may merge equal ones and drop unused ones, alike on
all ranks. The ticket is a number, by which `wait` finds what was started. A second `wait` for it is an error, since it would
take another exchange's message. ``x`` is an argument of `wait` so that nothing else gets its memory until then.

In operators a mesh is a number, by which a weak table holds it.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from shardlib.collectives import primitives
from shardlib.common._compat import admit, constant_in_graphs, traced
from shardlib.common.environment import environment
from shardlib.errors import LossError, MeshError
from shardlib.kernels.common.operators import opaque
from shardlib.mesh.mesh import Mesh, as_mesh
from shardlib.mesh.transport import Splits, Work
from shardlib.mesh.transport.activity import naming

ACTIVATIONS = "activations and their gradients"

Place = Mesh | int  # a mesh, or its number
# The result's memory, the work that fills it, and what that work reads.
Started = tuple[torch.Tensor, Work, torch.Tensor]

_count = itertools.count(1)
_meshes: WeakValueDictionary[int, Mesh] = WeakValueDictionary()
_numbers: WeakKeyDictionary[Mesh, int] = WeakKeyDictionary()
_under_way: dict[int, Started] = {}

STARTS: dict[Any, str] = {}  # the operators that start exchanges -> what they start


def mesh_with(mesh: Any, axis: str) -> Mesh:
    """``mesh``, or the current mesh for None. Raises `MeshError` where there is none, or where it lacks ``axis``."""
    mesh = as_mesh(mesh) if mesh is not None else environment().mesh
    if mesh is None:
        raise MeshError(f"no mesh here for axis {axis!r}; pass mesh=, or call it inside the loss of a train step")
    mesh.group(axis)  # raises for an unknown axis
    return mesh


def place_of(mesh: Any, axis: str) -> Place:
    """`mesh_with`; the mesh's number where torch.compile traces a caller, which takes Functions as they are."""
    return _place_in_graphs(mesh, axis) if torch.compiler.is_dynamo_compiling() else mesh_with(mesh, axis)


@constant_in_graphs
def _place_in_graphs(mesh: Any, axis: str) -> int:
    admit()
    number = number_of(mesh_with(mesh, axis))
    return number if mesh is not None else -number


@constant_in_graphs
def ranks(place: Place, axis: str) -> int:
    """The number of ranks along an axis."""
    return mesh_of(place).shape[axis]


def number_of(place: Place) -> int:
    """The number of a mesh, which is the same while the mesh lives."""
    if isinstance(place, int):
        return place
    number = _numbers.get(place)
    if number is None:
        number = _numbers[place] = next(_count)
        _meshes[number] = place
    return number


def mesh_of(place: Place) -> Mesh:
    """The mesh of a number; of a negative one, a mesh that surrounded torch.compile, which has no guard for it.

    Raises:
        MeshError: the mesh is gone, or another one surrounds this call.
    """
    if isinstance(place, Mesh):
        return place
    mesh = _meshes.get(abs(place))
    if mesh is None:
        raise MeshError("the mesh of a traced function is gone: keep the mesh, or trace the function again")
    if place < 0 and environment().mesh not in (None, mesh):
        raise MeshError(
            f"a function compiled on {mesh} is called on {environment().mesh}: pass mesh= to its collectives"
        )
    return mesh


class LinearFunction(torch.autograd.Function):
    """A linear Function of one tensor and constants, whose backward is its ``dual``.

    A tangent is computed as its tensor is, and a batch of tensors in one call. Constants called "…dim" are dimensions of the
    tensor, which a batch's dimension moves by one. The forward has no ctx, as torch.func requires.
    """

    dual: ClassVar[type[LinearFunction]]
    _dims: ClassVar[tuple[bool, ...]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "forward" in vars(cls):  # else it is another class's, which torch's own may be
            signature = inspect.signature(cls.forward)
            cls.forward.__signature__ = signature  # type: ignore[attr-defined]  # else apply derives it in every call
            cls._dims = tuple(name.endswith("dim") for name in signature.parameters)[1:]

    @staticmethod
    def of_dual(*static: Any) -> tuple[Any, ...]:
        """The constants of the dual."""
        return static

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.static = inputs[1:]

    @classmethod
    def backward(cls, ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return cls.dual.apply(grad, *cls.of_dual(*ctx.static)), *(None for _ in ctx.static)

    @classmethod
    def jvp(cls, ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
        return cls.apply(tangent, *ctx.static)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *static: Any) -> tuple[torch.Tensor, int]:
        moved = (value + 1 if is_dim else value for value, is_dim in zip(static, cls._dims, strict=True))
        return cls.apply(x.movedim(in_dims[0], 0), *moved), 0


class ExchangeFunction:
    """A function that exchanges tensors along an axis: ``exchange(x, place, axis, *options)``.

    Args:
        name: of the operator that starts it, without ``_start``.
        start: ``start(mesh, axis, x, *options)``, and ``sizes=`` of an exchange that takes such.
        shape: ``shape(x, ranks, *options)`` is the shape of the result.
    """

    def __init__(self, name: str, start: Callable[..., Started], shape: Callable[..., Sequence[int]]) -> None:
        def ticket(
            x: torch.Tensor, sizes: Sequence[torch.Tensor], mesh: int, axis: str, options: Sequence[int], about: str
        ) -> torch.Tensor:
            number = next(_count)
            _under_way[number] = self._started(x, mesh_of(mesh), axis, options, sizes, about)
            return torch.tensor([number])

        self._start, self._shape = start, shape
        self._operator = opaque(f"{name}_start", ticket, lambda x, *_: torch.empty(1, dtype=torch.int64))
        STARTS[self._operator] = name

    def __call__(self, x: torch.Tensor, place: Place, axis: str, *options: int) -> torch.Tensor:
        return self.start(x, place, axis, *options)()

    def start(
        self,
        x: torch.Tensor,
        place: Place,
        axis: str,
        *options: int,
        sizes: Sequence[torch.Tensor] = (),
        about: str = ACTIVATIONS,
    ) -> Callable[[], torch.Tensor]:
        """Start it; returns a function to call once, which waits and returns the result. ``about``: for reports."""
        mesh = mesh_of(place)
        if traced(x) and not mesh.abstract:  # a plan's trace, on a mesh without ranks, counts what it sends
            ticket = self._operator(x, list(sizes), number_of(place), axis, list(options), about)
            return partial(_wait, ticket, x, list(self._shape(x, mesh.shape[axis], *options)))
        return partial(_ended, *self._started(x, mesh, axis, options, sizes, about))

    def _started(
        self, x: torch.Tensor, mesh: Mesh, axis: str, options: Sequence[int], sizes: Sequence[torch.Tensor], about: str
    ) -> Started:
        more = {"sizes": sizes} if sizes else {}
        with mesh.traffic.by_the_loss(), naming(about):
            return self._start(mesh, axis, x, *options, **more)


def _ended(out: torch.Tensor, work: Work, _: torch.Tensor) -> torch.Tensor:
    work.wait()
    return out


def _landed(ticket: torch.Tensor, sent: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    started = _under_way.pop(int(ticket), None)
    if started is None:
        raise LossError(
            f"exchange {int(ticket)} of a traced function was waited for before: copy its start and wait together"
        )
    return _ended(*started)


_wait = opaque("wait", _landed, lambda ticket, sent, shape: sent.new_empty(shape))


def _all_reduce(mesh: Mesh, axis: str, x: torch.Tensor) -> Started:
    out = x.clone(memory_format=torch.contiguous_format)
    # A 0-d tensor is one of a step's scalars (a loss), not payload.
    return out, primitives.all_reduce(mesh, axis, out, scalars=x.dim() == 0), out


def _all_gather(mesh: Mesh, axis: str, x: torch.Tensor) -> Started:
    out, x = x.new_empty((mesh.shape[axis], *x.shape)), x.contiguous()
    return out, primitives.all_gather(mesh, axis, out, x), x


def _reduce_scatter(mesh: Mesh, axis: str, x: torch.Tensor) -> Started:
    out, x = x.new_empty(x.shape[1:]), x.contiguous()
    return out, primitives.reduce_scatter(mesh, axis, out, x), x


def _all_to_all(mesh: Mesh, axis: str, x: torch.Tensor, *arriving: int, sizes: Sequence[torch.Tensor] = ()) -> Started:
    out, x = x.new_empty(_exchanged(x, mesh.shape[axis], *arriving)), x.contiguous()
    if not sizes:
        return out, primitives.all_to_all(mesh, axis, out, x), x
    width = x.shape[1:].numel()
    splits = Splits(*([rows * width for rows in way.tolist()] for way in sizes))
    return out, primitives.all_to_all(mesh, axis, out.view(-1), x.view(-1), splits), x


def _exchanged(x: torch.Tensor, ranks: int, *arriving: int) -> Sequence[int]:
    return (*(arriving or x.shape[:1]), *x.shape[1:])


def _permute(mesh: Mesh, axis: str, x: torch.Tensor, *ends: int) -> Started:
    out, x = x.new_empty(x.shape), x.contiguous()
    return out, primitives.permute(mesh, axis, out, x, tuple(zip(ends[::2], ends[1::2], strict=True))), x


def _broadcast(mesh: Mesh, axis: str, x: torch.Tensor, source: int) -> Started:
    out = x.clone(memory_format=torch.contiguous_format)
    return out, primitives.broadcast(mesh, axis, out, source), out


def _same(x: torch.Tensor, ranks: int, *_: int) -> Sequence[int]:
    return x.shape


all_reduce: ExchangeFunction = ExchangeFunction("all_reduce", _all_reduce, _same)
all_gather: ExchangeFunction = ExchangeFunction(
    "all_gather", _all_gather, lambda x, ranks: (ranks, *x.shape)
)  # by rank
reduce_scatter: ExchangeFunction = ExchangeFunction(
    "reduce_scatter", _reduce_scatter, lambda x, ranks: x.shape[1:]
)  # of chunks by rank
# Of chunks by rank, of rows of the first dimension. Option: none, or how many arrive. ``sizes``: none where all chunks are
# equal; else int64 in host memory, how many rows go to each rank, and how many come from each.
all_to_all: ExchangeFunction = ExchangeFunction("all_to_all", _all_to_all, _exchanged)
permute: ExchangeFunction = ExchangeFunction(
    "permute", _permute, _same
)  # options: source, destination, source, destination …
broadcast: ExchangeFunction = ExchangeFunction("broadcast", _broadcast, _same)  # option: the source
