"""AdamW on flat tensors with moments stored in 8 bits, and the maps between numbers and their codes."""

from shardlib.kernels.adamw8.codes import BLOCK, SIGNED, UNSIGNED, DynamicMap
from shardlib.kernels.adamw8.op import adamw8_

__all__ = ["BLOCK", "SIGNED", "UNSIGNED", "DynamicMap", "adamw8_"]
