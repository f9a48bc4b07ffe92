"""Layers of experts without shardlib: transformers' Mixtral block and, where it is installed, DeepSpeed's layer."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from benchmarks.peers.deepspeed import installed

_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
IMPLEMENTATIONS = ("eager", "grouped_mm")  # batched_mm copies the matrices for every token


def mixtral(how: str, width: int, inner: int, experts: int, choices: int) -> nn.Module:
    """transformers' block with one of its implementations: of ``[batch, sequence, width]``."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=width, intermediate_size=inner, num_local_experts=experts, num_experts_per_tok=choices
    )
    config._experts_implementation = how
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    return block


def of_mixtral(block: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A block's router, and its experts' matrices as `shardlib.nn.moe` takes them."""
    gate, up = (half.detach().contiguous().requires_grad_() for half in block.experts.gate_up_proj.chunk(2, 1))
    return block.gate.weight, {"gate": gate, "up": up, "down": block.experts.down_proj}


def deepspeed_layer(width: int, inner: int, experts: int) -> Any:
    """DeepSpeed's top-1 layer in one process, of ``[batch, sequence, width]``: experts with GELU and biases, the capacity's
    factor 1. None where it is not installed.
    """
    if not installed():
        return None
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name, value in _ALONE.items():
        os.environ.setdefault(name, value)
    import deepspeed
    from deepspeed.moe.layer import MoE

    if not torch.distributed.is_initialized():
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    expert = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
    layer = MoE(width, expert, num_experts=experts, k=1, capacity_factor=1.0, min_capacity=4)
    layer.set_deepspeed_parallelism()
    return layer
