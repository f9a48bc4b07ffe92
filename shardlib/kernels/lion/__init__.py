"""Lion over flat tensors."""

from shardlib.kernels.lion.op import lion_
from shardlib.kernels.lion.reference import sign

__all__ = ["lion_", "sign"]
