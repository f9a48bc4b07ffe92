"""Predicted step times against closed forms of the overlap."""

import math

import pytest
import torch
from helpers.models import OwnProduct
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib as sl
from shardlib.errors import MeshError
from shardlib.models import gpt

UNITS, NUMEL, RANKS = 4, 1000, 4
BYTES = NUMEL * 4
PARAMS = {"blocks": [{"w": torch.zeros(NUMEL)} for _ in range(UNITS)]}
SHARE = BYTES * (RANKS - 1) // RANKS  # what a rank sends of one unit


def predicted(transform, forward, rate, mesh=None, **options):
    plan = sl.make_plan(PARAMS, sl.abstract_mesh(**(mesh or {"data": RANKS})), transform)
    return sl.report.predict_step(plan, forward, {"data": rate}, **options)


@pytest.mark.parametrize("stage", range(4))
def test_without_links_a_step_is_what_it_computes(stage):
    plan = sl.make_plan(PARAMS, sl.abstract_mesh(data=RANKS), stage=stage)
    found = sl.report.predict_step(plan, 2.0, {}, backward=1.5, update=0.25)
    assert found.total == pytest.approx(2 * 2.5 + 0.25) and found.exposed == pytest.approx(0) and found.links == {}


@pytest.mark.parametrize(("stage", "volumes"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_a_slow_link_dominates(stage, volumes):
    """Computing takes no time: every byte the plan counts, one after the other."""
    found = predicted(sl.zero(stage), 0.0, 1.0)
    assert found.total == found.links["data"] == volumes * UNITS * SHARE
    plan = sl.make_plan(PARAMS, sl.abstract_mesh(data=RANKS), stage=stage)
    assert found.total == plan.payload()["data"]


def test_a_step_waits_for_what_the_optimizer_sends():
    params = {"blocks": [{"w": torch.zeros(40, 25)} for _ in range(UNITS)]}
    plan = sl.make_plan(params, sl.abstract_mesh(data=RANKS), stage=2, optimizer=sl.optim.muon(0.1))
    found = sl.report.predict_step(plan, 0.0, {"data": 1.0})
    assert found.total == plan.payload()["data"] == 2 * UNITS * SHARE + 2 * UNITS * SHARE // RANKS


def test_stage_0_hides_all_but_the_last_reduction():
    """Each reduction takes as long as a unit's backward, so that a step waits only for the last one."""
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


@pytest.mark.parametrize(("keep", "gathers"), [("forward", UNITS), (2 * BYTES, UNITS + 2)])
def test_what_stays_is_gathered_once(keep, gathers):
    """The units that backward begins with are there."""
    found = predicted(sl.zero(3, keep=keep), 4.0, SHARE / 0.5)
    assert found.total == pytest.approx(12.0 + 0.5 + 0.5)
    assert found.links["data"] == pytest.approx((gathers + UNITS) * 0.5)


@pytest.mark.parametrize("stage", range(4))
def test_gradients_that_come_late_are_waited_for_once_more(stage):
    """At stage 3 the biases' gradients are on their way when a function of the user's returns those of the weights."""
    params = {"blocks": [{"w": torch.zeros(4, 4), "b": torch.zeros(4)} for _ in range(UNITS)]}

    def loss_fn(params, x):
        for p in params["blocks"]:
            x = OwnProduct.apply(x, p["w"]) + p["b"]
        return x.square().mean()

    mesh = sl.abstract_mesh(data=2)
    plan = sl.make_plan(params, mesh, stage=stage, loss_fn=loss_fn, batch=torch.zeros(2, 4))
    usual = sl.make_plan(params, mesh, stage=stage).payload()["data"]
    found = sl.report.predict_step(plan, 0.0, {"data": 1.0})
    assert found.total == found.links["data"] == plan.payload()["data"]
    assert plan.payload()["data"] == (usual if stage < 3 else usual * 4 // 3)


def test_accumulation_reduces_once_or_each_time():
    def busy(sync):
        return predicted(sl.chain(sl.zero(2), sl.accumulate(3, sync=sync)), 0.0, 1.0).total / (UNITS * SHARE)

    assert busy("last") == 2 and busy("each") == 4  # the parameters once; the gradients once or three times


def test_a_micro_batch_waits_for_the_reductions_of_the_one_before():
    """A unit computes 1 s forward and 2 s backward, and is reduced in 0.5 s: the last one's reduction is waited for."""
    found = predicted(sl.chain(sl.zero(2), sl.accumulate(3, sync="each")), 4.0, SHARE / 0.5)
    assert found.total == pytest.approx(3 * (12.0 + 0.5) + UNITS * 0.5)


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
    found = sl.report.predict_step(plan, 1.0, {"model": 1e6})
    assert found.exposed == pytest.approx(plan.payload()["model"] / 1e6) and plan.payload()["model"] > 0


def test_operators_take_a_fixed_time_in_every_microbatch():
    """Half as many rows in twice as many micro-batches have as many operations, and twice the operators."""
    config = gpt.GPTConfig(layers=2, width=16, heads=4, sequence=8, vocab=32)
    tokens = torch.zeros(4, 8, dtype=torch.int64)

    def traced(microbatches):
        return sl.make_plan(
            gpt.init(config, device="meta"),
            sl.abstract_mesh(data=1),
            sl.accumulate(microbatches),
            loss_fn=gpt.make_loss(config),
            batch={"tokens": tokens, "targets": tokens},
        )

    (whole,), (half,) = traced(1).traces, traced(2).traces
    assert half.launches == whole.launches and 2 * half.flops[0] == whole.flops[0]
    for microbatches in (1, 2, 4):
        found = sl.report.predict_step(traced(microbatches), 3.0 / microbatches, {"launches": 100.0})
        launches = microbatches * sum(whole.launches) / 100.0
        assert found.links["launches"] == pytest.approx(launches)
        assert found.total == found.compute == pytest.approx(9.0 + launches)


def test_views_and_memory_without_values_are_no_operators():
    from shardlib.execute.counting import WorkCount

    with WorkCount() as work:
        x = torch.empty(4, 4).fill_(1.0).requires_grad_()
        (x.view(16)[2:].square().reshape(7, 2).mT @ torch.ones(7, 1)).sum().backward()
    assert work.launches[0] == 6  # fill_, square, ones, the product, sum, and the one that backward starts from
    assert work.launches[1] >= 4  # of the product, of the square (a power and two products) and of the slice


def test_each_axis_is_a_link_of_its_own():
    plan = sl.make_plan(PARAMS, sl.abstract_mesh(node=2, data=2), sl.zero(3, replicate="node"))
    found = sl.report.predict_step(plan, 0.0, {"node": 1.0, "data": 1e9})
    assert found.links["node"] == plan.payload()["node"] == pytest.approx(found.total, rel=1e-4)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"forward": -1.0}, "forward=-1.0"),
        ({"forward": math.nan, "backward": -1.0, "update": math.inf}, "forward=nan, backward=-1.0, update=inf"),
        ({"forward": {"w": "1"}}, r"forward\['w'\]='1'"),
        ({"bandwidth": {"data": 0}}, r"bandwidth\['data'\]=0"),
        ({"bandwidth": 1e9}, 'bandwidth=1000000000.0.: give bytes per second by the name of an axis .* {"data": 1e9}'),
    ],
)
def test_seconds_and_rates_that_are_none(wrong, words):
    plan = sl.make_plan({"w": torch.ones(4, 4)}, sl.abstract_mesh(data=2), sl.zero(1))
    with pytest.raises((ValueError, TypeError), match=words):
        sl.report.predict_step(plan, **{"forward": 0.1, "bandwidth": {"data": 1e9}} | wrong)


@pytest.mark.parametrize("step", [-1, "3", 1.5, True])
def test_a_step_that_is_no_number_of_one(step):
    with pytest.raises(ValueError, match=f"make_plan.step={step!r}.: the number of a step is an integer from 0"):
        sl.make_plan({"w": torch.ones(4)}, sl.abstract_mesh(data=2), step=step)


def test_unknown_units_and_axes_are_refused():
    with pytest.raises(MeshError, match=r"axis 'pipe'\n  - unit 'head'"):
        sl.report.predict_step(sl.make_plan(PARAMS, sl.abstract_mesh(data=2), stage=1), {"head": 1.0}, {"pipe": 1.0})


# --- pipelines ---------------------------------------------------------------------------------------------------

BLOCKS = [{"w": torch.zeros(NUMEL)} for _ in range(8)]


def staged(schedule, ranks, microbatches, *transforms, chunks=None, **mesh):
    """Eight equal blocks cut into equal stages."""
    cut = sl.pipeline(schedule, microbatches, chunks=chunks, partition="count")
    return sl.make_plan(BLOCKS, sl.abstract_mesh(**mesh, pipe=ranks), sl.chain(cut, *transforms))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [4, 8])
@pytest.mark.parametrize(
    ("schedule", "bubble"),
    [
        ("gpipe", lambda p, v: (p - 1) * 3),
        ("1f1b", lambda p, v: (p - 1) * 3),
        ("interleaved-1f1b", lambda p, v: (p - 1) * 3 / v),
        ("zb-h1", lambda p, v: (p - 1) * 1),
    ],
)
def test_without_links_a_pipeline_takes_its_closed_form(schedule, bubble, ranks, microbatches):
    """A stage's forward, and either half of its backward, take 1 s (a chunk's 1/v); see arXiv 2104.04473, 2401.10241."""
    chunks = 2 if schedule.startswith("interleaved") else 1
    plan = staged(schedule, ranks, microbatches, chunks=2 if chunks == 2 else None)
    found = sl.report.predict_step(plan, float(ranks), {}, backward=2.0, update=0.5)
    assert found.total == pytest.approx(3 * microbatches + bubble(ranks, chunks) + 0.5)
    assert found.ranks == pytest.approx([3 * microbatches + 0.5] * ranks)
    assert found.bubble == pytest.approx(bubble(ranks, chunks) / (3 * microbatches + 0.5))


@settings(max_examples=60)
@given(
    stage=st.integers(0, 3),
    sync=st.sampled_from([None, "last"]),
    prefetch=st.booleans(),
    microbatches=st.integers(1, 4),
    rate=st.floats(100, 1e6),
    backward=st.floats(0.5, 3),
)
def test_one_stage_takes_as_long_as_no_pipeline(stage, sync, prefetch, microbatches, rate, backward):
    zero = sl.zero(stage, prefetch=prefetch)
    sizes = {"data": 4, "pipe": 1}
    cut = sl.chain(zero, sl.pipeline("1f1b", microbatches, sync=sync))
    plain = sl.chain(zero, sl.accumulate(microbatches, sync=sync))
    one, none = (
        sl.report.predict_step(
            sl.make_plan(BLOCKS, sl.abstract_mesh(**sizes), chain), 1.0, {"data": rate}, backward=backward, update=0.1
        )
        for chain in (cut, plain)
    )
    assert one == none


@settings(max_examples=60)
@given(
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "interleaved-zb", "zb-v"]),
    stage=st.integers(0, 3),
    microbatches=st.sampled_from([2, 4, 8]),
    rate=st.floats(100, 1e6),
)
def test_slower_links_never_make_a_step_shorter(schedule, stage, microbatches, rate):
    plan = staged(schedule, 2, microbatches, sl.zero(stage), data=4)
    slow, fast, none = (
        sl.report.predict_step(plan, 1.0, bandwidth) for bandwidth in ({"data": rate}, {"data": 2 * rate}, {})
    )
    assert slow.total >= fast.total >= none.total
    assert slow.links["data"] == pytest.approx(plan.payload()["data"] / rate)
    clock = sl.schedules.Costs(*(costs_of(plan, share) for share in (1, 1, 1)))
    assert none.total == pytest.approx(sl.schedules.simulate(plan.stages.schedule, clock).makespan)


def costs_of(plan, factor):
    """Each stage's share of a forward of 1 s."""
    return [factor * (stop - start) / len(BLOCKS) for start, stop in plan.stages.spans]


def test_messages_between_stages_are_waited_for_once_there_and_once_back():
    """Two stages, one micro-batch: forward, message, forward, backward, message, backward."""
    config = gpt.GPTConfig(layers=2, width=16, heads=4, sequence=8, vocab=32)
    params, tokens = gpt.to_blocks(gpt.init(config, device="meta")), torch.zeros(2, 8, dtype=torch.int64)
    plan = sl.make_plan(
        params,
        sl.abstract_mesh(pipe=2),
        sl.pipeline(microbatches=1, partition="count"),
        loss_fn=gpt.make_sequential(config),
        batch={"tokens": tokens, "targets": tokens},
    )
    sent = 2 * 8 * 16 * 4  # batch × sequence × width, fp32
    tied = (
        sum(b.size(0) * 4 for b in plan.trained if len(b.homes) > 1) / 1e3
    )  # the tied embedding's gradient, at the end
    found = sl.report.predict_step(plan, 3.0, {"pipe": 1e3})
    assert plan.traces[0].forward == plan.traces[0].backward == sent
    assert found.total == pytest.approx(9.0 + 2 * sent / 1e3 + tied)


def test_it_can_be_printed():
    assert str(predicted(sl.zero(0), 1.0, 1e9)).startswith("step 3")


@pytest.mark.parametrize("forward", [0.0, 7.0])
def test_an_axis_of_the_optimizers_own_is_summed_after_backward(forward):
    tx = sl.optim.onebit_adam(1e-3, freeze_step=1)
    plan = sl.make_plan(PARAMS, sl.abstract_mesh(data=RANKS), sl.zero(0), optimizer=tx)
    sent = plan.payload(owned=True)["data"]
    assert sent < plan.payload()["data"] / 20
    found = sl.report.predict_step(plan, forward, {"data": 1.0}, owned=True)
    assert found.total == pytest.approx(3 * forward + sent) and found.links == {"data": sent}
    assert sl.report.predict_step(plan, 0.0, {"data": 1.0}).total == plan.payload()["data"]


def test_an_optimizer_without_an_axis():
    plan = sl.make_plan(PARAMS, sl.abstract_mesh(data=RANKS), sl.zero(0))
    with pytest.raises(MeshError, match="no optimizer of this plan owns an axis; pass one that does"):
        sl.report.predict_step(plan, 1.0, {}, owned=True)


def test_compressed_exchanges_take_less_time():
    plain = predicted(sl.zero(2), 0.0, 1.0)
    few = predicted(sl.chain(sl.zero(2), sl.onebit()), 0.0, 1.0)
    again = UNITS * SHARE  # parameters are gathered as they are
    assert plain.total == 2 * again
    assert few.total == again + UNITS * (RANKS - 1) * (-(-NUMEL // RANKS // 8) + 4)
