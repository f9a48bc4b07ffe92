"""Leaves in tiles: the handles of leaves that are gathered tile by tile, and the layers that use them so.

The rows of a leaf lie on its owners, and a tile is an equal part of every owner's rows (`shardlib.plan.buckets.Bucket.cut`).
So the number of a row has three parts: the owner, the tile, and the row in both. The rows of a tile share the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from shardlib.collectives.styles.slices import Slices
from shardlib.common._compat import pytree, transformed, without_modes
from shardlib.common.environment import environment
from shardlib.errors import HandleError
from shardlib.execute.handles import Handle, Source, layers, materialise
from shardlib.execute.recompute import RECOMPUTE_MODES
from shardlib.execute.slicing import SlicedHandle, refuse_operands, require_whole_layer
from shardlib.kernels.common.operators import autocast_as_a_product
from shardlib.kernels.common.saved import recomputed
from shardlib.kernels.linear_cross_entropy import check_layer, check_targets, widened
from shardlib.nn.sequence import shard_sequence
from shardlib.nn.tiled import Cut, Join
from shardlib.plan.buckets import Bucket
from shardlib.plan.placement import Placement


class TiledLeaf:
    """A leaf whose tiles are gathered one by one, each a unit; the source of the leaf's handle.

    Args:
        bucket: the leaf's bucket.
        tiles: the sources of its tiles.
        trained: whether gradients are wanted.

    Attributes:
        count: number of tiles.
        rows: number of the leaf's rows (of its slice, under tensor slicing).
    """

    bucket: Bucket
    path: str
    count: int
    rows: int

    def __init__(
        self, bucket: Bucket, tiles: Sequence[Source], placement: Placement, slices: Slices, trained: bool
    ) -> None:
        self.bucket, self.path, self.count, self.rows = bucket, bucket.paths[0], bucket.tiles, bucket.shapes[0][0]
        self._tiles, self._placement, self._slices, self._trained = tiles, placement, slices, trained
        self._index = bucket.ways, bucket.tiles, self.rows // (bucket.ways * bucket.tiles)

    def __getitem__(self, number: int) -> torch.Tensor:
        """The tile of this number, gathered, connected to the graph."""
        with without_modes(RECOMPUTE_MODES):  # a recompute policy must see no gathering: it may have been done before
            return self._tiles[number].leaf(0)

    def view(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """Elements of the last dimension of ``x``, one per row of the leaf, for the rows of a tile: (..., owners, rows)."""
        return x.unflatten(-1, self._index).select(-2, number)

    def part(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """`view`, with one last dimension: a copy, unless there is one owner."""
        return self.view(x, number).flatten(-2)

    def places(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The number of the tile that has each of these rows, and the row's number in it."""
        _, tiles, height = self._index
        owner, inside = rows // (tiles * height), rows % (tiles * height)
        return inside // height, owner * height + inside % height

    @cached_property
    def handle(self) -> Handle:
        """The handle that stands for the leaf in the loss."""
        if self._placement.style is None:
            return self._of_rows
        return SlicedHandle.make(self, 0, self._placement, *self._described, self._slices)

    @cached_property
    def _of_rows(self) -> TiledHandle:
        handle = TiledHandle(self, 0, self.path, *self._described)
        handle._tiles = self
        return handle

    @property
    def _described(self) -> tuple[tuple[int, ...], torch.Tensor, bool]:
        """What its handles are told of it: the shape, a tensor like it, and whether it wants a gradient."""
        like = torch.empty(0, dtype=self.bucket.dtype, device=self._slices.mesh.device)
        return self.bucket.shapes[0], like, self._trained and self.bucket.trainable

    # As the source of its handles. What a layer of slices computes with, and a block is given, is a handle as well.

    def leaf(self, index: int) -> torch.Tensor:
        return self._of_rows

    def data(self, index: int) -> torch.Tensor:
        self.refuse("a torch.autograd.Function, or code outside of torch's functions,")

    def root_gradient(self, index: int) -> tuple[torch.Tensor, Any]:
        self.refuse("torch.autograd.grad")

    def refuse(self, name: str) -> NoReturn:
        raise HandleError(
            f"{name} uses {self.path}, which is gathered in {self.count} tiles. Use F.linear, x @ weight, "
            "torch.addmm, F.embedding or sl.nn.linear_cross_entropy, or leave it out of sl.tile"
        )


class TiledHandle(Handle):
    """A handle that stands for a leaf whose tiles are gathered one by one."""

    _tiles: TiledLeaf

    @classmethod
    def _layer(cls, func: Any, computes: bool, args: Any, kwargs: Any) -> Callable[..., Any] | None:
        layer = _LAYERS.get(func)
        if layer is not None and _uses_as_weight(func, args):
            return layer
        if computes:
            handles = pytree.tree_leaves((args, kwargs))
            tiled = next(value for value in handles if isinstance(value, TiledHandle))
            tiled._tiles.refuse(getattr(func, "__name__", None) or str(func))
        return None


def refuse_tiles(value: Any) -> None:
    """Raise if a compiled block is given a leaf in tiles: their gathers are added at each call, unseen by compile."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, TiledHandle):
            leaf._tiles.refuse("a compiled block")


def _linear(x: Any, weight: TiledHandle, bias: Any = None) -> torch.Tensor:
    x, bias, tiles = *_operands(x, weight, bias), weight._tiles
    join: Join | None = None
    for number in range(tiles.count):
        y = F.linear(x, tiles[number], None if bias is None else tiles.part(bias, number))
        join = join or Join(y.new_empty((*y.shape[:-1], tiles.rows)), tiles.view)
        join.put(y)
        del y
    assert join is not None
    return join.whole()


def _sum_of_products(bias: Any, x: Any, weight: TiledHandle) -> torch.Tensor:
    """``x @ weight + bias``: each tile multiplies its share of the inputs, and its product is added to the sum in place."""
    x, bias, tiles = *_operands(x, weight, bias), weight._tiles
    (x,) = autocast_as_a_product(x)
    cut, y = Cut(x.reshape(-1, tiles.rows), tiles.view), None
    for number in range(tiles.count):
        taken = cut.take(number)
        share = taken.flatten(-2)
        with recomputed(share, _flat, taken):  # a copy of the inputs, which are there anyway
            (tile,) = autocast_as_a_product(tiles[number])  # autocast casts nothing for what writes in place itself
            if y is None:  # no product's own result is written to: a policy of recomputation may have kept it
                shape = share.shape[0], tile.shape[1]
                y = share.new_zeros(shape) if bias is None else bias.to(share.dtype).expand(shape).clone()
            y = y.addmm_(share, tile)
    cut.done()
    assert y is not None
    return y.view(*x.shape[:-1], y.shape[-1])


def _flat(taken: torch.Tensor) -> torch.Tensor:
    return taken.flatten(-2)


def _look_up(
    ids: torch.Tensor, weight: TiledHandle, padding_idx: int | None, scaled: bool, sparse: bool
) -> torch.Tensor:
    tiles = weight._tiles
    if scaled or sparse:
        tiles.refuse("F.embedding(scale_grad_by_freq or sparse)")
    known = (ids >= 0) & (ids < tiles.rows)
    numbers, rows = tiles.places(ids)
    number_of_padding, padding = (-1, -1) if padding_idx is None else _place(tiles, padding_idx)
    y: torch.Tensor | None = None
    for number in range(tiles.count):
        here = numbers == number
        # -1 for an id outside of the table, which F.embedding refuses.
        looked_up = F.embedding(
            rows.where(here, 0).where(known, -1), tiles[number], padding if number == number_of_padding else None
        ).masked_fill(~here[..., None], 0)
        y = looked_up if y is None else y.add_(looked_up)
    assert y is not None
    return y


def _place(tiles: TiledLeaf, row: int) -> tuple[int, int]:
    number, inside = tiles.places(torch.tensor(row % tiles.rows))
    return int(number), int(inside)


def _cross_entropy(
    x: Any, weight: TiledHandle, targets: torch.Tensor, *, reduction: str, ignore_index: int, label_smoothing: float
) -> torch.Tensor:
    """The cross entropy by tiles of the words. Backward computes each tile's scores again."""
    x, parts = materialise(x), environment().parts
    check_layer("linear_cross_entropy", x, weight)
    if parts is None:
        check_targets("linear_cross_entropy", targets, x.shape[:-1], f"x of shape {tuple(x.shape)}")

    def losses(targets: torch.Tensor, reduction: str) -> torch.Tensor:
        counts = targets != ignore_index
        each = _word_losses(x, weight._tiles, targets.where(counts, 0), label_smoothing).masked_fill(~counts, 0)
        if reduction == "none":
            return each
        return each.sum() if reduction == "sum" else each.sum() / counts.sum()

    return losses(targets, reduction) if parts is None else parts.loss(losses, x, targets, ignore_index, reduction)


def _word_losses(x: torch.Tensor, tiles: TiledLeaf, targets: torch.Tensor, smoothing: float) -> torch.Tensor:
    """The loss of each token: log Σ e^z − (1 − s)·z of the target − s·mean(z), for scores z and smoothing s."""
    numbers, rows = tiles.places(targets)
    rows = rows.where((targets >= 0) & (targets < tiles.rows), -1)  # which gather refuses

    def of_tile(x: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores, here = widened(F.linear(x, tiles[number])), numbers == number
        wanted = scores.gather(-1, rows.where(here | (rows < 0), 0)[..., None])[..., 0].masked_fill(~here, 0)
        return scores.logsumexp(-1), wanted, scores.sum(-1) if smoothing else torch.zeros_like(wanted)

    def run(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if transformed():
            return of_tile(x, number)
        return checkpoint(of_tile, x, number, use_reentrant=False, preserve_rng_state=False)

    parts = map(run, range(tiles.count))
    totals, wanted, sums = map(torch.stack, zip(*parts, strict=True))
    return totals.logsumexp(0) - (1 - smoothing) * wanted.sum(0) - smoothing / tiles.rows * sums.sum(0)


def _operands(x: Any, weight: TiledHandle, bias: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The input and the bias of a layer, as tensors."""
    refuse_operands("a layer as its input", [x])
    require_whole_layer(weight, bias)
    return materialise(x), materialise(bias)


def _uses_as_weight(func: Any, args: Any) -> bool:
    """Whether a leaf in tiles is a layer's weight, and no other argument is one."""
    place = 2 if func is torch.addmm else 1
    tiled = [number for number, value in enumerate(args) if isinstance(value, TiledHandle)]
    return tiled == [place]


_LAYERS = layers(
    "a weight in tiles", _linear, _sum_of_products, _look_up, lambda ids, _: shard_sequence(ids), _cross_entropy
)
