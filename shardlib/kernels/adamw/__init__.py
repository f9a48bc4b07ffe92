"""AdamW on flat tensors, and Adam's direction for optimizers, such as LAMB, that compute the length of their steps."""

from shardlib.kernels.adamw.arguments import Old, direction_at, factors_at
from shardlib.kernels.adamw.op import adam_direction_, adamw_
from shardlib.kernels.adamw.reference import changes

__all__ = ["Old", "adam_direction_", "adamw_", "changes", "direction_at", "factors_at"]
