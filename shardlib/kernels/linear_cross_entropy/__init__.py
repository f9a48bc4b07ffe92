"""The cross entropy of an output layer, without storing its logits."""

from shardlib.kernels.linear_cross_entropy.op import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
