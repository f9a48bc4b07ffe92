"""Sums and gathers in few bits: one file per codec, and what a codec of one's own is.

A codec is a frozen dataclass with what `Codec` names, which a transform claims by ``Reduce(axis, codec=...)``:

- ``wide``: whether it sends float64, and ``whole``: whether it needs whole leaves;
- ``bind(rows)``: a `Line`, the codec for one buffer that is laid out as `Rows` says: what stays from one exchange to the next
  (`Kept`), the bytes a rank sends, how the buffer is padded, and what is kept before the first exchange;
- ``exchange(mesh, axis, items, errors)``: starts the sum of several buffers, an `Item` each, by `shardlib.collectives`'
  primitives; reads and replaces what is kept in ``errors`` (`Errors`). ``wait`` of the `Exchange` that it returns gives each
  buffer's sum: this rank's row where rows are scattered, else all of it.
"""

from shardlib.collectives.codecs.base import (
    Codec,
    Errors,
    Exchange,
    Item,
    Kept,
    KeptFactors,
    Line,
    RowResidual,
    Rows,
    SentResidual,
)

__all__ = ["Codec", "Errors", "Exchange", "Item", "Kept", "KeptFactors", "Line", "RowResidual", "Rows", "SentResidual"]
