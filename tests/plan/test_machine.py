"""Machines: their links along the axes of meshes, their files, and steps predicted on them."""

import json
import math
from dataclasses import replace

import pytest
import torch

import shardlib as sl
from shardlib.errors import MeshError
from shardlib.models import gpt
from shardlib.plan import Link, Machine, Overheads

MACHINE = Machine("16GiB", {"fp32": 1e9}, Link(100.0, 1.0), Link(40.0, 10.0), ranks_per_host=4)


@pytest.mark.parametrize(
    ("sizes", "axis", "bandwidth", "latency"),
    [
        ({"data": 4}, "data", 100.0, 3.0),  # on one host
        ({"data": 8}, "data", 40.0, 2 * 3.0 + 10.0),  # one ring, which leaves each host once
        ({"data": 2, "model": 4}, "data", 10.0, 10.0),  # four groups leave each host
        ({"data": 2, "model": 4}, "model", 100.0, 3.0),
        ({"data": 4, "model": 2}, "data", 20.0, 2 * 1.0 + 10.0),  # two groups, each with two ranks a host
        ({"pipe": 2, "data": 2, "model": 2}, "pipe", 10.0, 10.0),
        ({"data": 2, "model": 1}, "data", 100.0, 1.0),
    ],
)
def test_links_follow_from_the_order_of_ranks(sizes, axis, bandwidth, latency):
    assert MACHINE.link(sizes, axis) == Link(bandwidth, latency)


def test_sums_have_rates_of_their_own():
    measured = replace(MACHINE, inside=replace(MACHINE.inside, sums=Link(80.0, 3.0, 2.0)))
    assert MACHINE.link({"data": 8}, "data").summing == Link(40.0, 2 * (2 * 3.0 + 10.0))
    assert measured.link({"data": 4}, "data") == Link(100.0, 3.0, sums=Link(80.0, 9.0, 2.0))
    assert measured.link({"data": 8}, "data").summing == Link(40.0, 2 * 9.0 + 20.0)
    assert measured.link({"data": 2, "model": 4}, "data").summing == Link(10.0, 20.0)


def test_hosts_without_a_link_between_them():
    alone = Machine("16GiB", {"fp32": 1e9}, Link(100.0), ranks_per_host=4)
    with pytest.raises(MeshError, match=r"8 ranks has several hosts of 4: give the machine's link between="):
        alone.link({"data": 8}, "data")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"flops": {"int8": 1.0}}, "'int8': use fp32, bf16"),
        ({"flops": {"fp32": 0.0}}, "fp32=0.0"),
        ({"inside": Link(-1.0)}, "inside.bandwidth=-1.0"),
        ({"memory": "16 hands"}, "'16 hands' is not a size"),
        ({"ranks_per_host": 0}, "ranks_per_host=0"),
        ({"updating": 0.0}, "updating=0.0"),
        ({"crowd": 0.5}, "crowd=0.5"),
        ({"inside": Link(1.0, sums=Link(0.0))}, "inside, sums.bandwidth=0.0"),
        ({"ways": {"dwn": 1e9}}, r"Machine\(ways=\) names 'dwn': use down, up, read, written, update"),
        ({"flops": {"fp32": "fast"}, "ways": {"up": math.nan}}, "fp32='fast', up=nan"),
        ({"inside": Link(1.0, -1e-6, math.nan)}, "no seconds.*: inside.latency=-1e-06, inside.processor=nan"),
        ({"between": Link(1.0, math.inf)}, "between.latency=inf"),
        ({"overheads": Overheads(walk=-1.0)}, "overheads.walk=-1.0"),
        ({"ranks_per_host": 1.5}, r"ranks_per_host=1.5\): give an integer"),
        ({"ranks_per_host": True}, "ranks_per_host=True"),
        ({"crowd": math.nan}, "crowd=nan"),
        ({"inside": 1e9}, r"Machine\(inside=1000000000.0\): give a sl.plan.Link"),
        ({"between": 1e9}, r"Machine\(between=1000000000.0\): give a sl.plan.Link"),
        ({"inside": Link(1.0, sums=2.0)}, r"Machine\(inside.sums=2.0\): give a sl.plan.Link"),
        ({"ways": [1e9]}, r"Machine\(ways=\[1000000000.0\]\): give rates by name"),
        ({"overheads": 1e-3}, "overheads=0.001"),
    ],
)
def test_what_is_no_machine(wrong, words):
    with pytest.raises((ValueError, TypeError), match=words):
        Machine(**{"memory": 1, "flops": {"fp32": 1.0}, "inside": Link(1.0)} | wrong)


def test_a_file_holds_the_machine(tmp_path):
    links = {"inside": Link(1e9, 1e-6, 1e-9, Link(2e9, 1e-5)), "between": Link(2e9)}
    rates = {"streaming": 1e12, "updating": 2e12, "launches": 1e5, "ways": {"up": 1e9}, "overheads": Overheads(1e-3)}
    whole = Machine(1 << 30, {"bf16": 1e14}, **links, ranks_per_host=8, host_memory=1 << 40, crowd=4.0, **rates)
    for machine in (whole, MACHINE):
        machine.write(tmp_path / "machine.json")
        assert Machine.read(tmp_path / "machine.json") == machine
    (tmp_path / "machine.json").write_text(json.dumps({"memory": "1GiB", "flops": {}, "inside": {"speed": 1}}))
    with pytest.raises(ValueError, match=r"machine.json describes no machine: .*speed"):
        Machine.read(tmp_path / "machine.json")
    (tmp_path / "machine.json").write_text("[]")
    with pytest.raises(ValueError, match=r"machine.json describes no machine: a list and no object"):
        Machine.read(tmp_path / "machine.json")
    assert str(whole).count("\n") > 10 and "products, bf16" in str(whole) and "1 ns a byte" in str(whole)


WIDTH, ROWS = 64, 16


def loss_fn(params, x):
    for layer in params:
        x = x @ layer["w"]
    return x.sum()


def planned(mesh=None, *transforms, ranks=1, loss=loss_fn, **options):
    params = [{"w": torch.ones(WIDTH, WIDTH)} for _ in range(3)]
    mesh = sl.abstract_mesh(**(mesh or {"data": ranks}))
    parallel = sl.chain(*(transforms or [sl.zero(0)]))
    batch, tx = torch.ones(ROWS, WIDTH), sl.optim.adamw(1e-3)
    return sl.make_plan(params, mesh, parallel, loss_fn=loss, batch=batch, optimizer=tx, **options)


def machine(**options):
    return Machine(**{"memory": 1 << 30, "flops": {"fp32": math.inf}, "inside": Link(math.inf)} | options)


def test_products_take_their_time():
    """Three products forward; in backward two each, but for the gradient of the batch."""
    plan = planned()
    one = 2 * ROWS * WIDTH * WIDTH
    assert sl.report.predict_on(plan, machine(flops={"fp32": 1.0})).total == 8 * one
    with pytest.raises(ValueError, match="no rate of products in fp32, only in bf16"):
        sl.report.predict_on(plan, machine(flops={"bf16": 1.0}))


def test_products_are_not_computed_in_the_codes_of_a_frozen_leaf():
    params = {"w": torch.ones(8, 8), "codes": torch.ones(64, 64).to(torch.float8_e4m3fn)}
    job = {"loss_fn": lambda p, x: (x @ p["w"]).square().mean(), "batch": torch.ones(4, 8)}
    plan = sl.make_plan(params, sl.make_mesh(), sl.freeze("codes"), **job)
    assert sl.report.predict_on(plan, machine(flops={"fp32": 1.0})).total == 2 * (2 * 4 * 8 * 8)


def test_other_operators_and_the_update_take_the_time_of_their_bytes():
    plan = planned()
    stream = sum(map(sum, (trace.streamed for trace in plan.traces)))
    activation, elements = ROWS * WIDTH * 4, 3 * WIDTH * WIDTH
    numbers = plan.traces[0].streamed[0] - activation  # the sum reads its input; what follows are single numbers
    assert 4 <= numbers < 64
    update = elements * 4 * (2 * 2 + 2 + 1)
    assert sl.report.predict_on(plan, machine(streaming=1.0)).total == stream + update
    assert sl.report.predict_on(plan, machine(streaming=1.0, updating=0.5)).total == stream + update / 0.5


def test_python_takes_its_time():
    ranks, stage_3 = 4, planned(None, sl.zero(3), sl.accumulate(2), ranks=4)
    steps = {
        name: sl.report.predict_on(stage_3, machine(ranks_per_host=ranks, overheads=Overheads(**{name: 1.0}))).total
        for name in ("step", "walk", "unit", "bucket", "exchange", "recompute")
    }
    gathers, reductions = 2 * len(stage_3.gathers), 2 * len(stage_3.trained)
    assert steps == {
        "step": 1.0,
        "walk": 4.0,
        "unit": gathers,
        "bucket": len(stage_3.trained),
        "exchange": gathers + reductions,
        "recompute": 0.0,
    }


def test_blocks_that_are_computed_again_take_pythons_time_in_backward():
    def blocks(params, x):
        for layer in params:
            x = sl.block(lambda layer, x: x @ layer["w"])(layer, x)
        return x.sum()

    again = machine(overheads=Overheads(recompute=1.0))
    plans = [
        planned(None, sl.accumulate(2), *recompute, loss=blocks)
        for recompute in ((), (sl.remat(),), (sl.remat(blocks=2),))
    ]
    assert [sl.report.predict_on(plan, again).total for plan in plans] == pytest.approx([0.0, 2 * 3, 2 * 2])


def test_hops_take_their_time():
    """All-reduces of the gradients wait for twice as many hops; and so does the one of loss and norm."""
    plan = planned(None, sl.zero(0), ranks=4)
    messages = len(plan.trained) + 1
    found = sl.report.predict_on(plan, machine(inside=Link(1e30, 1.0), ranks_per_host=4)).total
    assert found == pytest.approx(messages * 2 * 3)


def test_all_reduces_take_the_time_of_sums():
    """Of a step at stage 0 everything is a sum; at stage 2 nothing but the loss and the norm."""
    ranks, sums = 4, Link(0.5, 1.0)
    whole, split = (planned(None, sl.zero(stage), ranks=ranks) for stage in (0, 2))
    slow = machine(inside=Link(1.0, sums=sums), ranks_per_host=ranks)
    messages = len(whole.trained) + 1
    assert sl.report.predict_on(whole, slow).total == pytest.approx(whole.payload()["data"] / 0.5 + 3 * messages)
    assert sl.report.predict_on(split, slow).total == pytest.approx(split.payload()["data"] + 3)


@pytest.mark.parametrize(("ranks_per_host", "shared"), [(4, True), (2, False), (1, True)])
def test_axes_that_take_the_same_link_share_it(ranks_per_host, shared):
    """A rank has one link inside of its host, and one to others."""
    plan = sliced({"data": 2, "model": 2}, sl.zero(3))
    links = {"inside": Link(1.0), "between": Link(ranks_per_host)}  # which the ranks of a host share
    found = sl.report.predict_on(plan, machine(**links, ranks_per_host=ranks_per_host))
    data, model = found.links["data"], found.links["model"]
    assert min(data, model) > 1e4 and found.total > max(data, model)
    assert (found.total == pytest.approx(data + model)) == shared


def test_messages_keep_the_processor_from_computing():
    """While gradients are on their way backward goes on, but for the time that the processor sends. A rank that waits for its
    message, as after the update, waits no longer for that."""
    ranks, rate, work = 4, 1.0, 0.25
    plan = planned(None, sl.zero(0), ranks=ranks)
    products, sent = 8 * 2 * ROWS * WIDTH * WIDTH, plan.payload()["data"]
    slow = machine(flops={"fp32": rate}, inside=Link(1e9 * sent, 0.0, work), ranks_per_host=ranks)
    found = sl.report.predict_on(plan, slow)
    assert found.total == pytest.approx(products / rate + work * sent) and found.compute == pytest.approx(found.total)
    waited = planned(None, sl.zero(3), ranks=ranks)
    link = Link(1.0, 0.0, work)
    assert sl.report.predict_on(waited, machine(inside=link, ranks_per_host=ranks)).total == pytest.approx(
        sl.report.predict_on(waited, machine(inside=replace(link, processor=0.0), ranks_per_host=ranks)).total
    )


def pipelined(ranks, microbatches):
    loss = sl.sequential(
        [lambda w, x, batch: (batch if x is None else x) @ w] * (ranks - 1) + [lambda w, x, _: (x @ w).sum()]
    )
    params = [torch.ones(WIDTH, WIDTH) for _ in range(ranks)]
    parallel = sl.pipeline("1f1b", microbatches)
    batch = torch.ones(ROWS, WIDTH, requires_grad=True)  # so that all stages compute as much
    return sl.make_plan(params, sl.abstract_mesh(pipe=ranks), parallel, loss_fn=loss, batch=batch)


@pytest.mark.parametrize(
    ("ranks", "crowd", "together"), [(2, 1.0, False), (2, 2.0, True), (4, 2.0, True), (4, 4.0, True)]
)
def test_stages_that_share_processors_compute_while_others_wait(ranks, crowd, together):
    """A stage that waits leaves its share of the processors to the others, so that a bubble costs nothing as long as
    processors have something to do."""
    plan = pipelined(ranks, microbatches=2 * ranks)
    one = sl.report.predict_on(plan, machine(flops={"fp32": 1.0}, ranks_per_host=ranks))
    shared = sl.report.predict_on(plan, machine(flops={"fp32": 1 / crowd}, ranks_per_host=ranks, crowd=crowd))
    assert one.bubble > 0.2
    assert one.total <= shared.total < crowd * one.total or crowd == 1
    assert shared.total == pytest.approx(max(one.total, crowd * sum(one.ranks) / ranks))
    assert (shared.total > one.total) == together


def test_all_ranks_of_one_stage_compute_at_once():
    plan, rate = planned(), {"fp32": 1.0}
    crowded = sl.report.predict_on(plan, machine(flops=rate, crowd=4.0))
    assert crowded == sl.report.predict_on(plan, machine(flops=rate))


def sliced(mesh, zero):
    config = gpt.GPTConfig(vocab=64, layers=2, width=32, heads=2, sequence=16)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    return sl.make_plan(
        gpt.init(config),
        sl.abstract_mesh(**mesh),
        sl.chain(zero, sl.tensor_slicing(gpt.slicing_rules(config))),
        loss_fn=gpt.make_loss(config),
        batch={"tokens": tokens, "targets": tokens},
        optimizer=sl.optim.adamw(1e-3),
    )


def test_collectives_of_slices_are_counted():
    plan, layers = sliced({"data": 1, "model": 2}, sl.zero(0)), 2
    (trace,) = plan.traces
    assert trace.collectives["model"] >= 4 * layers + 1
    slow = machine(inside=Link(1e30, 1.0), ranks_per_host=2)
    assert sl.report.predict_on(plan, slow).total == pytest.approx(2 * trace.collectives["model"])


def test_a_plan_without_a_trace_has_no_operations():
    plan = sl.make_plan({"w": torch.ones(4)}, sl.abstract_mesh(data=1), sl.zero(0))
    with pytest.raises(ValueError, match="give make_plan loss_fn= and batch="):
        sl.report.predict_on(plan, machine())


def test_rates_alone_are_no_machine():
    plan = sl.make_plan({"w": torch.ones(4)}, sl.abstract_mesh(data=1), sl.zero(0))
    with pytest.raises(TypeError, match=r"predict_on takes a sl.plan.Machine, not float 10+\.0: make one"):
        sl.report.predict_on(plan, 1e11)
