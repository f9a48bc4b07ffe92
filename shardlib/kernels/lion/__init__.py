"""Lion over flat tensors."""

from shardlib.kernels.lion.op import lion_

__all__ = ["lion_"]
