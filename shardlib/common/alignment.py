"""Where tensors begin in memory, by which a CPU's products may be rounded.

Torch's products of few rows, by MKL on a CPU of AMD, add up in another order where rows do not begin at a multiple of 16
bytes: of 1 to 24 rows of 6 numbers of fp32, nearly every product changed by a last bit. From 64 rows of 32 numbers on none
did.
"""

from __future__ import annotations

import torch

from shardlib.common._compat import FakeTensor

BYTES = 64  # of a cache line, at which torch's allocations begin


def aligned(x: torch.Tensor) -> torch.Tensor:
    """``x``, or where it is floating, on a CPU and does not begin at a multiple of 64 bytes, a copy that does."""
    if x.device.type != "cpu" or not x.is_floating_point():
        return x
    # A tensor without values has no address; what it stands for is taken to begin where an allocation does, but for this.
    begin = x.storage_offset() * x.element_size() if isinstance(x, FakeTensor) else x.data_ptr()
    return x.clone() if begin % BYTES else x
