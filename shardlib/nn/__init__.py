"""Functions that losses are made of: attention, sequence parts, losses, dropout, blocks, experts, and fused operations.

On one device all of them are plain PyTorch. On a mesh the same calls handle sliced parameters and sequence parts.
"""

from shardlib.kernels.gelu import gelu
from shardlib.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from shardlib.kernels.rotary import angles, rotary
from shardlib.kernels.softmax import softmax
from shardlib.kernels.swiglu import swiglu
from shardlib.nn.attention import attention, sparse_attention
from shardlib.nn.blocks import Gate, block, checkpoint_name, sequential
from shardlib.nn.dropout import dropout
from shardlib.nn.functional import Mean, distillation, embedding, linear_cross_entropy
from shardlib.nn.moe import routers
from shardlib.nn.moe.experts import run_experts
from shardlib.nn.moe.layer import MoEConfig, init_moe, moe
from shardlib.nn.scaled import scaled_matmul
from shardlib.nn.sequence import gather_batch, gather_sequence, shard_sequence, sum_sequence
from shardlib.nn.tiled import tiled

__all__ = [
    # attention and sequences
    "attention",
    "sparse_attention",
    "gather_sequence",
    "shard_sequence",
    "sum_sequence",
    # losses, and layers that may be sliced
    "Mean",
    "gather_batch",
    "distillation",
    "embedding",
    "linear_cross_entropy",
    "scaled_matmul",
    "tiled",
    # blocks of a model
    "Gate",
    "block",
    "checkpoint_name",
    "sequential",
    # experts
    "MoEConfig",
    "init_moe",
    "moe",
    "routers",
    "run_experts",
    # fused operations
    "add_layer_norm",
    "add_rms_norm",
    "angles",
    "dropout",
    "gelu",
    "layer_norm",
    "rms_norm",
    "rotary",
    "softmax",
    "swiglu",
]
