"""An exchange of tokens along one axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardlib.collectives.tokens.hops import Hops


@dataclass(frozen=True)
class Direct(Hops):
    """A token exchange by one all-to-all, in which every rank sends to every other (GShard, arXiv 2006.16668, section 3.2).

    Payload per rank: in each direction the rows that other ranks' experts have; see `TokenExchange.payload`.

    >>> def turned(mesh):  # two experts, one on each rank; rank r has the rows 10·r for expert 0 and 10·r + 1 for expert 1
    ...     rows = torch.tensor([[0.0], [1.0]]) + 10 * mesh.rank
    ...     exchange = sl.collectives.tokens.Direct("expert")
    ...     coming, way = exchange.send(mesh, rows, torch.tensor([1, 1]))
    ...     here = coming.wait()
    ...     return here.flatten().tolist(), exchange.back(mesh, -here, way).wait().flatten().tolist()
    >>> sl.simulate(turned, mesh=dict(expert=2))
    [([0.0, 10.0], [-0.0, -1.0]), ([1.0, 11.0], [-10.0, -11.0])]
    """

    name: ClassVar[str] = "direct"

    axis: str

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,)
