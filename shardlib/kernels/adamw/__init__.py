"""AdamW over flat tensors."""

from shardlib.kernels.adamw.op import adamw_

__all__ = ["adamw_"]
