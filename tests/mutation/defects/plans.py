"""Defects of plans: what is reduced, where elements lie, what is counted, how a step is predicted."""

from ..planting import Defect

_SAME = "tests/training/test_same_training.py"
_HYBRID = (f"{_SAME}::test_hybrid",)
_PLAIN = f"{_SAME}::test_every_stage_and_number_of_ranks"
_PIPELINE = "tests/training/test_pipeline.py"
_SEQUENCE = "tests/training/test_sequence.py"
_BYTES = "tests/training/test_bytes.py"

DEFECTS = (
    Defect(
        "an all-reduce counted once",
        "bytes",
        "plan/exchanges.py",
        "the plan tells half of what an all-reduce sends",
        "times = 2 if self.op is Op.SUM else 1",
        "times = 1",
        (f"{_BYTES}::test_payload_of_units_touched_once_equals_the_papers",),
    ),
    Defect(
        "one axis reduced twice",
        "axis",
        "plan/exchanges.py",
        "gradients are summed over the first axis of copies once for each, and over the others never",
        "axes = (*bucket.axes, *bucket.replicas)",
        "axes = (*bucket.axes, *bucket.replicas[:1] * len(bucket.replicas))",
        _HYBRID,
    ),
    Defect(
        "padding taken for elements",
        "offset",
        "plan/buckets.py",
        "what pads a leaf's last chunk counts as the leaf's",
        "min(max(numel - owner * chunk, 0), chunk)",
        "chunk",
        ("tests/optim/test_optimizers_on_meshes.py::test_noise_leaves_padding_zero",),
    ),
    Defect(
        "owners numbered from minor to major",
        "order",
        "plan/buckets.py",
        "over two axes a rank works on another's chunk",
        "in zip(self.axes[start:stop], self.sizes[start:stop]):",
        "in zip(self.axes[start:stop][::-1], self.sizes[start:stop][::-1]):",
        (f"{_SAME}::test_split_over_two_axes",),
    ),
    Defect(
        "tied gradients planned whole",
        "bytes",
        "plan/exchanges.py",
        "the plan tells the whole gradient for what homes of a tied leaf send",
        "bucket.size(bucket.levels) * bucket.reduce_dtype",
        "bucket.size(0) * bucket.reduce_dtype",
        (f"{_PIPELINE}::test_bytes_held_and_sent_are_the_plans",),
    ),
    Defect(
        "a link does several things at once",
        "bytes",
        "plan/prediction/rank.py",
        "the predicted time of a step has messages over one link go beside each other",
        "max(ready, self._free.get(link, 0.0)) + seconds",
        "ready + seconds",
        ("tests/plan/test_step_time.py::test_a_slow_link_dominates",),
    ),
    Defect(
        "a host taken for one rank's",
        "bytes",
        "plan/tiers/limits.py",
        "ranks that share a host's memory are each planned to have all of it",
        "sharing = min(ranks, self.ranks_per_host)",
        "sharing = 1",
        ("tests/plan/test_tiers.py::test_every_memory_that_does_not_fit_is_named",),
    ),
    Defect(
        "the first change that fits",
        "choice",
        "plan/tiers/remedies.py",
        "a refusal names a change that fits, and not the cheapest",
        "best = min(fitting, key=lambda candidate: candidate.seconds)",
        "best = max(fitting, key=lambda candidate: candidate.seconds)",
        ("tests/plan/test_tiers.py::test_the_cheapest_change_is_named_and_fits",),
    ),
    Defect(
        "a way up beside the way down",
        "time",
        "plan/prediction/rank.py",
        "inputs of blocks are predicted to come back before they have left",
        "max(self.now, self._kept.get(units[0], 0.0))",
        "self.now",
        ("tests/plan/test_times_of_offload.py::test_inputs_of_blocks_go_down_and_come_back",),
    ),
    Defect(
        "parts of a sequence are not summed",
        "reduction",
        "plan/bucketing.py",
        "gradients are those of a rank's own positions",
        "return sums if sequence.axis in (*slices, *sums) else (*sums, sequence.axis)",
        "return sums",
        (f"{_SEQUENCE}::test_every_stage[ulysses-0]",),
    ),
    Defect(
        "experts are summed",
        "axis",
        "plan/bucketing.py",
        "gradients of what differs along an axis are summed over it",
        "if axis not in (*kind.axes, *kind.varying)",
        "if axis not in kind.axes",
        ("tests/plan/test_claims.py::test_experts_train_like_one_device",),
    ),
    Defect(
        "what slices share is not summed",
        "reduction",
        "plan/bucketing.py",
        "the gradient of a leaf of the style 'shared' is a rank's own part",
        "if placement.style and placement.style.sums else ()",
        "if placement.style and not placement.style.sums else ()",
        ("tests/transforms/test_tensor_slicing.py::test_a_leaf_that_slices_use_whole",),
    ),
    Defect(
        "later micro-batches add nothing",
        "accumulation",
        "plan/buckets.py",
        "later micro-batches add nothing to the leaves of a bucket",
        "add_to_each_([column for column, _ in present]",
        "add_to_each_([column.clone() for column, _ in present]",
        (f"{_SAME}::test_micro_batches_after_the_first_are_summed_without_packing", _PLAIN),
    ),
    Defect(
        "gradients summed in 16 bits",
        "numerics",
        "plan/placing.py",
        "gradients of 16-bit parameters are added up in 16 bits",
        'resolved.everywhere("dtype") or torch.float32',
        'resolved.everywhere("dtype") or dtype',
        ("tests/transforms/test_mixed_precision.py::test_gradients_are_summed_in_the_dtype_asked_for",),
    ),
)
