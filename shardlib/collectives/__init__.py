"""Collectives by axis name: primitives that count what they send, and on top of these dual pairs that autograd crosses, the
codecs of gradients, the kinds of `sequence`, the exchanges of `tokens` and the styles of `tensor_slicing`."""

from shardlib.collectives import codecs, primitives, sequence, styles, tokens
from shardlib.collectives.cross_entropy import vocab_cross_entropy
from shardlib.collectives.pairs import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    copy,
    permute,
    reduce_scatter,
    split,
)

__all__ = [
    # pairs
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "copy",
    "permute",
    "reduce_scatter",
    "split",
    "vocab_cross_entropy",
    # rooms
    "codecs",
    "primitives",
    "sequence",
    "styles",
    "tokens",
]
