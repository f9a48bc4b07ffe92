"""Fragments of packed tensors, decoded (or read from disk) one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from shardlib.checkpoint.fragments import Fragment
from shardlib.checkpoint.packed import CheckpointTrees
from shardlib.common._compat import storage_id
from shardlib.optim.base import Packed


@dataclass(frozen=True)
class Saving:
    """What a rank saves. Iteration gives the fragments with their elements, which are dropped where the caller drops them.

    Attributes:
        parts: the trees, with outlines in place of packed tensors.
        outlines: the fragments; those of packed tensors have no elements.
    """

    parts: CheckpointTrees
    outlines: Sequence[Fragment]

    def __iter__(self) -> Iterator[Fragment]:
        return decoded(self.parts, self.outlines)


def decoded(parts: CheckpointTrees, fragments: Iterable[Fragment]) -> Iterator[Fragment]:
    """``fragments`` with the elements of packed tensors. Those of one tensor come one after the other, so that it is decoded
    once, and no two are held here."""
    held: tuple[Packed | None, torch.Tensor] = None, torch.empty(0)
    for fragment in fragments:
        node = parts.packed.get(storage_id(fragment.data.untyped_storage()))
        if node is None:
            yield fragment
            continue
        if held[0] is not node:
            held = None, torch.empty(0)  # before the next is there
            held = node, node.unpacked().reshape(-1)
        first = int(fragment.data.storage_offset())
        yield fragment._replace(data=held[1][first : first + fragment.data.numel()])
