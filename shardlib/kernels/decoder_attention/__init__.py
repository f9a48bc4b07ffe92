"""The first half of a decoder's layer: a norm, rotary self-attention, and the sum with what came in."""

from shardlib.kernels.decoder_attention.arguments import Heads, Seats
from shardlib.kernels.decoder_attention.op import decoder_attention

__all__ = ["Heads", "Seats", "decoder_attention"]
