"""AdamW over flat tensors, and Adam's direction for optimizers that choose the length of their steps themselves."""

from shardlib.kernels.adamw.arguments import direction_at, factors_at
from shardlib.kernels.adamw.op import adam_direction_, adamw_
from shardlib.kernels.adamw.reference import changes

__all__ = ["adam_direction_", "adamw_", "changes", "direction_at", "factors_at"]
