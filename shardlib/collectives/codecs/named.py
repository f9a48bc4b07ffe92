"""The names of codecs that send a few bits per element, with one scale per block."""

from __future__ import annotations

from shardlib.collectives.codecs.float8 import Float8
from shardlib.collectives.codecs.integers import Integers, Packing
from shardlib.kernels.quantize import Blockwise

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
