"""An exchange of tokens along two axes, of which one joins nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardlib.collectives.tokens.hops import Hops


@dataclass(frozen=True)
class TwoHops(Hops):
    """A token exchange by all-to-alls between nodes and inside each node (DeepSpeed-MoE, arXiv 2201.05596, section 5.2).

    With N nodes of L ranks a rank sends N − 1 messages between nodes, each L times as large as the N·L − L of `Direct`: to
    the rank with its own local index on every other node, which passes on what others of its node are to have. Bytes between
    nodes are the same.

    Rows go between nodes first, and results inside the node first. In the other order messages would be as many and as
    large, but a rank would send between nodes what all ranks of its node have for one local index; so it sends its own rows,
    R at most, however lopsided the routing is. Of the two hops the one between nodes is under way while a rank computes.
    """

    name: ClassVar[str] = "two hops"

    node: str
    local: str

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.node, self.local)
