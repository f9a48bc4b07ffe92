"""The experts of each token, and the order of tokens by expert."""

from shardlib.kernels.routing.op import by_expert, top_k

__all__ = ["by_expert", "top_k"]
