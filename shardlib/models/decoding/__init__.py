"""Inference: models as functions of new tokens and a key-value cache, and the loop that draws token after token.

Sequences have no padding. The new tokens of all sequences lie one after the other, ``[T]``, and every sequence attends to its
own keys, as many as it has. So a sequence's tokens are the same alone and among others, up to rounding.
"""

from shardlib.models.decoding.decoder import Decoder
from shardlib.models.decoding.experts_on_host import ExpertsOnHost, experts_on_host
from shardlib.models.decoding.kinds import decoder_of
from shardlib.models.decoding.loop import Sampling, decode
from shardlib.models.decoding.quantized import quantized

__all__ = ["Decoder", "ExpertsOnHost", "Sampling", "decode", "decoder_of", "experts_on_host", "quantized"]
