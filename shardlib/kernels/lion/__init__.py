"""Lion over flat tensors."""

from shardlib.kernels.lion.op import implementation, lion_

__all__ = ["implementation", "lion_"]
