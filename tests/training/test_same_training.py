"""Twenty steps of AdamW with clipping on a GPT: every stage and mesh trains like one device."""

import functools

import pytest
import torch
from helpers import training
from helpers.models import tiny_gpt, token_batches
from helpers.trees import assert_close, relative_error
from oracle import one_device, plain

import shardlib as sl
from shardlib.common import thresholds
from shardlib.plan import buckets as layout

STEPS = 20
MAX_NORM = 0.3  # acts in some of the steps
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}

STAGES = pytest.mark.parametrize(("stage", "prefetch"), [(0, True), (1, True), (2, True), (3, True), (3, False)])
MICROBATCHES = pytest.mark.parametrize("microbatches", [1, 4])


@functools.cache
def expected(dtype):
    loss_fn, params = tiny_gpt(dtype)
    losses, norms, final = one_device.train(loss_fn, params, token_batches(STEPS), max_norm=MAX_NORM)
    assert min(norms) < MAX_NORM < max(norms), "clipping must act in some steps and not in others"
    return losses, norms, final


def check(dtype, mesh, transform):
    loss_fn, params = tiny_gpt(dtype)
    losses, norms, final = training.simulate(
        mesh, loss_fn, params, token_batches(STEPS), transform, training.optimizer(MAX_NORM)
    )
    wanted = expected(dtype)
    assert losses == pytest.approx(wanted[0], rel=TOLERANCE[dtype], abs=0)
    assert norms == pytest.approx(wanted[1], rel=TOLERANCE[dtype] * 10, abs=0)
    assert_close(final, wanted[2], TOLERANCE[dtype])


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", TOLERANCE)
@MICROBATCHES
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@STAGES
def test_every_stage_and_number_of_ranks(stage, ranks, microbatches, prefetch, dtype):
    transform = sl.chain(sl.zero(stage, prefetch=prefetch), sl.accumulate(microbatches))
    check(dtype, {"data": ranks}, transform)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", TOLERANCE)
@MICROBATCHES
@STAGES
def test_hybrid(stage, microbatches, prefetch, dtype):
    zero = sl.zero(stage, axis="local", replicate="node", prefetch=prefetch)
    check(dtype, {"node": 2, "local": 2}, sl.chain(zero, sl.accumulate(microbatches)))


@pytest.mark.parametrize("keep", ["forward", "6kB"])
def test_what_stays_gathered_changes_no_bit(keep):
    loss_fn, params = tiny_gpt()

    def run(keep):
        transform = sl.chain(sl.zero(3, keep=keep), sl.accumulate(2))
        mesh, batches = {"data": 2}, token_batches(3)
        return training.simulate(mesh, loss_fn, params, batches, transform, training.optimizer(MAX_NORM))

    (*numbers, kept), (*expected, plain) = run(keep), run(None)
    assert numbers == expected and relative_error(kept, plain)[0] == 0


@pytest.mark.parametrize("stages", [(1, 1), (3, 1), (2, 2), (3, 3)])
def test_split_over_two_axes(stages):
    """A rank's number among the owners is that of its coordinates, the first axis major."""
    transform = sl.chain(*(sl.zero(stage, axis=axis) for stage, axis in zip(stages, "ab")))
    check(torch.float64, {"a": 2, "b": 3}, transform)


ALONE = [
    ({"data": 2}, sl.zero(1)),
    ({"data": 2}, sl.chain(sl.zero(2), sl.accumulate(2))),
    ({"data": 3}, sl.zero(3)),
    ({"data": 4}, sl.chain(sl.zero(3), sl.accumulate(4, sync="last"))),
    ({"node": 2, "local": 2}, sl.chain(sl.zero(3, axis="local", replicate="node"), sl.accumulate(2))),
    ({"node": 2, "local": 2}, sl.chain(sl.zero(3, axis="local"), sl.zero(1, axis="node"))),
]


@pytest.mark.parametrize(("mesh", "transform"), ALONE)
def test_large_leaves_are_sent_alone(mesh, transform):
    """Large leaves are messages of their own; here nearly all count as large, and the smallest go together."""
    with thresholds.small(8):
        check(torch.float64, mesh, transform)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("ways", "copies", "microbatches"), [(1, 1, 1), (3, 1, 4), (2, 2, 2)])
def test_the_plain_implementation_trains_like_one_device_too(stage, ways, copies, microbatches):
    loss_fn, params = tiny_gpt(torch.float64)
    losses, ranks, _ = plain.train(
        loss_fn, params, token_batches(STEPS), stage=stage, ways=ways, copies=copies,
        microbatches=microbatches, max_norm=MAX_NORM,
    )  # fmt: skip
    wanted = expected(torch.float64)
    assert losses == pytest.approx(wanted[0], rel=1e-10, abs=0)
    for final in ranks:
        assert_close(final, wanted[2], 1e-10)


@pytest.mark.parametrize("stage", [0, 1])
def test_micro_batches_after_the_first_are_summed_without_packing(stage, monkeypatch):
    packed = []
    pack = layout.Bucket.pack
    monkeypatch.setattr(layout.Bucket, "pack", lambda bucket, *args: packed.append(bucket.name) or pack(bucket, *args))
    loss_fn, params = tiny_gpt(torch.float64)
    transform = sl.chain(sl.zero(stage), sl.accumulate(3))
    training.simulate({"data": 1}, loss_fn, params, token_batches(1), transform, training.optimizer())
    assert packed and len(packed) == len(set(packed))
