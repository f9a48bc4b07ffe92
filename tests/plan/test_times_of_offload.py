"""Predicted step times with states, parameters and gradients in other memories, against closed forms."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib as sl
from shardlib.errors import MeshError
from shardlib.models import gpt

UNITS, NUMEL = 4, 1024
PARAMS = {"blocks": [{"w": torch.zeros(NUMEL)} for _ in range(UNITS)]}
UNIT = 4 * NUMEL  # bytes of a unit in fp32
ADAM = sl.optim.adamw(1e-3)


def predicted(offload, forward, rates, *transforms, ranks=1):
    plan = sl.make_plan(PARAMS, sl.abstract_mesh(data=ranks), sl.chain(*transforms, offload), optimizer=ADAM)
    return sl.report.predict_step(plan, forward, rates)


def test_gradients_update_and_parameters_overlap_bucket_by_bucket():
    """Each takes a second for a unit. Two units are on their way down when backward ends: then the norm is known."""
    rates = {"down": UNIT, "up": UNIT, "update": 3 * UNIT}
    found = predicted(sl.offload(), 0.0, rates, sl.zero(0))
    assert found.total == pytest.approx(UNITS - 2 + UNITS + 1)
    assert found.links == pytest.approx({"down": UNITS, "up": UNITS, "update": UNITS})


def test_gradients_go_down_while_backward_goes_on():
    """A unit takes a second in backward, and half a second to go down: the last one's way is left."""
    found = predicted(sl.offload(), UNITS / 2, {"down": 2 * UNIT}, sl.zero(0))
    assert found.total == pytest.approx(UNITS * 1.5 + 0.5)


def test_backward_waits_for_gradients_of_more_than_two_units():
    """A unit takes three seconds to go down; with two on their way the third waits. The update needs all of them."""
    found = predicted(sl.offload(), 0.0, {"down": UNIT / 3, "update": 3 * UNIT}, sl.zero(0))
    assert found.total == pytest.approx(3 * UNITS + 1)


def test_the_slots_for_new_parameters_take_turns():
    """The update takes no time; a unit takes a second to go up, and the third waits for the first."""
    rates = {"up": UNIT, "update": 3 * UNIT}
    assert predicted(sl.offload(), 0.0, rates, sl.zero(0)).total == pytest.approx(UNITS + 1)
    assert predicted(sl.offload(), 0.0, {"up": UNIT / 5, **{"update": 3 * UNIT}}, sl.zero(0)).total == 5 * UNITS + 1


def test_updates_ahead_of_the_norm_run_beside_backward():
    """A unit takes two seconds in backward and to update; what is left is the last update, and then the way up."""
    rates = {"up": UNIT, "update": 1.5 * UNIT}
    found = predicted(sl.offload(speculate=True), UNITS, rates, sl.zero(0))
    assert found.total == pytest.approx(12 + 2 + UNITS) and found.links["update"] == 2 * UNITS
    without = predicted(sl.offload(), UNITS, rates, sl.zero(0))
    assert without.total == pytest.approx(12 + 2 * UNITS + 1)


def test_delayed_updates_run_beside_the_whole_step():
    """The update of the step before takes as long as the step; then parameters go up."""
    rates = {"up": UNIT, "update": UNIT}
    assert predicted(sl.offload(delay=True), UNITS, rates, sl.zero(0)).total == pytest.approx(3 * UNITS + UNITS)
    assert predicted(sl.offload(), UNITS, rates, sl.zero(0)).total == pytest.approx(6 * UNITS + 1)


@pytest.mark.parametrize(("prefetch", "total"), [(True, 12 + 0.5 + 0.5), (False, 12 + UNITS)])
def test_parameters_come_up_one_unit_ahead(prefetch, total):
    """A second of forward and two of backward for a unit, half a second for its way up, in both."""
    found = predicted(sl.offload(params="host"), UNITS, {"up": 2 * UNIT}, sl.zero(0, prefetch=prefetch))
    assert found.total == pytest.approx(total)
    assert found.links == pytest.approx({"up": UNITS})


def test_a_shard_comes_up_before_it_is_gathered():
    found = predicted(sl.offload(params="host"), 0.0, {"up": UNIT / 2, "data": UNIT / 2}, sl.zero(3), ranks=2)
    # Of two ranks each has half a unit, which takes a second up, and one to the other. In forward and in backward the first
    # unit's way up is waited for; the others' go beside gathers and reductions.
    assert found.links == pytest.approx({"up": 2 * UNITS, "data": 3 * UNITS})
    assert found.total == pytest.approx(2 + 3 * UNITS)


def test_states_on_disk_are_read_ahead_and_written_behind():
    """Masters and moments of a unit are three blocks of 4,096 bytes."""
    on_disk, rate = sl.offload("disk", folder="states"), 3 * 4096
    assert predicted(on_disk, 0.0, {"read": rate}, sl.zero(0)).total == UNITS
    assert predicted(on_disk, 0.0, {"read": rate, "written": rate}, sl.zero(0)).total == UNITS + 1
    assert predicted(on_disk, 0.0, {"read": rate, "written": rate, "update": rate}, sl.zero(0)).total == UNITS + 2


def test_gradients_on_disk_are_written_before_the_update_and_read_by_it():
    """A unit's gradient is a block of 4,096 bytes, its states are three."""
    on_disk = sl.offload("disk", gradients="disk", folder="states")
    assert predicted(on_disk, 0.0, {"written": 4096}, sl.zero(0)).total == UNITS + 3 * UNITS
    assert predicted(on_disk, 0.0, {"read": 4096}, sl.zero(0)).total == 4 * UNITS
    assert predicted(on_disk, UNITS, {"written": 4096, "read": 1e9}, sl.zero(0)).total == pytest.approx(12 + 1 + 12)
    twice = predicted(on_disk, 0.0, {"read": 4096}, sl.zero(0), sl.accumulate(2))
    assert twice.links["read"] == 5 * UNITS


def test_parameters_on_disk_are_read_three_units_ahead():
    """A unit's parameters are a block of 4,096 bytes, read for forward, backward and update; its moments are two."""
    on_disk, update, read = sl.offload("disk", params="disk", folder="states"), 3 * UNITS, {"read": 4096}
    assert predicted(on_disk, 0.0, read, sl.zero(0)).total == 2 * UNITS + update
    assert predicted(on_disk, 0.0, {"written": 4096}, sl.zero(0)).total == update
    # A second of forward and two of backward for a unit. Forward waits for the first two units' parameters. Backward
    # waits for the last one's, which are read behind the two that forward has announced: they were in memory then.
    assert predicted(on_disk, UNITS, read, sl.zero(0)).total == pytest.approx(2 + 12 + 2 + update)
    alone = predicted(on_disk, UNITS, read, sl.zero(0, prefetch=False))
    assert alone.total == pytest.approx(2 * UNITS + 12 + update)


def test_disks_wait_for_memory():
    """Eight units have memory for six: the seventh is read when the first is written, after 1 s + 10 s."""
    params = {"blocks": [{"w": torch.zeros(NUMEL)} for _ in range(8)]}
    parallel = sl.chain(sl.zero(0), sl.offload("disk", folder="states"))
    plan = sl.make_plan(params, sl.abstract_mesh(data=1), parallel, optimizer=ADAM)
    found = sl.report.predict_step(plan, 0.0, {"read": 3 * 4096, "written": 3 * 4096 / 10, "update": 3 * 4096 * 1e6})
    assert found.total == pytest.approx(1 + 8 * 10, rel=1e-3)
    slow_reads = sl.report.predict_step(plan, 0.0, {"read": 3 * 4096 / 10, "written": 3 * 4096})
    assert slow_reads.total == pytest.approx(8 * 10 + 1)


def test_inputs_of_blocks_go_down_and_come_back():
    config = gpt.GPTConfig(layers=4, width=64, heads=4, sequence=64, vocab=64)
    tokens = torch.zeros(8, 64, dtype=torch.int64)
    plan = sl.make_plan(
        gpt.init(config, device="meta"),
        sl.abstract_mesh(data=1),
        sl.chain(sl.zero(0), sl.remat(store="host")),
        loss_fn=gpt.make_loss(config),
        batch={"tokens": tokens, "targets": tokens},
        optimizer=ADAM,
    )
    sent = plan.transfers()
    assert sent["down"] == sent["up"] > 0
    hidden = sl.report.predict_step(plan, 1.0, {"down": sent["down"] * 1e3, "up": sent["up"] * 1e3})
    slow = sl.report.predict_step(plan, 0.0, {"down": sent["down"], "up": sent["up"]})
    assert hidden.total == pytest.approx(3.0, abs=0.01) and hidden.exposed > 0
    assert slow.links == pytest.approx({"down": 1.0, "up": 1.0})
    assert slow.total == pytest.approx(2.0)  # what comes up must be down


@settings(max_examples=40)
@given(
    stage=st.integers(0, 3),
    places=st.sampled_from(["host", "disk"]),
    params=st.sampled_from([None, "host", "disk"]),
    gradients=st.sampled_from([None, "host", "disk"]),
    fraction=st.sampled_from([0.5, 1.0]),
    microbatches=st.integers(1, 3),
    narrow=st.booleans(),
    rate=st.floats(1e3, 1e6),
)
def test_every_link_is_as_busy_as_the_plan_says(stage, params, gradients, fraction, microbatches, narrow, rate, places):
    places = "disk" if "disk" in (params, gradients) else places
    folder = ["states"] if places == "disk" else []
    moved = sl.offload(places, params, gradients, fraction=fraction, folder=folder)
    transforms = [sl.zero(stage), sl.accumulate(microbatches), moved]
    plan = sl.make_plan(
        PARAMS, sl.abstract_mesh(data=2), sl.chain(*transforms, *[sl.precision("bf16")] * narrow), optimizer=ADAM
    )
    moved = plan.transfers()
    rates = {way: rate * (1 + number) for number, way in enumerate(moved)}
    found = sl.report.predict_step(plan, 0.5, rates)
    assert found.links == pytest.approx({way: sent / rates[way] for way, sent in moved.items()})
    assert found.total >= max(found.links.values()) and found.total >= found.compute
    faster = sl.report.predict_step(plan, 0.5, {way: 2 * speed for way, speed in rates.items()})
    assert found.total >= faster.total >= sl.report.predict_step(plan, 0.5, {}).total


def test_an_axis_with_the_name_of_a_link():
    plan = sl.make_plan(PARAMS, sl.abstract_mesh(up=2), sl.zero(0, axis="up"))
    with pytest.raises(
        MeshError, match=r"the mesh has axis 'up', and links have the names down, up, read, written, update"
    ):
        sl.report.predict_step(plan, 1.0, {"up": 1.0})
