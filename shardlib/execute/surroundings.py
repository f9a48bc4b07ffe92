"""The context in which a model's functions find the mesh, their sequence parts, the modules that run in tiles, the way to
experts and what further sharded trees hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shardlib.execute.sequence import SequenceParts
from shardlib.mesh.mesh import Mesh, current_mesh
from shardlib.nn.moe.experts import Exchange, current_exchange
from shardlib.nn.sequence import current_parts
from shardlib.nn.tiled_modules import TiledModules, current_modules
from shardlib.sharded.tree import Sharded, reading
from shardlib.tree import Tree


@dataclass(frozen=True)
class Surroundings:
    """What is around the code of a function, in forward and in recomputation, which may run in a thread of autograd's.

    Attributes:
        parts: the sequence's parts; None if sequences are whole.
        modules: the modules that run in tiles; None if there are none.
        tokens: how tokens travel to their experts; None if every rank has all experts.
        read: how a further sharded tree is read; None if as shards.
    """

    mesh: Mesh
    parts: SequenceParts | None
    modules: TiledModules | None
    tokens: Exchange | None
    read: Callable[[Sharded], Tree] | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        mesh, parts = current_mesh.set(self.mesh), current_parts.set(self.parts)
        modules, tokens = current_modules.set(self.modules), current_exchange.set(self.tokens)
        read = reading.set(self.read)
        try:
            yield
        finally:
            reading.reset(read)
            current_exchange.reset(tokens)
            current_modules.reset(modules)
            current_mesh.reset(mesh)
            current_parts.reset(parts)
