"""Defects of layers of experts."""

from ..planting import Defect

_ROUTERS, _LAYER = "tests/nn/test_routers.py", "tests/nn/test_moe.py"

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
)
