"""Models of transformers: rules for slicing them, their blocks for pipelines, and their loss without whole logits."""

from shardlib.models.huggingface.decoders import decoder_blocks
from shardlib.models.huggingface.rules import Rules, sliceable, slicing_rules
from shardlib.models.huggingface.tiled_loss import Scores, with_tiled_loss

__all__ = ["Rules", "Scores", "decoder_blocks", "sliceable", "slicing_rules", "with_tiled_loss"]
