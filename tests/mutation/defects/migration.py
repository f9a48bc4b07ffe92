"""Defects of configurations that are read, and of loops of other libraries around the step."""

from ..planting import Defect

_TRAINER = "tests/integrations/test_transformers.py"
_LIGHTNING = "tests/integrations/test_lightning.py"
_BATCHES = "tests/execute/test_batches.py"

DEFECTS = (
    Defect(
        "absent micro-batches weigh",
        "weight",
        "integrations/waiting.py",
        "what stands for an epoch's missing micro-batches counts as the others do",
        "(False, parts[0])",
        "(True, parts[0])",
        (f"{_TRAINER}::test_it_trains_and_logs_as_transformers_does[usual]",),
    ),
    Defect(
        "a classifier's mean by its targets",
        "weight",
        "integrations/transformers.py",
        "an own loss, which is a mean over a micro-batch, is weighed by its targets",
        "if by_tokens and tokens is not None:",
        "if tokens is not None:",
        (f"{_TRAINER}::test_it_trains_and_logs_as_transformers_does[own loss]",),
    ),
    Defect(
        "one rate for all groups",
        "index",
        "integrations/lightning.py",
        "every group of an optimizer is stepped at the first one's rate",
        'optimizer.param_groups[number]["lr"]',
        'optimizer.param_groups[0]["lr"]',
        (f"{_LIGHTNING}::test_it_trains_and_logs_as_lightning_does[adamw]",),
    ),
    Defect(
        "micro-batches fewer than planned",
        "check",
        "execute/batches.py",
        "a batch that is cut already may lack micro-batches, and the mean is of those that there are",
        "    if len(parts) != n:",
        "    if len(parts) > n:",
        (f"{_BATCHES}::test_micro_batches_that_are_cut_already_may_have_other_shapes[0]",),
    ),
    Defect(
        "norms decay",
        "mask",
        "migration/training_arguments.py",
        "weight decay reaches parameters that transformers leaves alone",
        'lambda path, shape: "decayed" if path in decayed else "plain"',
        'lambda path, shape: "decayed" if path in decayed or "norm" in path else "plain"',
        (f"{_TRAINER}::test_it_trains_and_logs_as_transformers_does[usual]",),
    ),
)
