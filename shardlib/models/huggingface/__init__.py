"""Models of transformers: rules for slicing them, and their blocks for pipelines."""

from shardlib.models.huggingface.decoders import decoder_blocks
from shardlib.models.huggingface.rules import Rules, sliceable, slicing_rules

__all__ = ["Rules", "decoder_blocks", "sliceable", "slicing_rules"]
