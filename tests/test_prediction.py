"""Predicted step times against closed forms of the overlap."""

import pytest
import torch

import shardlib as sl
from shardlib.errors import IllegalComposition, MeshError
from shardlib.models import gpt

UNITS, NUMEL, RANKS = 4, 1000, 4
BYTES = NUMEL * 4
PARAMS = {"blocks": [{"w": torch.zeros(NUMEL)} for _ in range(UNITS)]}
SHARE = BYTES * (RANKS - 1) // RANKS  # what a rank sends of one unit


def predicted(transform, forward, rate, mesh=None, **options):
    plan = sl.make_plan(PARAMS, sl.abstract_mesh(**(mesh or {"data": RANKS})), transform)
    return sl.predict_step(plan, forward, {"data": rate}, **options)


@pytest.mark.parametrize("stage", range(4))
def test_without_links_a_step_is_what_it_computes(stage):
    plan = sl.make_plan(PARAMS, sl.abstract_mesh(data=RANKS), stage=stage)
    found = sl.predict_step(plan, 2.0, {}, backward=1.5, update=0.25)
    assert found.total == pytest.approx(2 * 2.5 + 0.25) and found.exposed == pytest.approx(0) and found.links == {}


@pytest.mark.parametrize(("stage", "volumes"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_a_slow_link_is_all_that_counts(stage, volumes):
    """Computing takes no time: every byte the plan counts, one after the other."""
    found = predicted(sl.zero(stage), 0.0, 1.0)
    assert found.total == found.links["data"] == volumes * UNITS * SHARE
    plan = sl.make_plan(PARAMS, sl.abstract_mesh(data=RANKS), stage=stage)
    assert found.total == plan.payload()["data"]


def test_stage_0_hides_all_but_the_last_reduction():
    """Each reduction takes as long as a unit's backward: the last one alone is waited for."""
    seconds = 1.0
    found = predicted(sl.zero(0), UNITS * seconds, 2 * SHARE / (2 * seconds))
    assert found.total == pytest.approx(UNITS * 3 * seconds + 2 * seconds)


def test_stage_2_waits_for_the_parameters_at_the_end():
    fast = predicted(sl.zero(2), 4.0, SHARE / 0.5)  # half a second to reduce or gather a unit
    assert fast.total == pytest.approx(12.0 + 0.5 + UNITS * 0.5)


@pytest.mark.parametrize("prefetch", [True, False])
def test_stage_3_hides_gathers_behind_the_unit_before(prefetch):
    """A unit computes 1 s forward and 2 s backward; gathering or reducing one takes 0.5 s."""
    found = predicted(sl.zero(3, prefetch=prefetch), 4.0, SHARE / 0.5)
    # The first gather of each pass is waited for, and the last reduction; without prefetch every gather, and in
    # backward each stands behind the reduction of the unit before.
    waits = 0.5 + 0.5 + 0.5 if prefetch else UNITS * 0.5 + UNITS * 0.5 + (UNITS - 1) * 0.5 + 0.5
    assert found.total == pytest.approx(12.0 + waits)


def test_accumulation_reduces_once_or_each_time():
    def busy(sync):
        return predicted(sl.chain(sl.zero(2), sl.accumulate(3, sync=sync)), 0.0, 1.0).total / (UNITS * SHARE)

    assert busy("last") == 2 and busy("each") == 4  # the parameters once; the gradients once or three times


def test_activations_of_sliced_layers_are_waited_for():
    config = gpt.GPTConfig(layers=2, width=16, heads=4, sequence=8, vocab=32)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    plan = sl.make_plan(
        gpt.init(config, device="meta"),
        sl.abstract_mesh(model=2),
        sl.tensor_slicing(gpt.slicing_rules(config)),
        loss_fn=gpt.make_loss(config),
        batch={"tokens": tokens, "targets": tokens},
    )
    found = sl.predict_step(plan, 1.0, {"model": 1e6})
    assert found.exposed == pytest.approx(plan.payload()["model"] / 1e6) and plan.payload()["model"] > 0


def test_each_axis_is_a_link_of_its_own():
    plan = sl.make_plan(PARAMS, sl.abstract_mesh(node=2, data=2), sl.zero(3, replicate="node"))
    found = sl.predict_step(plan, 0.0, {"node": 1.0, "data": 1e9})
    assert found.links["node"] == plan.payload()["node"] == pytest.approx(found.total, rel=1e-4)


def test_names_that_the_plan_does_not_have():
    with pytest.raises(MeshError, match=r"axis 'pipe'\n  - unit 'head'"):
        sl.predict_step(sl.make_plan(PARAMS, sl.abstract_mesh(data=2), stage=1), {"head": 1.0}, {"pipe": 1.0})


def test_stages_are_sent_to_their_own_clock():
    plan = sl.make_plan([{"w": torch.zeros(4)}] * 2, sl.abstract_mesh(pipe=2), sl.pipeline(microbatches=2))
    with pytest.raises(IllegalComposition, match=r"sl.schedules.simulate\(plan.pipeline.schedule"):
        sl.predict_step(plan, 1.0, {})


def test_it_can_be_printed():
    assert str(predicted(sl.zero(0), 1.0, 1e9)).startswith("step 3")
