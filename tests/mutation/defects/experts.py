"""Defects of layers of experts."""

from ..planting import Defect

_ROUTERS, _LAYER = "tests/nn/test_routers.py", "tests/nn/test_moe.py"
_RELAYOUT = "tests/training/test_relayout.py"

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
        "experts that come from where they go",
        "order",
        "checkpoint/relayout/verbs.py",
        "rows move by the inverse permutation, which for two that change places is the same",
        "rows[after] = before",
        "rows[before] = after",
        (f"{_RELAYOUT}::test_stages",),
    ),
    Defect(
        "residuals that stay behind",
        "stale",
        "checkpoint/relayout/tensors.py",
        "what a gradient of an expert left out is added to that of the expert in its old row",
        "yield from self._residuals()",
        "",
        (f"{_RELAYOUT}::test_compressed_exchanges_keep_their_residuals",),
    ),
    Defect(
        "moments that stay behind",
        "stale",
        "checkpoint/relayout/tensors.py",
        "parameters move, and what the optimizer keeps for them does not",
        "yield prefix, subset, tensor, subset.levels",
        "pass",
        (f"{_RELAYOUT}::test_stages",),
    ),
    Defect(
        "counts in the order of seats",
        "order",
        "nn/moe/routing.py",
        "a layer's rows are cut by the counts of other experts",
        "scatter_(0, seats, self.counts)",
        "copy_(self.counts[seats])",
        ("tests/nn/test_seats.py::test_seats_of_choices_that_are_none",),
    ),
    Defect(
        "the last axis first",
        "offset",
        "checkpoint/relayout/journey.py",
        "an element that goes along two axes is taken to have gone along the second already",
        "before = *move.target[:k], *move.source[k:]",
        "before = *move.source[:k], *move.target[k:]",
        (f"{_RELAYOUT}::test_the_payload_is_what_leaves_a_rank",),
    ),
)
