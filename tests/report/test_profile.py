"""Profiles of steps: times that add up, names, bytes that are the plan's, ranks that come late, traces and pictures."""

import json
import sys
import time

import pytest
import torch

import shardlib as sl
from shardlib.common.environment import environment
from shardlib.models import gpt
from shardlib.plan.prediction import predict_step
from shardlib.report.profile import value
from shardlib.report.profile.comm import Stragglers
from shardlib.report.profile.recording import OUTSIDE, RecordedStep, Recording, stepped
from shardlib.report.profile.timeline import REST, Part, Span, StepTimeline

CONFIG = gpt.GPTConfig(vocab=64, layers=2, width=32, heads=4, sequence=16)


def batch(rows=4):
    drawn = torch.randint(64, (rows, 17), generator=torch.Generator().manual_seed(0))
    return {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}


def a_step(mesh, *transforms, blocks=False):
    """State, step and plan of a GPT."""
    loss_fn, params = gpt.make_loss(CONFIG), gpt.init(CONFIG)
    if blocks:
        loss_fn, params = gpt.make_sequential(CONFIG), gpt.to_blocks(params)
    optimizer, parallel = sl.optim.adamw(1e-3), sl.chain(*transforms)
    plan = sl.make_plan(params, mesh, parallel, loss_fn=loss_fn, batch=batch(), optimizer=optimizer)
    return *sl.make_train_step(loss_fn, sl.shard(params, mesh, parallel), optimizer), plan


CHAINS = {
    "stage 0": lambda: [sl.zero(0)],
    "stage 1": lambda: [sl.zero(1)],
    "stage 2": lambda: [sl.zero(2), sl.accumulate(2)],
    "stage 3": lambda: [sl.zero(3), sl.remat()],
    "quantised": lambda: [sl.zero(3), sl.quantize(axis="data", gradients="int8")],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_times_add_up_and_bytes_are_the_plans(chain):
    def run(mesh):
        state, step, plan = a_step(mesh, *CHAINS[chain]())
        start = time.perf_counter()
        found = sl.profile(step, state, batch(), steps=1, warm=2, plan=plan)
        taken = time.perf_counter() - start
        assert sum(found.by_kind.values()) == pytest.approx(found.seconds)
        assert sum(found.step.own().values()) == pytest.approx(found.seconds)
        assert min(found.step.own().values()) >= 0 and found.seconds < taken
        assert found.comm.payload == plan.payload() == {axis: of.payload for axis, of in found.by_axis.items()}
        assert {"embed", "head", "blocks/0", "blocks/1"}.issuperset(found.by_block.keys() - {OUTSIDE})
        assert found.by_block.keys() == {"blocks/0", "blocks/1", OUTSIDE}
        recomputed = sum(ways["recompute"] for ways in found.by_block.values())
        assert (recomputed > 0) == bool(plan.step.remat)
        return found.state.step

    assert sl.simulate(run, mesh={"data": 2}) == [5, 5]


@pytest.mark.parametrize(
    ("mesh", "transforms"),
    [
        ({"data": 2, "model": 2}, lambda: [sl.zero(3), sl.tensor_slicing(gpt.slicing_rules(CONFIG), axis="model")]),
        ({"pipe": 2}, lambda: [sl.pipeline("1f1b", microbatches=2, axis="pipe")]),
        ({"pipe": 2}, lambda: [sl.pipeline("zb-h1", microbatches=4, axis="pipe"), sl.remat()]),
    ],
)
def test_slices_and_stages(mesh, transforms):
    def run(mesh):
        blocks = "pipe" in mesh.shape
        state, step, plan = a_step(mesh, *transforms(), blocks=blocks)
        found = sl.profile(step, state, batch(), steps=2, warm=1, plan=plan)
        assert sum(found.by_kind.values()) == pytest.approx(found.seconds)
        ways = {way for of in found.by_block.values() for way, seconds in of.items() if seconds}
        assert ways >= {"forward", "backward"}
        return found, plan.payload()

    results = sl.simulate(run, mesh=mesh)
    for found, planned in results:
        assert found.comm.payload == planned
        for meeting in found.comm.meetings:
            assert len(meeting.of) == 2 and meeting.late >= 0
    names = {name for found, _ in results for name in found.by_block} - {OUTSIDE}
    assert names == ({"0", "1", "2", "3"} if "pipe" in mesh else {"blocks/0", "blocks/1"})


def test_the_wall_time_is_the_steps():
    """Against a clock outside: of a step that sleeps, so that a busy machine changes little."""

    def loss_fn(p, x):
        time.sleep(0.1)
        return (x @ p["w"]).sum()

    state, step = sl.make_train_step(loss_fn, {"w": torch.ones(4, 4)}, sl.optim.sgd(0.1))
    state, _ = step(state, torch.ones(2, 4))
    start = time.perf_counter()
    state, record = stepped(step, state, torch.ones(2, 4))
    assert record.seconds == pytest.approx(time.perf_counter() - start, rel=0.03)
    forward = Part("compute", "forward", OUTSIDE)
    assert record.own()[forward] == pytest.approx(record.seconds, rel=0.2)


def test_on_one_rank_the_prediction_is_the_measurement():
    """Nothing is exchanged: what is predicted is what was computed, of the same steps."""
    state, step, _ = a_step(sl.make_mesh(), sl.accumulate(2))
    found = sl.profile(step, state, batch(), steps=1)
    assert found.predicted.total == pytest.approx(found.seconds, rel=0.03)


def test_the_prediction_is_of_what_a_1_bit_optimizer_sends(monkeypatch):
    """Whole gradients while its variance is not frozen, and few bits since, as in the steps that were recorded."""
    asked = []

    def predict(*args, owned=False, **more):
        asked.append(owned)
        return predict_step(*args, owned=owned, **more)

    monkeypatch.setattr(value, "predict_step", predict)

    def run(mesh):
        loss_fn, tx = gpt.make_loss(CONFIG), sl.optim.onebit_adam(1e-3, freeze_step=4)
        state, step = sl.make_train_step(loss_fn, sl.shard(gpt.init(CONFIG), mesh, sl.zero(0)), tx)
        before = sl.profile(step, state, batch(), steps=1, warm=1)  # and two steps after the recorded one
        since = sl.profile(step, before.state, batch(), steps=1, warm=1)
        plan = sl.make_plan(gpt.init(CONFIG), mesh, sl.zero(0), optimizer=tx)
        assert before.comm.payload == plan.payload() and since.comm.payload == plan.payload(owned=True)

    sl.simulate(run, mesh={"data": 2})
    assert sorted(asked) == [False, False, True, True]


def test_steps_without_a_profile_have_no_clock():
    def run(mesh):
        state, step, _ = a_step(mesh, sl.zero(3))
        groups = dict(mesh._groups)
        found = sl.report.comm(step, state, batch())
        assert mesh._groups == groups and environment().clock is None and environment().phases_of is None
        with pytest.raises(RuntimeError, match="stop"):
            stepped(lambda *_: (_ for _ in ()).throw(RuntimeError("stop")), found.state, None)
        assert mesh._groups == groups and environment().clock is None and environment().phases_of is None

    sl.simulate(run, mesh={"data": 2})


def test_profiled_steps_train_like_others():
    def run(mesh):
        state, step, _ = a_step(mesh, sl.zero(3), sl.remat())
        found = sl.profile(step, state, batch(), steps=2, warm=1)
        other, step, _ = a_step(mesh, sl.zero(3), sl.remat())
        for _ in range(5):
            other, _ = step(other, batch())
        for mine, theirs in zip(found.state.params.buffers.values(), other.params.buffers.values(), strict=True):
            assert torch.equal(mine, theirs)

    sl.simulate(run, mesh={"data": 2})


def slow_on(mesh, rank, seconds):
    """A loss function whose backward sleeps on one rank."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if mesh.rank == rank:
                time.sleep(seconds)
            return grad

    return lambda p, x: Slow.apply(x @ p["w"]).sum()


def test_a_late_rank_is_found_among_processes(pool):
    def run(mesh):
        from test_profile import slow_on

        params = sl.shard({"w": torch.ones(4, 4)}, mesh, stage=2)
        payload = params.plan.payload()
        state, step = sl.make_train_step(slow_on(mesh, 1, 0.2), params, sl.optim.sgd(0.1))
        late = sl.report.stragglers(step, state, torch.ones(2, 4), steps=3, warm=1)
        comm = sl.report.comm(step, late.state, torch.ones(2, 4))
        scattered = next(line for line in comm.lines if line.op == "reduce_scatter")
        assert comm.payload == payload
        return late.late, late.ranks, scattered.last, scattered.late, str(late)

    for late, ranks, last, seconds, text in pool.run(run, mesh={"data": 3}):
        assert late.rank == 1 and late.most == "backward"
        assert late.behind == pytest.approx(0.2, rel=0.3)
        assert max(ranks, key=lambda rank: rank.waited).rank != 1
        assert last == 1 and seconds == pytest.approx(0.2, rel=0.3)
        assert "rank 1 is late by" in text and "most of it in backward" in text


def test_a_trace_nests_by_rank(tmp_path):
    def run(mesh):
        state, step, _ = a_step(mesh, sl.zero(3))
        return sl.profile(step, state, batch(), steps=2)

    found = sl.simulate(run, mesh={"data": 2})[0]
    found.trace(tmp_path / "deep" / "trace.json")
    events = json.loads((tmp_path / "deep" / "trace.json").read_text())["traceEvents"]
    for rank in range(2):
        spans = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
        assert sum(event["name"] == "step" for event in spans) == 2
        open_ = []
        for event in spans:
            end = event["ts"] + event["dur"]
            while open_ and event["ts"] >= open_[-1] - 1e-3:
                open_.pop()
            assert not open_ or end <= open_[-1] + 1e-3, event
            open_.append(end)
        assert {"forward: blocks/0", "backward: blocks/1", "optimizer"} <= {event["name"] for event in spans}


def test_pictures_and_tables(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")

    def run(mesh):
        state, step, _ = a_step(mesh, sl.zero(3), sl.remat())
        return sl.profile(step, state, batch(), steps=1)

    found = sl.simulate(run, mesh={"data": 2})[0]
    found.plot(tmp_path / "profile.png")
    found.comm.plot(tmp_path / "comm.png")
    for name in ("profile.png", "comm.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    text = str(found)
    for word in ("GFLOP", "of the peak", "matmul", "blocks/1", "recompute", "waited, ms", "predicted"):
        assert word in text
    assert "reduce_scatter" in str(found.comm) and "a rank sends" in str(found.comm)
    for name in ("figure", "patches"):
        monkeypatch.setitem(sys.modules, f"matplotlib.{name}", None)
    for draws in (found, found.comm, found.memory):
        with pytest.raises(ImportError, match=r"pip install 'shardlib\[notebooks\]'"):
            draws.plot(tmp_path / "none.png")


def test_the_peak_of_a_device_is_measured_once():
    first = sl.report.measure_peak()
    assert sl.report.measure_peak() == first > 1e8


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_the_peak_is_of_what_is_computed_with(dtype):
    """Not of a frozen leaf's codes, however many these are, which have no products or slow ones."""

    def loss_fn(p, x):
        return (x @ p["w"] * p["codes"][0, 0].real.float()).square().mean()

    params = sl.shard(
        {"w": torch.ones(8, 8), "codes": torch.ones(64, 64).to(dtype)}, sl.make_mesh(), sl.freeze("codes")
    )
    state, step = sl.make_train_step(loss_fn, params, sl.optim.sgd(0.1))
    assert sl.profile(step, state, torch.ones(4, 8), steps=1).peak == sl.report.measure_peak(dtype=torch.float32)


def test_own_times_of_nested_parts():
    timeline = StepTimeline(torch.device("cpu"))
    place = timeline.open(Part("compute", "forward", "a"))
    with timeline.within(Part("wait", "data")):
        timeline.turn(place, Part("compute", "forward", "b"))  # nothing changes within a further part
        time.sleep(0.02)
    timeline.turn(place, Part("compute", "forward", "b"))
    time.sleep(0.01)
    timeline.close(place)
    spans = timeline.end()
    assert [(span.part.name or span.part.kind, span.depth) for span in spans] == [
        ("other", 0), ("a", 1), ("wait", 2), ("b", 1),
    ]  # fmt: skip
    own = {span.part: span.own for span in spans}
    assert own[Part("wait", "data")] >= 0.02 and own[Part("compute", "forward", "b")] >= 0.01
    assert own[Part("compute", "forward", "a")] < 0.02
    assert sum(own.values()) == pytest.approx(spans[0].end)


def test_what_cannot_be_recorded_is_refused():
    state, step, _ = a_step(sl.make_mesh())
    for call in (sl.profile, sl.report.comm, sl.report.stragglers, sl.report.memory):
        with pytest.raises(TypeError, match=f"{call.__name__}: the state is a list; pass the one that make_train_step"):
            call(step, [state], batch())
        with pytest.raises(ValueError, match="warm=-1; record at least one step"):
            call(step, state, batch(), warm=-1)
    for call in (sl.profile, sl.report.memory):
        with pytest.raises(TypeError, match=r"the plan is a Zero; pass the one that sl\.make_plan returned"):
            call(step, state, batch(), plan=sl.zero(0))
        for mesh, said in (
            (sl.abstract_mesh(data=4), "axis 'data': size 4 in the plan, size 1 in the state"),
            (sl.make_mesh(), r"blocks/0/attn/out/bias: not there in the plan, \(32,\) as P\(\) in the state"),
        ):
            other = sl.make_plan({"w": torch.ones(8, 8)}, mesh)
            with pytest.raises(ValueError, match=f"{call.__name__}: the plan is not that of this state:\n  - {said}"):
                call(step, state, batch(), plan=other)
    with pytest.raises(ValueError, match="steps='2'"):
        sl.profile(step, state, batch(), steps="2")
    with pytest.raises(ValueError, match="profile: steps=0"):
        sl.profile(step, state, batch(), steps=0)


def test_a_recording_knows_its_rank():
    assert Recording({"data": 2}, (), 1, [["a"], ["b"]]).steps == ["b"]


def test_ranks_are_compared_within_their_stage():
    """Stages differ in what they compute, and nobody is late for that."""

    def steps(seconds):
        return [RecordedStep(0.0, [Span(REST, 0.0, seconds, 0, seconds)], [])]

    ranks = [steps(1.0), steps(1.0), steps(3.0), steps(5.0)]
    found = Stragglers(Recording({"pipe": 2, "data": 2}, ("pipe",), 0, ranks), None)
    assert [rank.behind for rank in found.ranks] == [0.0, 0.0, -2.0, 2.0] and found.late.rank == 3
    alone = Stragglers(Recording({"pipe": 2}, ("pipe",), 0, ranks[::2]), None)
    assert alone.late is None and "no rank is late" in str(alone)
