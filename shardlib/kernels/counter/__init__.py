"""Random bits from a counter."""

from shardlib.kernels.counter.op import random_bits, signed, spread

__all__ = ["random_bits", "signed", "spread"]
