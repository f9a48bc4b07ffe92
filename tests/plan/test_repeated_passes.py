"""Predicted steps in which equal walks are computed once, against those in which every walk is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib as sl
from shardlib.plan.ops import Overhead, VirtualClock

PARAMS = [{"w": torch.empty(size, device="meta")} for size in (40, 1000, 1000, 1000, 1000, 300)]


def steps(plan, times):
    """The predicted step, and that without repeats; and how many walks each of them computed."""
    walks, found = [], []
    for repeated in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            counted, real = [], Overhead.take
            if not repeated:
                patch.setattr(VirtualClock, "again", lambda self, what, take: take())

            def counting(self, clock, counted=counted, real=real):
                counted.extend([1] * (self.of == "walk"))
                real(self, clock)

            patch.setattr(Overhead, "take", counting)
            found.append(sl.report.predict_step(plan, *times))
            walks.append(len(counted))
    return found, walks


@settings(max_examples=40)
@given(
    schedule=st.sampled_from(["1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "gpipe"]),
    stage=st.integers(0, 3),
    microbatches=st.integers(2, 12),
    forward=st.floats(1e-6, 1e3),
    rates=st.tuples(*[st.floats(1e-2, 1e3)] * 2),
)
def test_steps_take_as_long(schedule, stage, microbatches, forward, rates):
    chain = sl.chain(sl.zero(stage), sl.pipeline(schedule, microbatches))
    plan = sl.make_plan(PARAMS, sl.abstract_mesh(data=4, pipe=2), chain)
    seconds = {axis: 1000 / (rate * forward) for axis, rate in zip(("data", "pipe"), rates)}
    (once, each), _ = steps(plan, (forward, seconds))
    assert once.total == pytest.approx(each.total, rel=1e-9)
    assert once.ranks == pytest.approx(each.ranks, rel=1e-9)
    assert once.links == pytest.approx(each.links, rel=1e-9)


@pytest.mark.parametrize("stage", range(4))
def test_steady_walks_are_computed_once(stage):
    chain = sl.chain(sl.zero(stage), sl.pipeline("1f1b", 64))
    plan = sl.make_plan(PARAMS, sl.abstract_mesh(data=4, pipe=2), chain)
    (once, each), (few, all_walks) = steps(plan, (1.0, {"data": 1e5}))
    assert once.total == pytest.approx(each.total, rel=1e-9)
    assert all_walks == 2 * 2 * 64 and few < all_walks / 4


def test_a_link_that_falls_behind_is_waited_for():
    """Each micro-batch waits until the gradients of the one before are over the link."""
    chain = sl.chain(sl.zero(2), sl.pipeline("1f1b", 64))
    plan = sl.make_plan(PARAMS, sl.abstract_mesh(data=4, pipe=2), chain)
    (once, each), _ = steps(plan, (1.0, {"data": 1e3}))
    assert once.total == pytest.approx(each.total, rel=1e-9) and once.total > 64 * 1.0


def test_what_moves_to_another_memory_is_waited_for_walk_by_walk():
    chain = sl.chain(sl.zero(2), sl.offload(params="host", gradients="host"), sl.accumulate(8))
    plan = sl.make_plan(PARAMS, sl.abstract_mesh(data=4), chain)
    (once, each), (few, all_walks) = steps(plan, (1.0, {"down": 1e4, "up": 1e4}))
    assert once == each and few == all_walks == 16
