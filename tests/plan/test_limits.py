"""What every memory holds at its peak, limits that refuse a plan, and the changes that a refusal names."""

import itertools
import re

import numpy as np
import pytest
import torch
from helpers.cuts import tiny_blocks
from helpers.models import token_batches

import shardlib as sl
from shardlib.errors import IllegalComposition
from shardlib.execute.stages.tracing import Tracing
from shardlib.execute.stages.walk import Peak
from shardlib.plan.limits import Limits
from shardlib.plan.memory import memory_peaks
from shardlib.plan.prediction import nominal_seconds
from shardlib.plan.tables import parse_size
from shardlib.transforms.changes import changes

ADAM = sl.optim.adamw(1e-3)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (24, 24),
        (np.int64(24), 24),
        ("24", 24),
        ("24 B", 24),
        ("24GiB", 24 << 30),
        ("24GB", 24 * 10**9),
        ("1.5 TiB", 3 << 39),
        ("0.5kB", 500),
        ("2KiB", 2048),
    ],
)
def test_sizes(given, found):
    assert parse_size(given) == found


@pytest.mark.parametrize(
    "given", ["24 gigs", "24G", "24gb", "GiB", "", "-1", -1, 0, "0GB", True, 1.5, "0.3B", "1e9", "1,5GB"]
)
def test_what_is_no_size(given):
    with pytest.raises(ValueError, match="is not a size: give a whole number of bytes, or a number with one of B, kB"):
        parse_size(given)


def layers(widths):
    """Blocks ``x @ w`` from one width to the next, and the loss Σx."""
    multiply = sl.block(lambda p, x: x @ p["w"])

    def loss_fn(params, x):
        for p in params:
            x = multiply(p, x)
        return x.sum()

    return loss_fn, [{"w": torch.zeros(a, b, device="meta")} for a, b in itertools.pairwise(widths)]


def planned(widths, *transforms, rows=4, ranks=1, **limits):
    loss_fn, params = layers(widths)
    batch = torch.empty(rows, widths[0])
    parallel = sl.chain(*transforms) if transforms else None
    return sl.make_plan(
        params, sl.abstract_mesh(data=ranks), parallel, loss_fn=loss_fn, batch=batch, optimizer=ADAM, **limits
    )


def test_a_device_by_hand():
    """Fp32 on one device: 16 × 8 and 8 × 32 weights, 4 rows."""
    plan = planned([16, 8, 32])
    weights = 4 * (16 * 8 + 8 * 32)
    rows = 4 * 4  # bytes of a column of the batch
    (peak,) = memory_peaks(plan, batch=rows * 16).values()
    # After the second block the first output is kept for backward. The gradient of the second output, one number that is
    # expanded, then makes the second weight's gradient and the first output's.
    parts = dict(peak.parts)
    step = parts.pop("gradients, activations and gathered parameters")
    assert parts == {"parameters": weights, "optimizer": 2 * weights, "batch": rows * 16}
    assert weights < step <= weights + rows * (8 + 32) + 64
    assert peak.bytes == plan.peak_bytes + rows * 16 and peak.memory == "device"


def test_host_and_disk_by_hand():
    """Two ranks with halves of the states on disk: two slots of whole blocks of 4,096 bytes for masters and moments each."""
    widths, weights = [64, 128, 64], [64 * 128, 128 * 64]
    plan = planned(
        widths, sl.zero(2), sl.precision("bf16", reduce_dtype="bf16"), sl.offload("disk", folder="states"), ranks=2
    )
    peaks = memory_peaks(plan)
    halves = [count // 2 for count in weights]
    states = sum(3 * 4 * half for half in halves)  # masters and two moments, all multiples of 4,096 bytes
    assert peaks["disk"].parts == {"optimizer": 2 * states} and peaks["disk"].when == "at all times"
    assert peaks["host"].parts == {
        "gradients": sum(2 * half for half in halves),
        "optimizer": states,
        "parameters on their way": sum(2 * half for half in halves),  # two slots, for two buckets
    }
    assert re.fullmatch(r"in the update of bucket [01]/bfloat16", peaks["host"].when)
    assert peaks["device"].parts["parameters"] == 2 * sum(weights) and "optimizer" not in peaks["device"].parts


@pytest.mark.parametrize(
    ("widths", "when"),
    [
        ([4, 4, 4, 4096], "in backward of block 3"),  # the widest weight's gradient
        ([4096, 4, 4, 4], "in backward of block 1"),
    ],
)
def test_the_phase_of_the_peak(widths, when):
    assert memory_peaks(planned(widths, sl.remat()))["device"].when == when


def test_phases_without_blocks():
    params = {"w": torch.zeros(256, 256, device="meta")}
    loss_fn = lambda p, x: (x @ p["w"]).square().mean()  # noqa: E731
    plan = sl.make_plan(params, sl.abstract_mesh(data=1), loss_fn=loss_fn, batch=torch.empty(2, 256), optimizer=ADAM)
    assert memory_peaks(plan)["device"].when == "in backward"


def test_operations_are_counted():
    """A product of n × a and a × b takes 2nab, and its backward twice that; recompute adds a forward."""
    forward = 2 * 4 * (16 * 8 + 8 * 32)
    (trace,), (again,) = planned([16, 8, 32]).traces, planned([16, 8, 32], sl.remat()).traces
    first = 2 * 4 * 16 * 8  # the batch needs no gradient
    assert trace.flops == (forward, 2 * forward - first)
    assert again.flops[0] == forward and again.flops[1] >= trace.flops[1]


def test_every_memory_that_does_not_fit_is_named():
    with pytest.raises(IllegalComposition) as refused:
        planned(
            [256] * 5, sl.zero(2), sl.offload("disk", folder="x"), ranks=8, rows=2,
            device_memory="100kB", host_memory="300kB", disk="1MiB", ranks_per_host=2,
        )  # fmt: skip
    message = str(refused.value)
    assert message.startswith("this plan does not fit:\n  - a rank holds ")
    misfits = message.partition("\nNo change")[0].partition("\nThe cheapest")[0]
    assert len(misfits.splitlines()) == 4
    assert "in backward of block" in misfits and "device_memory=100000 is 100 kB" in misfits
    assert "2 ranks of a host hold" in misfits and "host_memory=300000 is 300 kB" in misfits
    assert "in disk memory, at all times: optimizer" in misfits and "disk=1048576 is 1.049 MB" in misfits


def edited(message, parallel):
    """The chain with the changes that a message names, made from their code."""
    members = list(parallel.transforms)
    codes = re.search(r"(?:that fits: |these do: )(.*)\. A step takes about", message)[1]
    for code in codes.split("; "):
        after, _, before = code.removeprefix("add ").partition(" in place of ")
        if code.startswith("leave out "):
            after, before = "", code.removeprefix("leave out ")
        assert not before or before in [repr(member) for member in members]
        members = [member for member in members if repr(member) != before]
        members += [eval(after, {"sl": sl})] if after else []
    return sl.chain(*members)


def waves(ranks, shape=(34, 32)):
    """``plan(parallel, **limits)`` of three blocks that keep four activations each, and bytes of the batch."""
    wave = sl.block(lambda p, x: (x @ p["w"]).sin().cos().sin().cos())

    def loss_fn(params, x):
        for p in params:
            x = wave(p, x)
        return x.sum()

    params, batch = (
        [{"w": torch.zeros(32, 32, device="meta")} for _ in range(3)],
        torch.empty(shape),
    )  # two halves, and no quarters

    def plan(parallel, **limits):
        return sl.make_plan(
            params, sl.abstract_mesh(data=ranks), parallel, loss_fn=loss_fn, batch=batch, optimizer=ADAM, **limits
        )

    return plan, batch.nbytes


@pytest.mark.parametrize(
    ("ranks", "parallel", "share"),
    [(4, sl.chain(sl.zero(1), sl.precision("bf16")), 0.9), (2, sl.chain(sl.zero(2), sl.offload()), 0.8)],
)
def test_the_cheapest_change_is_named_and_fits(ranks, parallel, share):
    """Whatever the search skips, it is not the cheapest change that fits."""
    plan, batch = waves(ranks)
    budget = int(share * (plan(parallel).peak_bytes + batch))
    with pytest.raises(IllegalComposition, match="The cheapest change that fits: ") as refused:
        plan(parallel, device_memory=budget)
    named = edited(str(refused.value), parallel)
    found = plan(named, device_memory=budget)
    assert f"device_memory={budget} is" in str(found)
    seconds = []
    for changed in changes(parallel, {"device"}, {"data": ranks}, 34, elementwise=True, disk=False):
        try:
            seconds.append(nominal_seconds(plan(changed, device_memory=budget)))
        except IllegalComposition:
            continue
    assert len(seconds) > 2 and nominal_seconds(found) == min(seconds)


def test_recomputing_is_named_where_it_is_the_cheapest():
    # One row, which no micro-batches share; activations beside which states are small, and operators' fixed times too.
    plan, batch = waves(ranks=1, shape=(1, 1 << 14, 32))
    parallel = sl.chain(sl.zero(0))
    budget = int(0.8 * (plan(parallel).peak_bytes + batch))
    with pytest.raises(
        IllegalComposition, match=r"The cheapest change that fits: add sl.remat\(blocks=\d\)"
    ) as refused:
        plan(parallel, device_memory=budget)
    plan(edited(str(refused.value), parallel), device_memory=budget)


def test_several_changes_together():
    plan, batch = waves(ranks=1)
    parallel = sl.chain(sl.zero(0))
    alone = [plan(sl.chain(sl.zero(0), more)) for more in (sl.offload(params="host", gradients="host"), sl.remat())]
    budget = int(0.7 * min(found.peak_bytes for found in alone) + batch)
    with pytest.raises(IllegalComposition, match=r"No change fits alone, but together these do: .*; ") as refused:
        plan(parallel, device_memory=budget)
    assert plan(edited(str(refused.value), parallel), device_memory=budget).traces


def test_what_nothing_makes_fit():
    told = r"No change fits alone, nor do several together that were tried; the least is held with .*sl\."
    with pytest.raises(IllegalComposition, match=told):
        planned([64, 64, 64], sl.zero(0), device_memory=100)


def test_ranks_of_a_host_share_its_memory():
    """Two stages of a pipeline with different states: neighbours along the last axis are on one host."""
    loss_fn, params = tiny_blocks()
    batch = token_batches(1, rows=4)[0]

    def plan(**limits):
        parallel = sl.chain(sl.zero(0), sl.pipeline("1f1b", 2), sl.offload())
        return sl.make_plan(
            params, sl.abstract_mesh(data=2, pipe=2), parallel, loss_fn=loss_fn, batch=batch, optimizer=ADAM, **limits
        )

    made = plan()
    first, second = (memory_peaks(view)["host"].bytes for view in made.views)
    assert first != second
    for ranks, held in ((1, max(first, second)), (2, first + second), (4, 2 * (first + second))):
        (use,) = Limits({"host": held}, ranks, 0).uses(made)
        assert (use.bytes, use.ranks, use.fits) == (held, ranks, True)
        assert plan(host_memory=held, ranks_per_host=ranks) == made
        with pytest.raises(IllegalComposition, match=rf"host_memory={held - 1} is"):
            plan(host_memory=held - 1, ranks_per_host=ranks)
    assert plan(host_memory=2 * (first + second)) == made  # without ranks, all are on one host


@pytest.mark.parametrize(
    ("mesh", "parallel"),
    [
        ({"pipe": 2}, sl.pipeline("1f1b", 2)),
        ({"data": 1}, sl.zero(0)),
        ({"data": 1}, sl.accumulate(2)),
    ],
)
def test_blocks_are_counted_without_recompute(mesh, parallel):
    loss_fn, params = tiny_blocks()
    job = {"loss_fn": loss_fn, "batch": token_batches(1, rows=4)[0], "optimizer": ADAM}

    def blocks(*transforms):
        plan = sl.make_plan(params, sl.abstract_mesh(**mesh), sl.chain(parallel, *transforms), **job)
        return [trace.blocks for trace in plan.traces]

    assert blocks() == blocks(sl.remat()) and sum(blocks()) == len(params)


def test_limits_need_a_whole_step():
    with pytest.raises(TypeError, match=r"make_plan\(host_memory=, disk=\) weighs a whole step: give loss_fn=, batch="):
        sl.make_plan({"w": torch.ones(2)}, sl.abstract_mesh(data=1), host_memory="1GB", disk=10)
    with pytest.raises(ValueError, match=r"'1 gig' is not a size"):
        planned([2, 2], device_memory="1 gig")


def test_a_plan_within_its_limits_says_what_is_left():
    text = str(planned([16, 16], sl.zero(0), sl.offload(), device_memory="1MB", host_memory="1GiB"))
    assert re.search(r"\na rank holds .* in device memory, in .*; device_memory=1000000 is 1 MB", text)
    assert re.search(r"\na rank holds .* in host memory, at all times: gradients .*; host_memory=1073741824 is", text)


@pytest.mark.parametrize("ranks", [-1, 0, True, 1.5])
def test_ranks_per_host_are_a_number_of_ranks(ranks):
    with pytest.raises(ValueError, match=r"ranks_per_host=.*: give the number of ranks that share a host, at least 1"):
        planned([2, 2], sl.zero(0), sl.offload(), host_memory=1, ranks_per_host=ranks)


def test_a_loss_that_runs_on_whole_batches_alone():
    """What a candidate's trace raises is the loss's own error, and no one asked for that candidate."""

    def loss_fn(params, x):
        return (x.view(64, 128) @ params["w"]).sin().cos().sum()

    params = {"w": torch.zeros(128, 128, device="meta")}
    with pytest.raises(IllegalComposition, match="this plan does not fit"):
        sl.make_plan(
            params, sl.abstract_mesh(data=1), sl.zero(0), loss_fn=loss_fn, batch=torch.empty(64, 128), optimizer=ADAM,
            device_memory=100_000,
        )  # fmt: skip


def test_a_batch_of_arrays_counts():
    batch = np.zeros((4096, 128), dtype=np.float32)
    params = {"w": torch.zeros(128, 8, device="meta")}
    loss_fn = lambda p, x: (x @ p["w"]).sum()  # noqa: E731
    for given in (batch, torch.from_numpy(batch)):
        with pytest.raises(IllegalComposition, match=r"batch 2\.097 MB.*\n[^.]*sl\.accumulate"):
            sl.make_plan(
                params, sl.abstract_mesh(data=1), sl.zero(0), loss_fn=loss_fn, batch=given, optimizer=ADAM,
                device_memory=batch.nbytes + 100_000,
            )  # fmt: skip


def test_changes_are_those_that_the_optimizer_can_train_with():
    """What reads across elements has all states in one memory, and what reads across parameters has none on disk."""
    for tx, disk, share in (
        (ADAM, True, True),
        (sl.optim.lamb(1e-3), True, False),
        (sl.optim.adafactor(1e-3), True, False),
        (sl.optim.muon(1e-3), True, False),
        (sl.optim.chain(sl.optim.lamb(1e-3), sl.optim.clip_by_global_norm(1.0)), False, False),
        (sl.optim.adamw8bit(1e-3), True, True),
    ):
        found = make_plan_edits(tx)
        assert ("offload('disk'" in found, "fraction=" in found) == (disk, share)


def make_plan_edits(tx):
    """The names of the edited transforms that a refusal plans."""
    params, batch = [{"w": torch.zeros(64, 64, device="meta")}], torch.empty(4, 64)
    planned = []

    def loss_fn(params, x):
        return (x @ params[0]["w"]).sum()

    make = sl.make_plan.__globals__["changes"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            sl.make_plan.__globals__,
            "changes",
            lambda *args, **options: planned.extend(edit.name for edit in make(*args, **options)) or [],
        )
        with pytest.raises(IllegalComposition, match="There is no change that holds less"):
            sl.make_plan(
                params, sl.abstract_mesh(data=1), loss_fn=loss_fn, batch=batch, optimizer=tx,
                device_memory=1, disk="1TB",
            )  # fmt: skip
    return " ".join(planned)


@pytest.mark.parametrize(
    "moved",
    [
        {"params": "host", "gradients": "host"},
        {"fraction": 0.75},
        {"speculate": True},
        {"delay": True},
    ],
)
def test_a_host_that_is_too_small_is_given_less(moved):
    plan, _ = waves(ranks=1)
    parallel = sl.chain(sl.zero(0), sl.offload(**moved))
    limits = {"device_memory": "1GB", "host_memory": int(0.9 * memory_peaks(plan(parallel))["host"].bytes)}
    with pytest.raises(IllegalComposition, match=r"The cheapest change that fits") as refused:
        plan(parallel, **limits)
    assert plan(edited(str(refused.value), parallel), **limits).traces


def test_states_on_disk_may_take_parameters_along_without_a_limit_of_the_disk():
    widths, rest = [128] * 13, (sl.zero(0), sl.remat())
    states = sl.offload("disk", folder="f")
    both, host = (
        planned(widths, *rest, sl.offload("disk", params=params, folder="f"), rows=1) for params in ("disk", "host")
    )
    held = [memory_peaks(plan)["host"].bytes for plan in (both, host)]
    assert held[0] < held[1]
    limits = {
        "device_memory": int(0.8 * planned(widths, *rest, states, rows=1).peak_bytes),
        "host_memory": sum(held) // 2,
    }
    with pytest.raises(IllegalComposition, match=r"add|in place of") as refused:
        planned(widths, *rest, states, rows=1, **limits)
    assert planned(widths, *edited(str(refused.value), sl.chain(*rest, states)).transforms, rows=1, **limits).traces


def test_the_phase_of_the_peak_of_a_later_micro_batch():
    """The second micro-batch finds the sums of the first, so its peak is the higher one; blocks count from 1 in each."""
    (trace,) = planned([4096, 4, 4, 4], sl.zero(0), sl.remat(), sl.accumulate(2)).traces
    assert trace.peak > trace.live and trace.peak_in == "backward of block 1"


def test_of_equal_peaks_the_first_is_told():
    late, early = Peak(5, "forward of block 1"), Peak(5, "backward of block 3")
    assert early.or_higher(late) is early and late.or_higher(early) is late
    assert early.or_higher(Peak(6, "")) == Peak(6, "") and Peak(4, "").or_higher(early) is early


def test_a_refusal_traces_no_more_than_it_must(monkeypatch):
    """Candidates that would take longer than one that fits are not traced."""
    plan, batch = waves(ranks=4)
    parallel = sl.chain(sl.zero(1), sl.precision("bf16"))
    budget = int(0.9 * (plan(parallel).peak_bytes + batch))
    traced, trace = [], Tracing.traced
    monkeypatch.setattr(Tracing, "traced", lambda self, plan: traced.append(plan) or trace(self, plan))
    with pytest.raises(IllegalComposition, match="The cheapest change that fits"):
        plan(parallel, device_memory=budget)
    assert 1 < len(traced) <= 7  # to plan every change takes 13; the plan, and six that may take as long as it does
