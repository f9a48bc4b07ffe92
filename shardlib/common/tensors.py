"""Tensors' dtypes by name, their memory as bytes, and where it begins."""

from __future__ import annotations

import torch

from shardlib.common._compat import FakeTensor

# The names of dtypes.


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in torch: "float32"."""
    return str(dtype).removeprefix("torch.")


# The memory of a tensor as bytes.


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, uint8 ``[n]`` in its memory.

    A tensor of one element is contiguous whatever its strides, as ``x[:1, 0]`` is, and torch views as another dtype only what
    has the stride 1.

    >>> raw_bytes(torch.ones(4, 128)[:1, 0]).tolist()
    [0, 0, 128, 63]
    """
    flat = tensor.detach().view(-1)
    return (flat.as_strided((1,), (1,)) if len(flat) == 1 else flat).view(torch.uint8)


# Where tensors begin in memory, by which a CPU's products may be rounded.
# Torch's products of few rows, by MKL on a CPU of AMD, add up in another order where rows do not begin at a multiple of 16
# bytes: of 1 to 24 rows of 6 numbers of fp32, nearly every product changed by a last bit. From 64 rows of 32 numbers on
# none did.


BYTES = 64  # of a cache line, at which torch's allocations begin


def aligned(x: torch.Tensor) -> torch.Tensor:
    """``x``, or where it is floating, on a CPU and does not begin at a multiple of 64 bytes, a copy that does."""
    if x.device.type != "cpu" or not x.is_floating_point():
        return x
    # A tensor without values has no address; what it stands for is taken to begin where an allocation does, but for this.
    begin = x.storage_offset() * x.element_size() if isinstance(x, FakeTensor) else x.data_ptr()
    return x.clone() if begin % BYTES else x
