"""A user's function on whole leaves that are functions of this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from shardlib.collectives.styles.slices import Slices
from shardlib.common._compat import without_derivatives
from shardlib.common.environment import within
from shardlib.common.writes import has_place, owner_of
from shardlib.errors import HandleError
from shardlib.execute.context import ScaledProducts, Surroundings, WholeBatch, modules_of
from shardlib.execute.handles import Present
from shardlib.execute.layer_dropping import Layers
from shardlib.execute.losses import Outcome, read_loss, wants
from shardlib.execute.sequence import SequenceParts
from shardlib.execute.shard_tracking import watched
from shardlib.execute.slicing import as_used
from shardlib.execute.tiles import TiledLeaf
from shardlib.execute.values.wholes import UnitSums, Wholes, unit_sums
from shardlib.mesh.mesh import Mesh
from shardlib.nn.blocks import Runner
from shardlib.plan.drops import DropPlan
from shardlib.plan.plan import Plan
from shardlib.rng import Key
from shardlib.sharded.reduction import BoundCodecs
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, unflatten

Buffers = Mapping[str, torch.Tensor]  # bucket name -> this rank's buffer, or the slot of its gradient


class Function:
    """A function of whole parameters, as a function of shards.

    Args:
        fn: of the tree of parameters and further arguments.
        trained: whether micro-batches are those of a step.
        blocks: how blocks run, given what is around them; None for a plain call.

    Attributes:
        wholes: the exchanges of each bucket.
        trained: the same, of those that have gradients.
        layer_tokens: tokens that layers saw in the last call, where the plan leaves out some.
    """

    layer_tokens: int
    fn: Callable[..., Any]
    plan: Plan
    mesh: Mesh

    def __init__(
        self,
        fn: Callable[..., Any],
        plan: Plan,
        mesh: Mesh,
        trained: bool,
        blocks: Callable[[Surroundings], Runner] | None = None,
    ) -> None:
        self.fn, self.plan, self.mesh = fn, plan, mesh
        run = plan.tiled
        self.wholes: list[Wholes] = [Wholes(b, run.routes[b.name], mesh, b.unit in plan.kept) for b in run.buckets]
        self.trained: list[Wholes] = [whole for whole in self.wholes if whole.bucket.trainable]
        codecs, routes = BoundCodecs(mesh), run.routes
        coded = {whole.bucket: routes[whole.bucket.name].each for whole in self.trained if whole.coded}
        self._each = unit_sums(coded, mesh, codecs)
        self._last = unit_sums({b: routes[b.name].last for b in run.trained if routes[b.name].last}, mesh, codecs)
        self._wants_rng = wants(fn, "rng")
        self._parts = SequenceParts(plan.step.sequence, mesh, set()) if plan.step.sequence else None
        self._looked = False  # whether a call was looked at, for what is wrong without a sign
        self._slices = Slices(mesh, plan.step.sequence)
        batch = WholeBatch(plan, mesh, trained, lambda: None)  # exchanges are the same on all ranks
        own = {path for bucket in plan.buckets for path in bucket.paths}  # of a stage
        scaled = {placement.path for placement in plan.placements if placement.scaled and placement.path in own}
        self._scaled: dict[str, torch.Tensor | None] = dict.fromkeys(scaled)  # the leaves, in a call
        products = ScaledProducts(self._is_scaled) if scaled else None
        self._surroundings = Surroundings(
            mesh, batch, self._parts, modules_of(plan), plan.step.tokens, plan.step.autocast, products, _refuse_further
        )
        self._blocks = None if blocks is None else blocks(self._surroundings)
        self._layers = Layers(plan, mesh.device) if plan.step.has_drops else None
        self._in_block = False
        self.layer_tokens = 0

    def __call__(
        self, stored: Buffers, slots: Buffers, *args: Any, key: Key | None = None, drops: DropPlan | None = None
    ) -> Any:
        """``fn(whole parameters, *args)`` at ``stored + slots``; see `Wholes.slot`.

        Args:
            drops: what layers leave out. Tokens are drawn by ``key``.
        """
        extra = {"rng": key} if self._wants_rng and key is not None else {}
        with self._running():
            wholes, tiled = self._leaves(stored, slots)
            leaves = {path: self._used(path, leaf) for path, leaf in wholes.items()} | tiled
            self._scaled = {path: (leaves if path in self.plan.styles else wholes)[path] for path in self._scaled}
            tree = unflatten(self.plan.shape.treedef, [leaves.get(leaf.path) for leaf in self.plan.leaves])
            if self._layers is not None:
                self._layers.begin(None if drops is None or key is None else drops.drawn_by(key), False)
                self._layers.know([leaves.get(leaf.path) for leaf in self.plan.leaves])
            with nullcontext() if self._looked else self._watched(leaves, wholes):
                result = self.fn(tree, *args, **extra)
            if self._layers is not None:
                self.layer_tokens = self._layers.end()
        self._looked = True
        return result

    def outcome(
        self,
        stored: Buffers,
        slots: Buffers,
        batch: Any,
        key: Key | None,
        buffers: Any = None,
        drops: DropPlan | None = None,
    ) -> Outcome:
        """What a loss function gives for one micro-batch on this rank. Torch's own generators are the caller's to seed."""
        inputs = (batch,) if buffers is None else (buffers, batch)
        return read_loss(self(stored, slots, *inputs, key=key, drops=drops), buffers is not None)

    def slots(self) -> dict[str, torch.Tensor]:
        """The slot of each trained bucket's gradient."""
        return {whole.bucket.name: whole.slot() for whole in self.trained}

    def sums(self) -> dict[str, torch.Tensor]:
        """The sums of gradients over no micro-batches, by bucket of the state."""
        return {
            bucket.name: torch.zeros(bucket.size(bucket.grad_level), dtype=bucket.reduce_dtype, device=self.mesh.device)
            for bucket in self.plan.trained
        }

    def in_tiles(self, sums: Buffers) -> dict[str, torch.Tensor]:
        """`sums` by trained bucket: views, of leaves in tiles."""
        pairs = (zip(bucket.cut, bucket.of_tiles(sums[bucket.name])) for bucket in self.plan.trained if sums)
        return {tile.name: part for pair in pairs for tile, part in pair}

    def joined(self, gradients: Buffers, sums: Buffers) -> dict[str, torch.Tensor]:
        """Gradients as the optimizer holds them, by bucket of the state: those of a leaf's tiles in one piece.

        Args:
            sums: in which gradients are that were summed over micro-batches, and had no further exchange.
        """
        found, routes = dict[str, torch.Tensor](), self.plan.tiled.routes
        for bucket in self.plan.trained:
            if bucket.name in gradients:
                found[bucket.name] = gradients[bucket.name]
            elif bucket.name in sums and not routes[bucket.cut[0].name].last:
                found[bucket.name] = sums[bucket.name]
            else:
                found[bucket.name] = torch.cat([gradients[tile.name] for tile in bucket.cut])
        return found

    @property
    def reached(self) -> set[str]:
        """The paths of leaves that had a gradient in a backward."""
        return {path for whole in self.trained for path in whole.reached}

    def accumulated(self, gradients: Buffers, kept: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gradients of one micro-batch, as they are summed over micro-batches. Replaces what codecs have ``kept``."""
        return dict(gradients) | _summed(self._each, gradients, kept)

    def reduced(
        self, gradients: Buffers, kept: dict[str, torch.Tensor], unreduced: Sequence[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Gradients, summed over micro-batches, summed over ranks (but for axes that are left ``unreduced``) and cut as the
        optimizer holds them. Replaces what codecs have ``kept``."""
        return dict(gradients) | _summed(self._last, gradients, kept, unreduced)

    def _leaves(self, stored: Buffers, slots: Buffers) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The parameters by path: whole leaves, and this rank's slices and experts; and the handles of leaves in tiles."""
        leaves: dict[str, torch.Tensor] = {}
        tiles: dict[str, list[Present]] = {}
        for whole in self.wholes:
            name = whole.bucket.name
            found = dict(zip(whole.bucket.paths, whole.leaves(stored[name], slots.get(name)), strict=True))
            if whole.bucket.home is None:
                leaves |= found
            else:
                for path, tile in found.items():
                    tiles.setdefault(path, []).append(Present(tile))
        handles: dict[str, torch.Tensor] = {
            path: TiledLeaf(
                self.plan.bucket_of[(placement := self.plan.placement_of[path]).bucket],
                found,
                placement,
                self._slices,
                True,
            ).handle
            for path, found in tiles.items()
        }
        return leaves, handles

    def _used(self, path: str, leaf: torch.Tensor) -> torch.Tensor:
        placement = self.plan.placement_of[path]
        return as_used(leaf, placement, self.plan.bucket_of[placement.bucket].trainable, self._slices)

    def _watched(
        self, leaves: Mapping[str, torch.Tensor], wholes: Mapping[str, torch.Tensor]
    ) -> AbstractContextManager[None]:
        there = [(path, below) for path, leaf in wholes.items() if has_place(below := without_derivatives(leaf))]
        return watched(
            leaves, lambda tensor: owner_of(tensor, there), self.plan.styles, self._slices, self._parts, set()
        )

    def _block(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of a block, which may be a layer that leaves out tokens."""
        assert self._layers is not None and self._blocks is not None
        if self._in_block:
            return self._layers.run_within(fn, args, kwargs, self._blocks)
        self._in_block = True
        try:
            return self._layers.run(fn, args, kwargs, self._blocks)
        finally:
            self._in_block = False

    @contextmanager
    def _running(self) -> Iterator[None]:
        try:
            with within(blocks=self._blocks if self._layers is None else self._block), self._surroundings.installed():
                yield
        finally:
            self._slices.clear()
            self._scaled = dict.fromkeys(self._scaled)

    def _is_scaled(self, factor: torch.Tensor) -> bool:
        """Whether products by a matrix are in 8 bits: a parameter, or a view of one."""
        plain = ((path, leaf) for path, leaf in self._scaled.items() if leaf is not None and has_place(leaf))
        return owner_of(factor, plain) is not None


def _summed(
    sums: Sequence[UnitSums], gradients: Buffers, kept: dict[str, torch.Tensor], unreduced: Sequence[str] = ()
) -> dict[str, torch.Tensor]:
    return {name: total for each in sums for name, total in each(gradients, kept, unreduced).items()}


def _refuse_further(tree: Sharded) -> Tree:
    raise HandleError(
        "a function under torch.func or compile=True reads a further sharded tree. Give it sl.unshard(params), or "
        "freeze it among the parameters"
    )


def gradients_of(
    totals: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor], slots: Buffers
) -> dict[str, torch.Tensor]:
    """The gradients of ``Σ seeds · totals`` with respect to slots. What no total depends on has zeros."""
    started = [(total, seed.to(total.dtype)) for total, seed in zip(totals, seeds) if total.requires_grad]
    found: Sequence[torch.Tensor | None] = [None] * len(slots)
    if started and slots:
        outputs, cotangents = zip(*started)
        found = torch.autograd.grad(outputs, list(slots.values()), cotangents, allow_unused=True)
    return {
        name: torch.zeros(slot.shape, dtype=slot.dtype, device=slot.device) if gradient is None else gradient
        for (name, slot), gradient in zip(slots.items(), found, strict=True)
    }
