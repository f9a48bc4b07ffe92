"""What is around the code of a function: the mesh, further ranks, rows, parts and tiles, and products in 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from shardlib.collectives import pairs, primitives
from shardlib.collectives.styles.slices import Slices
from shardlib.collectives.tokens import PendingRows, TokenExchange
from shardlib.common._compat import autocasts, outside_of_graphs, pytree
from shardlib.common.environment import environment, within
from shardlib.common.writes import owner_of
from shardlib.errors import HandleError, LossError
from shardlib.execute.handles import materialise
from shardlib.execute.sequence import SequenceParts
from shardlib.execute.slicing import SlicedHandle, as_used
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming
from shardlib.nn.scaled import scaled_linear, scaled_matmul
from shardlib.nn.tiled import TiledModules
from shardlib.plan.plan import Plan
from shardlib.sharded.given import Local
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, unflatten

# The place where products by parameters are seen, which a plan may compute in 8 bits (`shardlib.precision("fp8")`).
# A mode sees what the loss calls: layers' functions and matrix products of which one factor is such a parameter, or a view
# of one. Slices' products are between the collectives of their style, and look at the handle themselves.


_MATMULS = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)


class ScaledProducts(TorchFunctionMode):
    """A mode that computes products by some parameters in 8 bits.

    Args:
        is_scaled: whether a matrix is such a parameter, or lies in its memory.
    """

    def __init__(self, is_scaled: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._is_scaled = is_scaled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            _refuse_compiled("a compiled function runs in a loss with parameters")
        kwargs = kwargs or {}
        if func is F.linear and self._weighs(*args[1:2], *([kwargs["weight"]] if "weight" in kwargs else ())):
            return _linear(*args, **kwargs)
        if func in _MATMULS and len(args) == 2 and args[1].dim() == 2 and self._weighs(*args):
            return scaled_matmul(*materialise(args))
        if func is torch.addmm and len(args) == 3 and not kwargs and self._weighs(*args[1:]):
            bias, *factors = materialise(args)
            return scaled_matmul(*factors) + bias
        return func(*args, **kwargs)

    def is_scaled(self, factor: Any) -> bool:
        """Whether products by a factor are in 8 bits."""
        return isinstance(factor, torch.Tensor) and factor.dim() == 2 and self._is_scaled(factor)

    def _weighs(self, *factors: Any) -> bool:
        """Whether one of the factors of a product is a parameter whose products are in 8 bits."""
        return not any(isinstance(each, SlicedHandle) for each in factors) and any(map(self.is_scaled, factors))


def refuse_scaled(mode: ScaledProducts | None, value: Any) -> None:
    """Raise if a compiled block is given parameters whose products are in 8 bits: its compiler does not see the mode."""
    if mode is not None and any(map(mode.is_scaled, pytree.tree_leaves(value))):
        _refuse_compiled("a compiled block is given parameters")


@outside_of_graphs
def _refuse_compiled(what: str) -> NoReturn:
    raise HandleError(f"{what} in fp8. Leave them out of sl.precision, leaves={{glob: 'bf16'}}, or do not compile it")


def _linear(input: Any, weight: Any, bias: Any = None) -> torch.Tensor:
    return scaled_linear(*materialise((input, weight, bias)))


# Exchanges of the function itself (tokens with experts, rows with other ranks) that ranks agree on, like gathers.


class Meeting:
    """An exchange before which ranks meet, in forward and in backward: see `shardlib.execute.gathering.Gathering.meet`.

    A rank whose batch uses no unit before a layer of experts would otherwise send tokens while others wait for it to agree on
    a gather.
    """

    axes: tuple[str, ...]
    padded: bool
    spare: int

    def __init__(self, exchange: TokenExchange, meet: Callable[[], None]) -> None:
        self._exchange, self._meet = exchange, meet
        self.axes, self.padded, self.spare = exchange.axes, exchange.padded, exchange.spare

    def send(self, mesh: Mesh, rows: torch.Tensor, counts: torch.Tensor, **how: Any) -> tuple[PendingRows, Any]:
        self._meet()
        coming, way = self._exchange.send(mesh, rows, counts, **how)
        return _Met(coming, self._meet), way

    def back(self, mesh: Mesh, rows: torch.Tensor, way: Any) -> PendingRows:
        self._meet()
        return _Met(self._exchange.back(mesh, rows, way), self._meet)


class _Met:
    """Rows under way, before whose gradients leave the ranks meet."""

    def __init__(self, coming: PendingRows, meet: Callable[[], None]) -> None:
        self._coming, self._meet = coming, meet

    def wait(self) -> torch.Tensor:
        return meeting_in_backward(self._coming.wait(), self._meet)


def meeting_in_backward(rows: torch.Tensor, meet: Callable[[], None]) -> torch.Tensor:
    """``rows``, before whose gradients leave the ranks meet."""
    return _MeetInBackward.apply(rows, meet)


class _MeetInBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(rows: torch.Tensor, meet: Callable[[], None]) -> torch.Tensor:
        return rows.view_as(rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.meet = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.meet()
        return grad, None

    @staticmethod
    def jvp(ctx: Any, rows: torch.Tensor, _: Any) -> torch.Tensor:
        return rows.view_as(rows)


# The rows of all ranks that have different shares of the batch, for losses that compare rows with each other.


class WholeBatch:
    """The rows of all ranks, as `shardlib.nn.gather_batch` takes them.

    Args:
        trained: whether micro-batches are those of a step.
        meet: brings the ranks together before an exchange; see `Meeting`.

    Attributes:
        axes: axes over which the batch varies, major to minor.
    """

    def __init__(self, plan: Plan, mesh: Mesh, trained: bool, meet: Callable[[], None]) -> None:
        self.axes: tuple[str, ...] = plan.batch_axes
        self._mesh, self._meet = mesh, meet
        self._microbatches = (plan.step.total_microbatches or plan.step.microbatches) if trained else 1

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        if self._microbatches > 1:
            raise LossError(
                f"gather_batch needs one micro-batch, and the plan has {self._microbatches}. Use sl.nn.tiled(encode, "
                "rows, n, dim=0) to save memory"
            )
        axes = [axis for axis in reversed(self.axes) if self._mesh.shape[axis] > 1]
        if not axes:
            return x
        self._meet()
        dim %= x.dim()
        for axis in axes:
            x = self._along(axis, x, dim)
        return meeting_in_backward(x, self._meet)

    def _along(self, axis: str, x: torch.Tensor, dim: int) -> torch.Tensor:
        ranks, rows = self._mesh.shape[axis], x.shape[dim]
        counts = [rows] * ranks
        if not self._mesh.abstract:
            of_ranks = torch.empty(ranks, dtype=torch.int64, device=x.device)
            own = torch.full((1,), rows, device=x.device)
            with self._mesh.traffic.by_the_loss(), naming("the numbers of rows that ranks gather"):
                primitives.all_gather(self._mesh, axis, of_ranks, own, scalars=True).wait()
            counts = of_ranks.tolist()
        most = max(counts)
        padded = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, most - rows)) if rows < most else x
        whole = pairs.all_gather(padded, axis, dim=dim, mesh=self._mesh)
        if min(counts) == most:
            return whole
        return torch.cat([part.narrow(dim, 0, n) for part, n in zip(whole.chunk(ranks, dim), counts)], dim)


# The context in which a model's functions find the mesh, the rows of all ranks, their sequence parts, the modules that run
# in tiles, the way to experts and what further sharded trees hold.


@dataclass(frozen=True)
class Surroundings:
    """What is around the code of a function, in forward and in recomputation, which may run in a thread of autograd's.

    Attributes:
        batch: the rows of all ranks.
        parts: the sequence's parts; None if sequences are whole.
        modules: the modules that run in tiles; None if there are none.
        tokens: how tokens travel to their experts; None if every rank has all experts.
        autocast: the dtype to which torch's autocast casts; None if it casts nothing.
        scaled: the mode that computes products in 8 bits; None if there are none.
        read: how a further sharded tree is read; None if as shards.
    """

    mesh: Mesh
    batch: WholeBatch
    parts: SequenceParts | None
    modules: TiledModules | None
    tokens: TokenExchange | Meeting | None
    autocast: torch.dtype | None
    scaled: ScaledProducts | None = None
    read: Callable[[Sharded], Tree] | None = None

    @contextmanager
    def installed(self, casts: bool = True) -> Iterator[None]:
        """The context. Backward is outside of autocast (not ``casts``): checkpoints turn on what was on in their forward."""
        around = within(
            mesh=self.mesh,
            averaged=self.batch.axes,
            rows=self.batch,
            parts=self.parts,
            modules=self.modules,
            tokens=self.tokens,
            reads=self.read,
        )
        dtype = (self.autocast or environment().casts) if casts else None
        with around, casting(dtype, self.mesh.device), self.scaled or nullcontext():
            yield


def modules_of(plan: Plan) -> TiledModules | None:
    """The modules of a stage's own parameters that run in tiles; None if there are none."""
    paths = [path for bucket in plan.buckets for path in bucket.paths]
    modules = {m: n for m, n in plan.step.module_tiles.items() if any(path.startswith(f"{m}/") for path in paths)}
    aliases = [path for placement in plan.placements for path in placement.aliases]
    return TiledModules(modules, {*paths, *aliases}) if modules else None


def casting(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """The context of a function that torch's autocast casts for, to ``dtype``; None for one that it does not."""
    # A cache would keep casts of parameters alive, and serve those of a unit that has been gathered anew.
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype, cache_enabled=False)


@contextmanager
def casting_losses(device: torch.device) -> Iterator[None]:
    """A context for a step in which an autocast around it casts for its loss function alone, as in a loop of torch's: not for
    exchanges and the optimizer, whose products it would round."""
    if not autocasts() or not torch.is_autocast_enabled(device.type):
        yield
        return
    dtype = torch.get_autocast_dtype(device.type)
    with torch.autocast(device.type, enabled=False), within(casts=dtype):
        yield


# `LocalRunner`: runs a function on a rank's parameters as it computes with them, without units or gathers.


T = TypeVar("T")


class LocalRunner:
    """Runs functions on ``params``, without gradients."""

    def __init__(self, params: Local) -> None:
        plan, mesh = params.plan, params.mesh
        # Second copies of experts would change no number, and be sent anew for every token.
        tokens = None if plan.step.tokens is None else replace(plan.step.tokens, spare=0)
        batch = WholeBatch(plan, mesh, False, lambda: None)
        leaves = [leaf.to(mesh.device) for _, leaf in params.leaves()]
        scaled = [(p.path, x) for p, x in zip(plan.leaves, leaves) if p.scaled and isinstance(x, torch.Tensor)]
        products = ScaledProducts(lambda factor: owner_of(factor, scaled) is not None) if scaled else None
        self._surroundings = Surroundings(mesh, batch, None, None, tokens, plan.step.autocast, products)
        slices = Slices(mesh, None)
        used = [as_used(leaf, placement, False, slices) for placement, leaf in zip(plan.leaves, leaves)]
        self._tree = unflatten(plan.shape.treedef, used)

    def evaluate(self, fn: Callable[[Any], T]) -> T:
        """``fn(parameters)``."""
        with self._surroundings.installed(), torch.no_grad():
            return fn(self._tree)
