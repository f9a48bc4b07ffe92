"""The order in which tensors are moved: that of their memory, so that they come back with the strides they had."""

from __future__ import annotations

import torch

Layout = tuple[tuple[int, ...], tuple[int, ...]]


def flattened(tensor: torch.Tensor) -> tuple[torch.Tensor, Layout]:
    """A tensor's elements in the order of memory, and the sizes and strides by which ``as_strided`` makes it of them again.

    What has gaps or shares elements is copied first, without them.
    """
    dense = tensor.detach()
    if not _is_dense(dense):
        dense = dense.contiguous()
    return dense.as_strided((dense.numel(),), (1,)), (tuple(dense.size()), tuple(dense.stride()))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in memory without gaps, in any order, each once."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.size(), tensor.stride()) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
