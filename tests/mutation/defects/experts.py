"""Defects of layers of experts."""

from ..planting import Defect

_ROUTERS, _LAYER = "tests/nn/test_routers.py", "tests/nn/test_moe.py"
_DEALT = "tests/training/test_experts.py"
_PRODUCTS = "tests/kernels/test_kernels_grouped_matmul.py"

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
        'Visit(params["experts"], flat, ',
        'Visit(params["experts"], _jittered(flat, config.jitter, tokens_of(x, rng)), ',
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
        "only one axis of experts is complete",
        "axis",
        "transforms/experts.py",
        "gradients of experts over two axes are summed over the inner one",
        "varying=self.axes)",
        "varying=self.axes[:1])",
        (f"{_DEALT}::test_beside_other_transforms[two hops]",),
    ),
    Defect(
        "tokens stay where they are",
        "skip",
        "execute/executor.py",
        "the plan's exchange of tokens does not reach the loss",
        "tiled, plan.step.tokens)",
        "tiled, None)",
        (f"{_DEALT}::test_stages",),
    ),
    Defect(
        "biases of other experts",
        "offset",
        "nn/moe/compute.py",
        "rows are taken to end one later, so that an expert's first row has the bias of the one before",
        "rows, right=True)",
        "rows - 1, right=True)",
        (f"{_LAYER}::test_a_loop_over_tokens",),
    ),
    Defect(
        "slices of experts count from the stack",
        "axis",
        "collectives/styles/layer.py",
        "a layer of experts is cut along the dimension before",
        "return first + self.dim_of_layer(",
        "return self.dim_of_layer(",
        (f"{_DEALT}::test_slices_of_whole_experts",),
    ),
)
