"""Defects of states and parameters in other memories than the device's."""

from ..planting import Defect

_OFFLOAD = "tests/training/test_offload.py"
_MODES = "tests/training/test_offload_modes.py"
_SAME = f"{_OFFLOAD}::test_training_is_the_same_to_the_last_bit"

DEFECTS = (
    Defect(
        "a clip left out of updates by bucket",
        "factor",
        "optim/updates.py",
        "where buckets are updated one by one, gradients are not clipped",
        "return self._optimizer.lead(grads, factor, shards) if self._separate else factor",
        "return factor",
        (f"{_SAME}[stage 1, fp16]",),
    ),
    Defect(
        "states of the last buckets on the device",
        "order",
        "plan/bucketing.py",
        "of a share, the buckets whose gradients come first stay on the device",
        "middle > (1 - at.share) * whole[bucket.homes]",
        "middle < at.share * whole[bucket.homes]",
        (f"{_OFFLOAD}::test_states_lie_where_the_plan_says",),
    ),
    Defect(
        "states joined from the first bucket alone",
        "stale",
        "optim/separate.py",
        "counters are those of the first bucket, and moments of the others are lost",
        "merged = {name: leaf for node in nodes for name, leaf in node.items()}",
        "merged = {name: leaf for node in nodes[:1] for name, leaf in node.items()}",
        (f"{_SAME}[one device]",),
    ),
    Defect(
        "an update ahead that is not undone",
        "stale",
        "optim/ahead.py",
        "where gradients turn out to be clipped, updates made without the clip are kept",
        "if not _equal(factor, self._factor):",
        "if factor is None and self._factor is not None:",
        (f"{_SAME}[stage 1, fp16]",),
    ),
    Defect(
        "an update ahead in the memory of a state that is kept",
        "aliasing",
        "optim/ahead.py",
        "with donate=False a later step writes into an old state",
        "        if self._donates:\n            self._spare",
        "        if True:\n            self._spare",
        (f"{_MODES}::test_a_step_that_raises_or_is_repeated_finds_the_state_as_it_was",),
    ),
    Defect(
        "an update ahead that reads the memory it writes",
        "stale",
        "optim/optimizers/adam.py",
        "an update beside the computation starts from what is left in its memory, not from the step's state",
        "copy=separate_copy(copy, p), old=values)",
        "copy=separate_copy(copy, p))",
        (f"{_SAME}[stage 1, fp16]",),
    ),
    Defect(
        "delayed gradients without their clip",
        "factor",
        "optim/updates.py",
        "a delayed update leaves out the factor of its step",
        "factor = scalar(1.0, self._numbers) if factor is None else factor\n",
        "factor = scalar(1.0, self._numbers)\n",
        (f"{_MODES}::test_delayed_gradients_are_those_of_the_oracle",),
    ),
    Defect(
        "a delayed update that is made twice",
        "order",
        "optim/updates.py",
        "after a skipped step the gradients before it are applied again",
        "self._delayed(pending, grads, factor) if taken else _applied(pending)",
        "self._delayed(pending, grads, factor) if taken else pending",
        (f"{_MODES}::test_delayed_gradients_are_those_of_the_oracle",),
    ),
    Defect(
        "parameters written before all updates ahead are made",
        "order",
        "optim/updates.py",
        "an update that fails on the thread leaves some parameters new and others old",
        'raise RolledBack(error_of(failure, problems, "the step was not made"))',
        "pass",
        (f"{_MODES}::test_an_update_that_fails_on_one_rank_is_made_on_none",),
    ),
    Defect(
        "gradients that wait beside a checkpoint without any",
        "stale",
        "checkpoint/restore.py",
        "what another run left pending is applied to what was restored",
        "            trees.opt.pending.due.zero_()\n",
        "            pass\n",
        (f"{_MODES}::test_a_checkpoint_without_pending_gradients_begins_delayed_updates",),
    ),
)
