"""AdamW over flat tensors whose moments are kept in 8 bits, and the maps from numbers to their codes."""

from shardlib.kernels.adamw8.codes import BLOCK, SIGNED, UNSIGNED, DynamicMap
from shardlib.kernels.adamw8.op import adamw8_

__all__ = ["BLOCK", "SIGNED", "UNSIGNED", "DynamicMap", "adamw8_"]
