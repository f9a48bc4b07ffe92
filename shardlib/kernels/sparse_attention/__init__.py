"""Attention over a layout's blocks, as tensors and numbers: `shardlib.nn.sparse_attention` takes a `Layout` and a `Key`."""

from shardlib.kernels.sparse_attention.op import LARGEST, attend

__all__ = ["LARGEST", "attend"]
