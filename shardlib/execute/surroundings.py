"""The context in which a model's functions find the mesh, the rows of all ranks, their sequence parts, the modules that run
in tiles and the way to experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shardlib.collectives.pairs import averaged_axes
from shardlib.execute.sequence import SequenceParts
from shardlib.execute.whole_batch import WholeBatch
from shardlib.mesh.mesh import Mesh, current_mesh
from shardlib.nn.batch import current_batch
from shardlib.nn.moe.experts import Exchange, current_exchange
from shardlib.nn.sequence import current_parts
from shardlib.nn.tiled_modules import TiledModules, current_modules


@dataclass(frozen=True)
class Surroundings:
    """What is around the code of a function, in forward and in recomputation, which may run in a thread of autograd's.

    Attributes:
        batch: the rows of all ranks.
        parts: the sequence's parts; None if sequences are whole.
        modules: the modules that run in tiles; None if there are none.
        tokens: how tokens travel to their experts; None if every rank has all experts.
    """

    mesh: Mesh
    batch: WholeBatch
    parts: SequenceParts | None
    modules: TiledModules | None
    tokens: Exchange | None

    @contextmanager
    def installed(self) -> Iterator[None]:
        mesh, parts = current_mesh.set(self.mesh), current_parts.set(self.parts)
        batch, averaged = current_batch.set(self.batch), averaged_axes.set(self.batch.axes)
        modules, tokens = current_modules.set(self.modules), current_exchange.set(self.tokens)
        try:
            yield
        finally:
            current_exchange.reset(tokens)
            current_modules.reset(modules)
            averaged_axes.reset(averaged)
            current_batch.reset(batch)
            current_mesh.reset(mesh)
            current_parts.reset(parts)
