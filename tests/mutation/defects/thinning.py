"""Defects of what steps leave out of layers."""

from ..planting import Defect

_DROP = "tests/training/test_layer_drop.py"
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
)
