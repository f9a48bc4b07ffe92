"""Attention between positions of a sequence that is cut over a mesh axis: one file per kind, and the base of new kinds."""

from shardlib.collectives.sequence.base import Attend, Attention, SequenceKind
from shardlib.collectives.sequence.megatron import Megatron
from shardlib.collectives.sequence.ring import Ring
from shardlib.collectives.sequence.ulysses import Ulysses

KINDS: dict[str, type[SequenceKind]] = {kind.name: kind for kind in (Megatron, Ulysses, Ring)}

__all__ = ["KINDS", "Attend", "Attention", "Megatron", "Ring", "SequenceKind", "Ulysses"]
