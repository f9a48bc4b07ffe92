"""Models of transformers: rules for slicing them, blocks for pipelines, experts, and losses without whole logits."""

from shardlib.models.huggingface.decoders import decoder_blocks
from shardlib.models.huggingface.experts import balanced, upcycle, with_experts
from shardlib.models.huggingface.losses import Scores, causal_loss, keeps_apart, masked_loss, with_tiled_loss
from shardlib.models.huggingface.rules import Rules, expert_rules, sliceable, slicing_rules

__all__ = [
    "Rules",
    "Scores",
    "balanced",
    "causal_loss",
    "decoder_blocks",
    "expert_rules",
    "keeps_apart",
    "masked_loss",
    "sliceable",
    "slicing_rules",
    "upcycle",
    "with_experts",
    "with_tiled_loss",
]
