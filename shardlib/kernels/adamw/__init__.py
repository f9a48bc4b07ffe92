"""AdamW over flat tensors."""

from shardlib.kernels.adamw.op import adamw_, implementation

__all__ = ["adamw_", "implementation"]
