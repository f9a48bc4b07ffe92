"""Drawn cases of compression: gradients and parameters in few bits train as simulated, and send and hold what is planned."""

import optree
import pytest
import torch
from helpers import training
from helpers.lossless_codec import Travelling
from helpers.measure import SCALARS, count_payload, stored_bytes
from helpers.models import mlp, regression_batch, share
from helpers.trees import assert_close
from hypothesis import given, note
from hypothesis import strategies as st
from oracle import one_device
from test_properties import MAX_NORM, TOLERANCE, cases

import shardlib as sl
from shardlib.execute.batches import batch_index
from shardlib.optim import Sent, ZeroOneSteps


@st.composite
def encoded(draw, transforms):
    """Some axes of a chain's ZeROs; whether parameters can travel over them too."""
    zeros = [part for part in transforms if type(part).__name__ == "Zero"]
    axes = [
        (axis, zero.stage == 3 and axis in zero.axes) for zero in zeros for axis in (*zero.axes, zero.replicate) if axis
    ]
    return draw(st.lists(st.sampled_from(axes), unique=True))


@given(st.data())
def test_through_a_codec_that_loses_nothing_every_chain_trains_like_one_device(data):
    mesh, model, transforms, _, _, batches = data.draw(cases())
    codecs = [Travelling(axis, data.draw(st.booleans()) and split, 8) for axis, split in data.draw(encoded(transforms))]
    note(f"{mesh} {transforms} {codecs}")
    transform = sl.chain(*transforms, *codecs)
    got = training.simulate(mesh, model.loss_fn, model.params, batches, transform, training.optimizer(MAX_NORM))
    wanted = one_device.train(model.loss_fn, model.params, batches, max_norm=MAX_NORM)
    assert got[0] == pytest.approx(wanted[0], rel=TOLERANCE)
    assert got[1] == pytest.approx(wanted[1], rel=10 * TOLERANCE)
    assert_close(got[2], wanted[2], TOLERANCE)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("stages", [(0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (3, 3)])
@pytest.mark.parametrize("axis", ["a", "b"])
def test_one_of_two_axes_is_compressed(axis, stages, microbatches):
    fit, params = mlp([6, 9, 5])
    batches = [regression_batch(16, 6, 5, seed=seed) for seed in range(3)]
    zeros = [sl.zero(stage, axis=name) for stage, name in zip(stages, "ab")]
    transform = sl.chain(*zeros, Travelling(axis, itemsize=8), sl.accumulate(microbatches))
    got = training.simulate({"a": 2, "b": 2}, fit, params, batches, transform, training.optimizer(MAX_NORM))
    assert_close(got[2], one_device.train(fit, params, batches, max_norm=MAX_NORM)[2], TOLERANCE)


FORMS = st.sampled_from(["1 bit", "int8", "int4", "fp8"])


@st.composite
def in_few_bits(draw, transforms, dtype):
    """Transforms for some axes of a chain's ZeROs: how gradients, and parameters where they can, travel over each."""
    found = []
    for axis, split in draw(encoded(transforms)):
        narrow, feedback = dtype is torch.float32, draw(st.booleans())
        weights = draw(st.sampled_from([None, "int8", "fp8"])) if split and narrow else None
        gradients = draw(FORMS) if narrow else "1 bit"
        if gradients == "1 bit":
            found.append(sl.onebit(axis, draw(st.sampled_from(["leaf", 8, 24])), feedback=feedback))
        if weights or gradients != "1 bit":
            kept = None if gradients == "1 bit" else gradients
            found.append(sl.quantize(weights, kept, axis, block=draw(st.sampled_from([16, 32])), feedback=feedback))
    return found


def zero_one(axis):
    return sl.optim.zero_one_adam(1e-3, 1, axis=axis, local_step_scaler=1, local_step_clipper=2)


OWNERS = {
    "onebit_adam": (lambda axis: sl.optim.onebit_adam(1e-3, 1, axis=axis), [Sent.FULL, *3 * [Sent.ONE_BIT]]),
    "zero_one_adam": (
        zero_one,
        [ZeroOneSteps(1, local_step_scaler=1, local_step_clipper=2).sent(n) for n in (1, 2, 3, 4)],
    ),
}


@st.composite
def optimizers(draw, transforms, codecs):
    """An optimizer, at times with an axis of its own that nothing is split over, and what its steps send over it."""
    zeros = [part for part in transforms if type(part).__name__ == "Zero"]
    free = {zero.replicate for zero in zeros if zero.replicate} | {
        axis for zero in zeros if zero.stage == 0 for axis in zero.axes
    }
    free = sorted(free - {codec.axis for codec in codecs})
    name = draw(st.sampled_from([None, *OWNERS])) if free else None
    if name is None:
        return training.optimizer(MAX_NORM), 4 * [Sent.FULL]
    make, steps = OWNERS[name]
    return sl.optim.chain(sl.optim.clip_by_global_norm(MAX_NORM), make(draw(st.sampled_from(free)))), steps


def as_dtype(tree, dtype):
    """Floating leaves in another dtype; tied ones stay tied."""
    made = {}

    def cast(leaf):
        return made.setdefault(id(leaf), leaf.to(dtype) if leaf.is_floating_point() else leaf)

    return optree.tree_map(cast, tree)


def planned(plan, sent):
    """Payload by axis of a step whose optimizer sends this over its own axis."""
    recorded = plan.payload(owned=sent is not Sent.FULL)
    if sent is Sent.NOTHING and plan.reductions.owner.axis in recorded:
        recorded[plan.reductions.owner.axis] -= sum(channel.payload for channel in plan.channels if channel.mean)
    return recorded


@given(st.data())
def test_bytes_sent_and_remembered_are_what_the_plan_says(data):
    mesh, model, transforms, _, _, batches = data.draw(cases())
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    codecs = data.draw(in_few_bits(transforms, dtype))
    tx, steps = data.draw(optimizers(transforms, codecs))
    donate, params, transform = data.draw(st.booleans()), as_dtype(model.params, dtype), sl.chain(*transforms, *codecs)
    note(f"{mesh} {transforms} {codecs} {tx.owns}")
    abstract = sl.abstract_mesh(**mesh)
    part = share(batches[0], 0, sl.make_plan(params, abstract, transform, optimizer=tx).batch_ranks)
    plan = sl.make_plan(params, abstract, transform, loss_fn=model.loss_fn, batch=part, optimizer=tx)

    def run(mesh):
        sharded = sl.shard(params, mesh, transform)
        mine = share(batches[0], batch_index(sharded.plan, mesh), sharded.plan.batch_ranks)
        state, step = sl.make_train_step(model.loss_fn, sharded, tx, donate=donate)
        sent, recorded = count_payload(mesh, scalars=0), []
        for _ in steps:
            state, _ = step(state, mine)
            recorded.append((sent(), stored_bytes(state.comm), stored_bytes(state.opt, counters=True)))
        assert {leaf.path: leaf.local_bytes(plan.sizes) for leaf in plan.residuals} == {
            name: error.nbytes for name, error in state.comm.items()
        }
        return recorded

    for recorded in sl.simulate(run, mesh=mesh):
        for kind, (sent, remembered, held) in zip(steps, recorded, strict=True):
            wanted = planned(plan, kind)
            # Beside the payload every step sums some numbers of 8 bytes.
            assert sent == {
                axis: count + 2 * 8 * SCALARS * (mesh[axis] - 1) // mesh[axis] for axis, count in wanted.items()
            }
            assert remembered == plan.bytes("comm")
            assert held == plan.bytes("optimizer")
