"""Defects of what steps leave out of layers."""

from ..planting import Defect

_DROP = "tests/training/test_layer_drop.py"
_TOKENS = "tests/training/test_token_drop.py"
_MESHES = f"{_DROP}::test_equal_to_a_loop_on_every_mesh"

DEFECTS = (
    Defect(
        "layers kept without scale",
        "scale",
        "nn/gate.py",
        "what a kept layer's branches add is not divided by the probability that it is kept",
        "else branch / self.keep",
        "else branch",
        (_MESHES,),
    ),
    Defect(
        "the first layers dropped most",
        "schedule",
        "plan/thinning.py",
        "the probability to be kept falls from the last layer to the first",
        "enumerate(self.layers, 1)}",
        "enumerate(reversed(self.layers), 1)}",
        (f"{_DROP}::test_the_schedule_over_depth",),
    ),
    Defect(
        "reductions of the trace counted with those left out",
        "order",
        "execute/record.py",
        "a step that leaves out units counts their reductions where it follows the trace",
        "count - gone[count]",
        "count",
        (f"{_DROP}::test_nothing_is_sent_for_what_is_left_out",),
    ),
    Defect(
        "zeros sent for layers left out",
        "reduction",
        "execute/gathering.py",
        "gradients of what a step leaves out are reduced as zeros",
        "if unit not in self.skipped] if order is not None and self.skipped else order",
        "if unit] if order is not None and self.skipped else order",
        (f"{_DROP}::test_nothing_is_sent_for_what_is_left_out",),
    ),
    Defect(
        "the same tokens in every layer",
        "key",
        "plan/thinning.py",
        "all layers draw tokens by one key",
        "draws.fold_in(number))",
        "draws.fold_in(0))",
        (f"{_TOKENS}::test_equal_to_a_loop_on_every_mesh",),
    ),
    Defect(
        "tokens drawn by the row in the micro-batch",
        "key",
        "execute/subset.py",
        "a sequence draws its tokens by its place in the micro-batch",
        "seed, first = key.stretch(rows)",
        "seed, first = key.seed, 0",
        (f"{_TOKENS}::test_a_sequence_draws_by_its_place_in_the_global_batch",),
    ),
    Defect(
        "more tokens counted than a sequence has",
        "factor",
        "plan/thinning.py",
        "a rate by layer-tokens counts as many as layers keep where sequences are shorter",
        "min(self.kept_at(step), length)",
        "self.kept_at(step)",
        ("tests/training/test_learning_with_less.py::test_layer_tokens_before_any_step",),
    ),
    Defect(
        "tokens in the order of their numbers",
        "order",
        "execute/subset.py",
        "the tokens that a layer sees are in the order in which they were drawn",
        ".indices.sort(dim=1).values",
        ".indices",
        (f"{_TOKENS}::test_tokens_are_drawn_without_replacement_in_order",),
    ),
    Defect(
        "the gradient of tokens that were put",
        "stale",
        "kernels/subset/op.py",
        "tokens in whose place others were put keep the gradient of what was put",
        "served.put(dy, index, None, dy.shape[1])",
        "dy.clone()",
        (f"{_TOKENS}::test_equal_to_a_loop_on_every_mesh",),
    ),
)
