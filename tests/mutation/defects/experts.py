"""Defects of layers of experts."""

from ..planting import Defect

_ROUTERS, _LAYER = "tests/nn/test_routers.py", "tests/nn/test_moe.py"
_PRODUCTS = "tests/kernels/test_kernels_grouped_matmul.py"
_GPT = "tests/models/test_gpt_experts.py"

DEFECTS = (
    Defect(
        "a recomputed block routes anew",
        "stale",
        "execute/activations/checkpointing.py",
        "decisions of a block's first run are not kept for its recomputation",
        "decided_once(draws.repeated(fn), RECOMPUTE_MODES)",
        "draws.repeated(fn)",
        ("tests/nn/test_once.py::test_decisions_are_made_once",),
    ),
    Defect(
        "one token above capacity",
        "mask",
        "nn/moe/capacity.py",
        "an expert keeps one assignment more than it has room for",
        "(rank < self.of(",
        "(rank <= self.of(",
        (f"{_ROUTERS}::test_gates_with_masks",),
    ),
    Defect(
        "jitter that reaches the experts",
        "numerics",
        "nn/moe/layer.py",
        "experts compute from the router's noisy input",
        "inputs = permute(flat, ",
        "inputs = permute(_jittered(flat, config.jitter, tokens_of(x, rng)), ",
        (f"{_LAYER}::test_jitter_is_of_the_routers_input_alone",),
    ),
    Defect(
        "a router without a gradient",
        "reduction",
        "nn/moe/routers/top_k.py",
        "outputs are right, and weights that are not renormalised have no gradient",
        "chosen = scores.gather(1, experts)",
        "chosen = scores.detach().gather(1, experts)",
        (f"{_LAYER}::test_a_loop_over_tokens",),
    ),
    Defect(
        "a sum that is cut begins anew",
        "numerics",
        "kernels/grouped_matmul/product.h",
        "products over more numbers than are packed at a time lose the first of them",
        "deep, number > 0, sums)",
        "deep, false, sums)",
        (f"{_PRODUCTS}::test_products_of_several_blocks",),
    ),
    Defect(
        "a transposed matrix read as it is not",
        "offset",
        "kernels/grouped_matmul/cpu.py",
        "products with transposed matrices read them row by row",
        "weight.stride(1 if along else 2), int(along)",
        "weight.stride(1 if along else 2), 1",
        (f"{_PRODUCTS}::test_products_of_several_blocks",),
    ),
    Defect(
        "padding that is routed",
        "mask",
        "nn/moe/routers/base.py",
        "tokens that a mask leaves out go to experts, and are counted",
        "wanted = wanted & mask[:, None]",
        "wanted = wanted.clone()",
        (f"{_GPT}::test_padding_goes_to_no_expert_and_is_in_no_loss",),
    ),
    Defect(
        "auxiliary losses that are divided by the tokens",
        "factor",
        "models/experts.py",
        "where the loss is a mean over tokens, auxiliary losses are added to its total as they are",
        "extra * loss.weight",
        "extra",
        (f"{_GPT}::test_padding_goes_to_no_expert_and_is_in_no_loss",),
    ),
    Defect(
        "every rank moves the first shard of a bias",
        "offset",
        "sharded/shard.py",
        "a whole tensor's shard is its first elements on all ranks",
        "shard_of(whole, placement.compute.spec, mesh.shape, mesh.coords), mesh, bucket)",
        "whole.reshape(-1)[: len(flat)].repeat(64), mesh, bucket)",
        (f"{_GPT}::test_balance_without_a_loss",),
    ),
    Defect(
        "a shared expert that speaks at once",
        "numerics",
        "models/upcycle.py",
        "an upcycled model's shared expert does not begin with an output of 0",
        'torch.zeros_like(fresh["shared"]["down"])',
        'fresh["shared"]["down"]',
        ("tests/models/test_upcycle.py::test_the_dense_models_function",),
    ),
    Defect(
        "a teacher that goes on",
        "stale",
        "models/students.py",
        "a teacher is computed after the schedule has left it",
        "if weight:",
        "if weight is not None:",
        ("tests/models/test_students.py::test_without_weight_the_teacher_is_not_computed",),
    ),
)
