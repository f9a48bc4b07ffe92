"""Defects of random keys: what they are folded with."""

from ..planting import Defect

_PIPELINE = "tests/training/test_pipeline.py"
_SEQUENCE = "tests/training/test_sequence.py"
_RNG = "tests/test_rng.py"

DEFECTS = (
    Defect(
        "a step taken again draws on",
        "key",
        "execute/step.py",
        "torch's generators are not set back when a step is taken again",
        "restore_generators(draws)",
        "pass",
        ("tests/execute/test_uneven_use.py::test_torch_draws_the_same_when_a_step_is_taken_again",),
    ),
    Defect(
        "positions that begin anew on every rank",
        "key",
        "execute/sequence.py",
        "dropout draws the same for every part of a sequence",
        "[torch.arange(start, start + length, device=x.device)",
        "[torch.arange(0, length, device=x.device)",
        (
            f"{_SEQUENCE}::test_dropout_is_that_of_the_whole_sequence",
            f"{_RNG}::test_the_mask_of_a_sequence_part_is_a_part_of_the_mask",
        ),
    ),
    Defect(
        "a key without the rank",
        "key",
        "execute/stages/one.py",
        "all ranks drop out the same elements of their shares",
        "first = batch_index(plan, mesh) * len(",
        "first = 0 * len(",
        (f"{_RNG}::test_a_gpt_with_dropout_trains_the_same_on_every_mesh",),
    ),
    Defect(
        "a key without the micro-batch",
        "key",
        "execute/stages/one.py",
        "all micro-batches drop out the same elements",
        "rng.at_slot(first + index)",
        "rng.at_slot(first)",
        (f"{_RNG}::test_a_gpt_with_dropout_trains_the_same_on_every_mesh",),
    ),
    Defect(
        "a key without the step",
        "key",
        "train.py",
        "all steps drop out the same elements",
        "state.rng.fold_in(state.step)",
        "state.rng",
        (f"{_RNG}::test_each_step_draws_anew",),
    ),
    Defect(
        "a key without the layer",
        "key",
        "models/gpt.py",
        "all layers drop out the same elements",
        "key = rng.fold_in(i) if rng is not None else None\n        x, routed = block",
        "key = rng\n        x, routed = block",
        ("tests/models/test_gpt.py::test_every_dropout_has_a_key_of_its_own",),
    ),
    Defect(
        "a key without the block",
        "key",
        "nn/blocks.py",
        "all blocks of a sequential draw the same",
        "rng.fold_in(index) if rng is not None else None",
        "rng",
        ("tests/models/test_gpt.py::test_every_dropout_has_a_key_of_its_own",),
    ),
    Defect(
        "torch's generators without the share",
        "key",
        "rng.py",
        "torch's own dropout draws the same for every share of the batch",
        'key.fold_in(f"torch at {key.slot}")',
        'key.fold_in("torch")',
        (f"{_RNG}::test_torchs_own_dropout_follows_the_key_and_the_share_of_the_batch",),
    ),
    Defect(
        "a fraction of a slot draws as the first",
        "key",
        "rng.py",
        "shares of unequal rows draw what others do",
        'self.fold_in(f"slot {self.slot}").seed, 0',
        "self.seed, 0",
        (f"{_RNG}::test_shares_of_unequal_rows_draw_different_numbers",),
    ),
    Defect(
        "unequal micro-batches with one key",
        "key",
        "execute/stages/one.py",
        "micro-batches of different sizes begin at the same row",
        "starts = [first + sum(rows[:index]) for index in range(len(rows))]",
        "starts = [first for index in range(len(rows))]",
        (f"{_PIPELINE}::test_dropout_draws_what_one_device_draws",),
    ),
)
