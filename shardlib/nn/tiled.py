"""Functions that treat every token alone (MLPs, losses), run on one tile of the tokens after the other.

Forward keeps only the inputs and the outputs. Backward computes a tile again, and its gradients, before it goes on to the
next one, so that what lies between inputs and outputs exists for one tile at a time (TiledMLP of Arctic Long Sequence
Training, arXiv 2506.13996, section 3.1). Gradients of parameters are added up tile by tile and handed on once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch.utils.checkpoint import checkpoint

from shardlib.collectives.sequence.base import Attention
from shardlib.common._compat import transformed
from shardlib.common.environment import environment, within
from shardlib.errors import LossError
from shardlib.nn.sequence import Parts
from shardlib.nn.tiles import Cut, Join, View


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
    """An output of all tiles: joined, or added up if it has no dimensions.

    Args:
        first: the output of the first tile.
    """

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
                f"tiled: a tile of {length} along dimension {self._dim} gave an output of shape {tuple(output.shape)}; the "
                "function must keep the length, or return sums (tensors without dimensions)"
            )
        self._join.put(output)

    def value(self) -> Any:
        return self._total if self._join is None else self._join.whole()


class _Tile:
    """One tile of the tokens, as `shardlib.nn.sequence.Parts` for what runs in it.

    Args:
        around: the parts of the caller.
    """

    def __init__(self, around: Parts | None, dim: int, start: int, stop: int, length: int) -> None:
        self._around, self._dim, self._start, self._stop, self._length = around, dim, start, stop, length

    def run(self, fn: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> Any:
        with within(parts=self, names=None):
            return fn(*(tensor.contiguous() for tensor in args))  # many functions ask for a view of their input

    def positions(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        if self._dim != 1 or x.shape[1] != self._stop - self._start:
            raise LossError(
                f"dropout of shape {tuple(x.shape)} in tiles along dimension {self._dim} of {self._stop - self._start}: a "
                "mask is drawn by positions, which are dimension 1; tile along dimension 1, or drop outside of the tiles"
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
            f"{name} in a tile of tokens {self._start} to {self._stop - 1} of {self._length}: it needs the whole sequence. "
            "Call it outside of sl.nn.tiled (outside of the modules that sl.tile runs in tiles)"
        )
