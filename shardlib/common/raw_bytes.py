"""The memory of a tensor as bytes."""

import torch


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, uint8 ``[n]`` in its memory.

    A tensor of one element is contiguous whatever its strides, as ``x[:1, 0]`` is, and torch views as another dtype only what
    has the stride 1.

    >>> raw_bytes(torch.ones(4, 128)[:1, 0]).tolist()
    [0, 0, 128, 63]
    """
    flat = tensor.detach().view(-1)
    return (flat.as_strided((1,), (1,)) if len(flat) == 1 else flat).view(torch.uint8)
