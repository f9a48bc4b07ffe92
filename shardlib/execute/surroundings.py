"""The context in which a model's functions find the mesh, the rows of all ranks, their sequence parts, the modules that run
in tiles, the way to experts and what further sharded trees hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.collectives.tokens import TokenExchange
from shardlib.common.environment import within
from shardlib.execute.batches import WholeBatch
from shardlib.execute.meeting import Meeting
from shardlib.execute.scaled import ScaledProducts
from shardlib.execute.sequence import SequenceParts
from shardlib.mesh.mesh import Mesh
from shardlib.nn.tiled import TiledModules
from shardlib.plan.plan import Plan
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree


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
        with around, casting(self.autocast if casts else None, self.mesh.device), self.scaled or nullcontext():
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
