"""Defects of profiles."""

from ..planting import Defect

_PROFILE = "tests/report/test_profile.py"

DEFECTS = (
    Defect(
        "scores that are nobody's",
        "count",
        "execute/counting.py",
        "the scores that fused attention computes again in backward are taken for operations of the model",
        "_scores_again(operator, args, done) if attends",
        "0 if attends",
        ("tests/report/test_flops.py::test_selective_recompute",),
    ),
    Defect(
        "a part that hands on its result",
        "order",
        "report/profile/recording.py",
        "a part's backward is that of nobody where the next part was given its very result",
        "[x for x in given if not self._met(x)]",
        "given",
        ("tests/report/test_profile_of_modules.py::test_operations_by_part",),
    ),
    Defect(
        "time counted twice",
        "sum",
        "report/profile/timeline.py",
        "a part's own time holds that of the parts of its parts",
        "own[around[-1]] -= end - start",
        "own[around[0]] -= end - start",
        (f"{_PROFILE}::test_own_times_of_nested_parts",),
    ),
    Defect(
        "bytes since the step began",
        "sum",
        "report/profile/exchanges.py",
        "each exchange has the bytes of all before it too",
        "        self._before = sent\n",
        "",
        (f"{_PROFILE}::test_times_add_up_and_bytes_are_the_plans",),
    ),
    Defect(
        "freed by nobody",
        "memory",
        "report/profile/memory.py",
        "a named value is added under its new name and stays under the old one",
        "self._change(before, -count, part), self._change(after, count, part)",
        "self._change(after, count, part)",
        ("tests/report/test_memory_by_name.py::test_every_byte_has_a_name",),
    ),
    Defect(
        "a group's weight for all of it",
        "count",
        "execute/counting.py",
        "a convolution's backward is counted for each of its groups as for all of them",
        "math.prod(positions) * weight.numel()",
        "math.prod(positions) * weight.numel() * more[6]",
        ("tests/report/test_flops.py::test_a_convolutions_backward_does_its_product_for_each_gradient",),
    ),
    Defect(
        "a teacher that does nothing",
        "count",
        "common/_compat.py",
        "what inference_mode computes by composite operators is not counted",
        "if torch.is_inference_mode_enabled():",
        "if False:",
        ("tests/report/test_flops.py::test_a_teacher_in_inference_mode_counts",),
    ),
)
