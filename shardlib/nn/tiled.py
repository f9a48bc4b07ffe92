"""Functions that treat every token alone (MLPs, losses), run on one tile of the tokens after the other.

Forward keeps only the inputs and the outputs. Backward computes a tile again, and its gradients, before it goes on to the
next one, so that what lies between inputs and outputs exists for one tile at a time (TiledMLP of Arctic Long Sequence
Training, arXiv 2506.13996, section 3.1). Gradients of parameters are added up tile by tile and handed on once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlib.collectives.sequence.base import Attention
from shardlib.common._compat import transformed
from shardlib.common.environment import environment, within
from shardlib.errors import LossError, listing

# Tensors that are read, and made, tile by tile, so that of a whole tensor and of its gradient there is one copy each.
# Forward mode and `torch.func` see plain views and copies.


# ``view(tensor, number)``: the tile of this number, as a view of a whole tensor. The views of all numbers cover the tensor.
View = Callable[[torch.Tensor, int], torch.Tensor]


class Cut:
    """A tensor whose tiles are taken one by one. Their gradients are written into one tensor, as backward makes them."""

    def __init__(self, x: torch.Tensor, view: View) -> None:
        plain = transformed()
        self._x: torch.Tensor | None = x if plain else x.detach()
        # The graph keeps the sums, and must not keep what it is kept by, or the tensor, longer than a tile needs it.
        self._sum = _Sum(x, view)
        made = not plain and x.requires_grad and torch.is_grad_enabled()
        self._stand_in = _TileGradient.apply(x, self._sum) if made else None

    def take(self, number: int) -> torch.Tensor:
        assert self._x is not None
        if self._stand_in is None:
            return self._sum.view(self._x, number)
        return _Take.apply(self._stand_in, self._x, self._sum, number)

    def done(self) -> None:
        """Let go of the tensor, once all tiles have been taken."""
        self._x = None


class _Sum:
    """The gradient of a tensor, which its tiles make up."""

    def __init__(self, x: torch.Tensor, view: View) -> None:
        self.view = view
        self._like, self._device = torch.empty_like(x, device="meta", requires_grad=False), x.device
        self._gradient: torch.Tensor | None = None

    def put(self, grad: torch.Tensor, number: int) -> None:
        if self._gradient is None:
            self._gradient = torch.zeros_like(self._like, device=self._device)
        self.view(self._gradient, number).copy_(grad)  # which autograd follows, where this is differentiated again

    def take(self) -> torch.Tensor | None:
        gradient, self._gradient = self._gradient, None
        return gradient


class _TileGradient(torch.autograd.Function):
    """A stand-in without memory for a tensor that is cut; its backward hands on the gradient that the tiles made up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, total: _Sum) -> torch.Tensor:
        ctx.total = total
        ctx.set_materialize_grads(False)
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return ctx.total.take(), None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_in: torch.Tensor, x: torch.Tensor, total: _Sum, number: int) -> torch.Tensor:
        ctx.total, ctx.number = total, number
        ctx.set_materialize_grads(False)
        return total.view(x, number)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, None, None, None]:
        if grad is not None:
            ctx.total.put(grad, ctx.number)
        return None, None, None, None


class Join:
    """A tensor that is made of tiles, each of which can be freed when it is in its place. ``out``: memory for the whole
    tensor."""

    out: Any
    view: View

    def __init__(self, out: torch.Tensor, view: View) -> None:
        self.out, self.view = out, view
        self._stand_ins: list[torch.Tensor] = []
        self._count = 0

    def put(self, tile: torch.Tensor) -> None:
        """Put the next tile, of as many elements as its view, into its place."""
        number, self._count = self._count, self._count + 1
        if transformed():
            self._write(tile, number)
        else:
            self._stand_ins.append(_Put.apply(tile, self._write, number))

    def whole(self) -> torch.Tensor:
        return _Whole.apply(self.out, self.view, *self._stand_ins) if self._stand_ins else self.out

    def _write(self, tile: torch.Tensor, number: int) -> torch.Size:
        """Write a tile into its place; returns the place's shape."""
        place = self.view(self.out, number)
        place.copy_(tile.view(place.shape))
        return place.shape


class _Put(torch.autograd.Function):
    """Writes a tile into its place, and returns a stand-in without memory for it."""

    @staticmethod
    def forward(
        ctx: Any, tile: torch.Tensor, write: Callable[[torch.Tensor, int], torch.Size], number: int
    ) -> torch.Tensor:
        ctx.shape = tile.shape
        return tile.new_zeros(()).expand(write(tile, number))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.reshape(ctx.shape), None, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, view: View, *stand_ins: torch.Tensor) -> torch.Tensor:
        ctx.view, ctx.count = view, len(stand_ins)
        ctx.mark_dirty(out)  # the result is this tensor and no view of it, so that it may be written to
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *(ctx.view(grad, number) for number in range(ctx.count))


def tiled(fn: Callable[..., Any], x: torch.Tensor | tuple[torch.Tensor, ...], n: int, dim: int = 1) -> Any:
    """``fn(x)`` by ``n`` tiles along dimension ``dim``: what ``fn`` computes is in memory for one tile at a time.

    ``fn`` must treat every token alone: an MLP, a norm, a loss per token. It may use parameters. `sl.dropout` draws the mask
    of the whole ``x``. Backward calls ``fn`` again. Values that it names (`checkpoint_name`) are not kept.

    Args:
        fn: from a tile of each tensor of ``x`` to a tensor, or a tuple of tensors, as long as the tile along ``dim``; these
            are joined. Tensors without dimensions (sums) are added up.
        x: a tensor or a tuple of tensors, of one length along ``dim``.
        n: number of tiles; 1 is ``fn(x)`` itself.

    Raises:
        ValueError: ``n`` is below 1, the tensors differ in length, or ``fn`` changes the length.
        LossError: ``fn`` mixes tokens, by a function of this room.

    >>> x, w = torch.randn(2, 8, 4), torch.randn(16, 4)
    >>> mlp = lambda x: torch.nn.functional.gelu(x @ w.t()) @ w
    >>> torch.allclose(sl.nn.tiled(mlp, x, 4), mlp(x), atol=1e-5)
    True
    """
    whole = x if isinstance(x, tuple) else (x,)
    if n < 1 or len({tensor.shape[dim] for tensor in whole}) != 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in whole)
        raise ValueError(f"tiled: {n} tiles of tensors of shapes {shapes}; give n >= 1, and one length along {dim}")
    length, dim = whole[0].shape[dim], dim % whole[0].dim()
    n = min(n, length)
    if n <= 1:
        return fn(*whole)
    single = True
    bounds = [length * number // n for number in range(n + 1)]

    def view(tensor: torch.Tensor, number: int) -> torch.Tensor:
        return tensor.narrow(dim, bounds[number], bounds[number + 1] - bounds[number])

    cuts, context = [Cut(tensor, view) for tensor in whole], copy_context()
    results: list[_Result] = []
    for number, (start, stop) in enumerate(pairwise(bounds)):
        tile = _Tile(environment().parts, dim, start, stop, length)

        # The context is the caller's: backward may call this in a thread of autograd's.
        def run(*args: torch.Tensor, tile: _Tile = tile) -> Any:
            return context.copy().run(tile.run, fn, args)

        taken = [cut.take(number) for cut in cuts]
        recomputes = torch.is_grad_enabled() and not transformed()
        outputs = checkpoint(run, *taken, use_reentrant=False) if recomputes else run(*taken)
        single = not isinstance(outputs, tuple)
        outputs = [outputs] if single else list(outputs)
        results = results or [_Result(output, dim, length, view) for output in outputs]
        for result in results:
            result.add(outputs.pop(0), stop - start)
        del taken
    for cut in cuts:
        cut.done()
    values = tuple(result.value() for result in results)
    return values[0] if single else values


class _Result:
    """An output of all tiles: joined, or added up if it has no dimensions. ``first``: the output of the first tile."""

    def __init__(self, first: torch.Tensor, dim: int, length: int, view: View) -> None:
        self._dim, self._total = dim, None  # type: int, torch.Tensor | None
        whole = (*first.shape[:dim], length, *first.shape[dim + 1 :])
        self._join = Join(first.new_empty(whole), view) if first.dim() else None

    def add(self, output: torch.Tensor, length: int) -> None:
        if self._join is None:
            self._total = output if self._total is None else self._total + output
            return
        if output.dim() <= self._dim or output.shape[self._dim] != length:
            raise ValueError(
                f"tiled: a tile of {length} along dimension {self._dim} gave an output of shape {tuple(output.shape)}. Keep "
                "the length, or return sums without dimensions"
            )
        self._join.put(output)

    def value(self) -> Any:
        return self._total if self._join is None else self._join.whole()


class _Tile:
    """One tile of the tokens, as `shardlib.execute.sequence.SequenceParts` for what runs in it. ``around``: the parts of the
    caller."""

    def __init__(self, around: Any, dim: int, start: int, stop: int, length: int) -> None:
        self._around, self._dim, self._start, self._stop, self._length = around, dim, start, stop, length

    def run(self, fn: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> Any:
        with within(parts=self, names=None):
            return fn(*(tensor.contiguous() for tensor in args))  # many functions ask for a view of their input

    def positions(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        if self._dim != 1 or x.shape[1] != self._stop - self._start:
            raise LossError(
                f"dropout of shape {tuple(x.shape)} in tiles along dimension {self._dim} of {self._stop - self._start}. Tile "
                "along dimension 1, the positions, or drop outside of the tiles"
            )
        like = x.new_zeros(()).expand(x.shape[0], self._length)
        whole = torch.arange(self._length, device=x.device), self._length
        positions, length = whole if self._around is None else self._around.positions(like)
        return positions[self._start : self._stop], length

    def loss(
        self,
        losses: Callable[[torch.Tensor, str], torch.Tensor],
        x: torch.Tensor,
        targets: torch.Tensor,
        ignore_index: int,
        reduction: str,
    ) -> torch.Tensor:
        return losses(targets, reduction) if self._around is None else self._refuse("linear_cross_entropy")

    def shard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x if self._around is None else self._refuse("shard_sequence")

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x if self._around is None else self._refuse("gather_sequence")

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._around is None else self._around.sum(x)

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Attention) -> torch.Tensor:
        self._refuse("attention")

    def chunks(self, length: int) -> list[tuple[int, int]]:
        return [(0, length)] if self._around is None else self._refuse("embedding")

    def note(self, what: str) -> None:
        if self._around is not None:
            self._around.note(what)

    def _refuse(self, name: str) -> NoReturn:
        raise LossError(
            f"{name} in a tile of tokens {self._start} to {self._stop - 1} of {self._length} needs the whole sequence. Call "
            "it outside of sl.nn.tiled, or of the modules that sl.tile names"
        )


# Modules that a plan runs in tiles of their tokens (``sl.tile(..., along="tokens")``).


class TiledModules:
    """The modules that run in tiles.

    Args:
        tiles: path of a module's parameters -> number of tiles.
        paths: the paths of all parameters.
    """

    def __init__(self, tiles: Mapping[str, int], paths: Collection[str]) -> None:
        self._tiles, self._paths = dict(tiles), frozenset(paths)
        self.ran = False  # whether one of them ran in tiles
        self._known: dict[tuple[str, ...], str] = {}  # names of a tree's parameters -> where the tree is in the plan's

    @contextmanager
    def installed(self, modules: Mapping[str, nn.Module], names: tuple[str, ...]) -> Iterator[None]:
        """A context in which those of ``modules`` (path -> module) that the plan names run in tiles. Raises `LossError`: the
        plan has several such trees, whose modules run in other numbers of tiles. ``names``: the paths of the modules'
        parameters, which may be a part of a larger tree."""
        place = self._place(names, modules)
        before = []
        try:
            for path, module in modules.items():
                count = self._tiles.get(f"{place}{path}")
                if count is not None and not isinstance(module.forward, _InTiles):
                    before.append((module, module.__dict__.get("forward")))
                    module.__dict__["forward"] = _InTiles(self, path, count, module.forward)
            yield
        finally:
            for module, forward in before:
                del module.__dict__["forward"]
                if forward is not None:
                    module.__dict__["forward"] = forward

    def _place(self, names: tuple[str, ...], modules: Iterable[str]) -> str:
        """What stands before the paths of parameters, and of their modules, in the plan."""
        if names not in self._known:
            first = next(iter(names), "")
            ends = [path for path in self._paths if f"/{path}".endswith(f"/{first}")] if first else []
            before = [path[: len(path) - len(first)] for path in ends]
            places = sorted(place for place in before if all(f"{place}{name}" in self._paths for name in names))
            counts = {tuple(self._tiles.get(f"{place}{path}") for path in modules) for place in places}
            if len(counts) > 1:
                raise LossError(
                    f"the modules of {' and '.join(place or '(the tree)' for place in places)} have parameters of the same "
                    "names and other numbers of tiles. Give both the same"
                )
            self._known[names] = places[0] if places else "/"  # which begins no path
        return self._known[names]

    def require_some(self) -> None:
        """Raise `LossError` for a loss in which none of the modules ran."""
        if self._tiles and not self.ran:
            raise LossError(
                f"none of the modules that the plan runs in tiles ran:\n{listing(sorted(self._tiles))}\nsl.tile finds "
                "modules of sl.from_module; in functions of your own call sl.nn.tiled"
            )


class _InTiles:
    """The forward of a module, in tiles."""

    def __init__(self, modules: TiledModules, path: str, count: int, forward: Callable[..., Any]) -> None:
        self._modules, self._path, self._count, self._forward = modules, path, count, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._modules.ran = True
        if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor) or args[0].dim() < 2:
            raise LossError(
                f"{self._path} runs in tiles of its tokens and is called with {len(args)} arguments and {sorted(kwargs)}. "
                "Call it with one tensor, (batch, tokens, ...) or (tokens, width)"
            )
        return tiled(self._forward, args[0], self._count, dim=1 if args[0].dim() > 2 else 0)
