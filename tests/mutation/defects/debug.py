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
        "debug/difference.py",
        "a value that is too small counts as right",
        "(a - b).abs())",
        "a - b)",
        (f"{_PARTS}::test_differences",),
    ),
    Defect(
        "residuals of before that are left out",
        "residual",
        "debug/compressed.py",
        "what a step before left out, and this one sends, counts as invented",
        "entered + join(before), left",
        "entered, left",
        (f"{_BISECT}::test_residuals_of_two_steps_are_no_finding",),
    ),
)
