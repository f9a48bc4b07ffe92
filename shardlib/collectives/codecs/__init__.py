"""Compressed sums and gathers: one file per codec, and the interface of a codec of one's own.

A codec is a frozen dataclass with the attributes and methods of `Codec`. A transform claims it by ``Reduce(axis,
codec=...)``:

- ``wide``: whether it sends float64, and ``whole``: whether buffers must hold whole leaves;
- ``bind(rows)``: the `BoundCodec` for one buffer that is laid out as `Rows` says. It states the tensors that stay from one
  exchange to the next (`Kept`) and their initial values, the bytes that a rank sends, and how the buffer is padded;
- ``exchange(mesh, axis, items, residuals)``: starts the sum of several buffers, one `Item` each, by the primitives of
  `shardlib.collectives`. It reads and replaces the kept tensors in ``residuals`` (`Residuals`). It returns a `SumsUnderWay`,
  whose ``wait`` returns each buffer's sum: this rank's row of it where rows are scattered, else the whole buffer.

Parameters are gathered in fewer bytes by a `Packing`, which a transform claims by ``Reduce(axis, gathered=...)``.
"""

from shardlib.collectives.codecs.base import (
    BoundCodec,
    Codec,
    Item,
    Kept,
    KeptFactors,
    Packing,
    Residuals,
    RowResidual,
    Rows,
    SentResidual,
    SumsUnderWay,
)
from shardlib.collectives.codecs.float8 import Float8
from shardlib.collectives.codecs.integers import Integers
from shardlib.kernels.quantize import Blockwise

__all__ = [
    "BoundCodec",
    "Codec",
    "SumsUnderWay",
    "Item",
    "Kept",
    "KeptFactors",
    "Packing",
    "Residuals",
    "RowResidual",
    "Rows",
    "SentResidual",
]

# Codecs that send a few bits per element, with one scale per block, have names.
FewBits = Float8 | Integers
FORMS = ("int8", "int4", "fp8")


def packing_of(codec: str | Packing | None) -> Packing | None:
    """The packing that an argument stands for, which is one, a name in `FORMS`, or None."""
    return named(codec) if isinstance(codec, str) else codec


def named(form: str, block: int = 128, feedback: bool = False) -> FewBits:
    """The codec, and packing, of a name in `FORMS`.

    Args:
        block: elements per scale.
        feedback: whether residuals are kept.
    """
    return Float8(block, feedback) if form == "fp8" else Integers(Blockwise(int(form[3:]), block), feedback)
