"""AdamW over flat tensors, and Adam's direction for optimizers that choose the length of their steps themselves."""

from shardlib.kernels.adamw.op import adam_direction_, adamw_

__all__ = ["adam_direction_", "adamw_"]
