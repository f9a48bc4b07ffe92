"""Whatever is drawn: gradients and parameters in few bits train as they must, and send and hold what the plan says."""

import pytest
from helpers import training
from helpers.exact import Travelling
from helpers.models import mlp, regression_batch
from helpers.trees import assert_close
from hypothesis import given, note
from hypothesis import strategies as st
from oracle import one_device
from test_properties import MAX_NORM, TOLERANCE, cases

import shardlib as sl


@st.composite
def encoded(draw, transforms):
    """Some axes of a chain's ZeROs; whether parameters can travel over them too."""
    zeros = [part for part in transforms if type(part).__name__ == "Zero"]
    axes = [
        (axis, zero.stage == 3 and axis == zero.axis) for zero in zeros for axis in (zero.axis, zero.replicate) if axis
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
