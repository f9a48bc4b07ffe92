"""`shardlib.nn.moe` on the weights of transformers' blocks of experts: outputs, gradients and auxiliary losses."""

import pytest
import torch

import shardlib as sl
from shardlib.nn import routers

pytest.importorskip("transformers")
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

SIZES = {"hidden_size": 16, "num_experts_per_tok": 3}
DEEPSEEK = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}


def clamped_swiglu(params, rows, product):
    """GPT-OSS's expert."""
    gate = product(rows, params["gate"], params["gate_bias"]).clamp(max=7.0)
    up = product(rows, params["up"], params["up_bias"]).clamp(-7.0, 7.0)
    return product((up + 1) * gate * (1.702 * gate).sigmoid(), params["down"], params["down_bias"])


def qwen3(normed):
    config = Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=12, norm_topk_prob=normed)
    return lambda: Qwen3MoeSparseMoeBlock(config), routers.top_k(3, renormalise="chosen" if normed else None)


BLOCKS = {
    "mixtral": (
        lambda: MixtralSparseMoeBlock(MixtralConfig(**SIZES, num_local_experts=8, intermediate_size=12)),
        routers.top_k(3, renormalise="chosen"),
    ),
    "qwen3-moe": qwen3(False),
    "qwen3-moe, normed": qwen3(True),
    "olmoe": (
        lambda: OlmoeSparseMoeBlock(OlmoeConfig(**SIZES, num_experts=8, intermediate_size=12)),
        routers.top_k(3),
    ),
    "deepseek-v3": (
        lambda: DeepseekV3MoE(DeepseekV3Config(**SIZES, **DEEPSEEK)),
        routers.top_k(3, score="sigmoid", renormalise="chosen", scale=2.5, groups=4, kept_groups=2),
    ),
    "gpt-oss": (
        lambda: GptOssMLP(GptOssConfig(**SIZES, num_local_experts=8, intermediate_size=12)),
        routers.top_k(3, renormalise="chosen"),
    ),
}


def params_of(block):
    """The layer's parameters as views of the block's own."""
    experts = block.experts
    if isinstance(block, GptOssMLP):  # gate and up take turns, and matrices are transposed
        both, bias = experts.gate_up_proj.mT, experts.gate_up_proj_bias
        found = {"gate": both[:, ::2], "up": both[:, 1::2], "gate_bias": bias[:, ::2], "up_bias": bias[:, 1::2]}
        found |= {"down": experts.down_proj.mT, "down_bias": experts.down_proj_bias}
        return {"router": {"weight": block.router.weight, "bias": block.router.bias}, "experts": found}
    gate, up = experts.gate_up_proj.chunk(2, 1)
    params = {"router": {"weight": block.gate.weight}, "experts": {"gate": gate, "up": up, "down": experts.down_proj}}
    if isinstance(block, DeepseekV3MoE):
        params["router"]["balance"] = block.gate.e_score_correction_bias
        shared = block.shared_experts
        params["shared"] = {name: getattr(shared, f"{name}_proj").weight for name in ("gate", "up", "down")}
    return params


def drawn(name):
    """A block with random parameters and buffers, its router, and a batch."""
    make, router = BLOCKS[name]
    block, generator = make(), torch.Generator().manual_seed(0)
    for tensor in (*block.parameters(), *block.buffers()):
        tensor.data.normal_(0, 0.4, generator=generator)
    return block, router, torch.randn(2, 9, 16, generator=generator)


@pytest.mark.parametrize("name", BLOCKS)
def test_outputs_and_gradients(name):
    block, router, x = drawn(name)
    config = sl.nn.MoEConfig(router, clamped_swiglu if name == "gpt-oss" else "swiglu")
    target = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    def theirs(x):
        y = block(x)
        return y[0] if isinstance(y, tuple) else y

    results = []
    for function in (theirs, lambda x: sl.nn.moe(params_of(block), x, config)[0]):
        given = x.clone().requires_grad_()
        y = function(given)
        leaves = [given, *block.parameters()]
        results.append([y.detach(), *torch.autograd.grad((y * target).sum(), leaves)])
    for mine, other in zip(*reversed(results)):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    assert all(other.abs().max() > 0.01 for other in results[0])  # the router's gradient too


def test_the_auxiliary_loss_of_several_layers():
    """transformers pools layers, and leaves out padding."""
    logits = torch.randn(2, 10, 4, generator=torch.Generator().manual_seed(0)) * 2
    mask = torch.ones(2, 5, dtype=torch.int64)
    mask[1, 3:] = 0
    for given in (None, mask):
        expected = load_balancing_loss_func(tuple(logits), 4, 2, given)
        experts = torch.cat([routers.top_k(2)(rows).experts for rows in logits])
        tokens = None if given is None else given.flatten().bool().repeat(2)
        found = routers.load_loss(logits.flatten(0, 1).softmax(1), experts, "sum", tokens)
        torch.testing.assert_close(found, expected)
