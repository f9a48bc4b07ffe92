"""The second half of a decoder's layer: a norm, an MLP or experts, and the sum with what came in."""

from shardlib.kernels.decoder_mlp.arguments import MLP, Choice
from shardlib.kernels.decoder_mlp.op import decoder_mlp

__all__ = ["MLP", "Choice", "decoder_mlp"]
