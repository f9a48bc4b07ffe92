"""Defects of what compares plans."""

from ..planting import Defect

_PARTS = "tests/debug/test_parts_of_values.py"
_BISECT = "tests/debug/test_bisect.py"

DEFECTS = (
    Defect(
        "a second reading that numbers ranks from minor to major",
        "order",
        "debug/layout.py",
        "shards over two axes are compared with another rank's elements",
        "    for axis in axes:\n        found = found",
        "    for axis in reversed(axes):\n        found = found",
        (f"{_PARTS}::test_it_is_that_of_the_library_over_two_axes",),
    ),
    Defect(
        "differences of one sign",
        "mask",
        "debug/finding.py",
        "a value that is too small counts as right",
        "(a - b).abs())",
        "a - b)",
        (f"{_PARTS}::test_differences",),
    ),
    Defect(
        "residuals of before that are left out",
        "residual",
        "debug/reduction.py",
        "what a step before left out, and this one sends, counts as invented",
        "entered + join(before), left",
        "entered, left",
        (f"{_BISECT}::test_residuals_of_two_steps_are_no_finding",),
    ),
    Defect(
        "one device that draws for the first step",
        "stale",
        "debug/one_device.py",
        "one device leaves out at every step what the first one leaves out",
        "self._plan.step.drops(step, key)",
        "self._plan.step.drops(0, key)",
        (f"{_BISECT}::test_layers_and_tokens_are_left_out_by_the_same_draws[stage 3]",),
    ),
    Defect(
        "a payload of all layers",
        "bytes",
        "debug/check.py",
        "the bytes of a step are held against those of one that leaves out nothing",
        "planned.at_step(step, key)",
        "planned",
        ("tests/debug/test_check.py::test_a_step_sends_what_it_does_not_leave_out",),
    ),
    Defect(
        "any loss for a mean over rows",
        "mask",
        "debug/one_device.py",
        "a loss whose mean over micro-batches is not its value for the batch keeps all laws",
        "if found is None:\n        return OverRows(len(parts))",
        "if found is None or parts:\n        return OverRows(len(parts))",
        ("tests/debug/test_check.py::test_a_mean_over_different_numbers_of_targets_is_found",),
    ),
    Defect(
        "elements that nobody misses",
        "mask",
        "debug/codec_laws.py",
        "a codec that loses every second element keeps all laws",
        "if lost.any() and 2",
        "if lost.all() and 2",
        ("tests/debug/test_codec_laws.py::test_planted_codecs",),
    ),
)
