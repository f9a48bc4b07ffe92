"""Models of transformers: rules for slicing them, blocks for pipelines, experts, and losses without whole logits."""

from shardlib.models.huggingface.decoders import decoder_blocks
from shardlib.models.huggingface.experts import balanced, upcycle, with_experts
from shardlib.models.huggingface.losses import causal_loss, masked_loss
from shardlib.models.huggingface.rules import Rules, expert_rules, sliceable, slicing_rules
from shardlib.models.huggingface.tiled_loss import Scores, with_tiled_loss

__all__ = [
    "Rules",
    "Scores",
    "balanced",
    "causal_loss",
    "decoder_blocks",
    "expert_rules",
    "masked_loss",
    "sliceable",
    "slicing_rules",
    "upcycle",
    "with_experts",
    "with_tiled_loss",
]
