"""The memory of a step by name: no byte without one, and the peak that is counted from outside and planned."""

import pytest
import torch
from helpers.measure import WatchPeak, stored_bytes

import shardlib as sl
from shardlib.models import gpt
from shardlib.report.profile.memory import KINDS

CONFIG = gpt.GPTConfig(vocab=256, layers=2, width=64, heads=4, sequence=32)
CHAINS = {
    "stage 0": lambda: [sl.zero(0)],
    "stage 1, dots": lambda: [sl.zero(1), sl.remat("dots")],
    "stage 2, accumulated": lambda: [sl.zero(2), sl.accumulate(2), sl.precision("bf16")],
    "stage 3, recomputed": lambda: [sl.zero(3), sl.remat()],
    "stage 3, by name": lambda: [sl.zero(3), sl.remat(save=["mlp/hidden"])],
    "offloaded": lambda: [sl.zero(1), sl.offload()],
}


def measured(mesh, chain):
    drawn = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous()}
    loss_fn, params, parallel, tx = gpt.make_loss(CONFIG), gpt.init(CONFIG), sl.chain(*chain()), sl.optim.adamw(1e-3)
    plan = sl.make_plan(params, mesh, parallel, loss_fn=loss_fn, batch=batch, optimizer=tx)
    state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, parallel), tx)
    for _ in range(2):
        state, _ = step(state, batch)
    stored = stored_bytes((state.params.buffers, state.opt, batch), counters=True)
    with WatchPeak() as watch:
        found = sl.report.memory(step, state, batch, warm=0, plan=plan)
    return found, watch.peak() + stored, plan


@pytest.mark.parametrize("chain", CHAINS)
def test_every_byte_has_a_name(chain):
    for found, peak, plan in sl.simulate(measured, CHAINS[chain], mesh={"data": 2}):
        assert found.peak == pytest.approx(peak, rel=0.01)
        assert sum(found.held.values()) == sum(found.by_kind.values()) == found.peak
        assert found.by_kind.get("other", 0) < 0.01 * found.peak
        assert found.by_kind["parameters"] == plan.bytes("param")
        assert found.by_kind["optimizer"] == pytest.approx(plan.bytes("optimizer"), abs=64)
        paths = {name.of for name in found.held if name.kind == "parameters"}
        assert paths == {path for bucket in plan.buckets for path in bucket.paths}
        assert all(name.kind in KINDS and name.of for name in found.held)


@pytest.mark.parametrize("transforms", [[], [sl.precision("bf16")]])
def test_a_state_that_is_kept_is_beside_the_next_one(transforms):
    """Both under the names of their leaves, though the second one is made in the step."""

    def run(mesh):
        params, parallel = {"w": torch.ones(64, 64), "g": torch.ones(64)}, sl.chain(sl.zero(1), *transforms)
        tx = sl.optim.adam(0.1)
        plan = sl.make_plan(params, mesh, parallel, optimizer=tx)
        loss_fn, params = lambda p, x: (x @ p["w"] * p["g"]).square().mean(), sl.shard(params, mesh, parallel)
        state, step = sl.make_train_step(loss_fn, params, tx, donate=False)
        return sl.report.memory(step, state, torch.ones(8, 64)), plan

    for found, plan in sl.simulate(run, mesh={"data": 2}):
        assert found.by_kind["parameters"] == 2 * plan.bytes("param")
        assert found.by_kind["optimizer"] == pytest.approx(2 * plan.bytes("optimizer"), abs=64)
        assert found.by_kind.get("other", 0) < 64
        assert {name.of for name in found.held if name.kind == "parameters"} == {"w", "g"}


REMAT = {"none": [], "full": [sl.remat()], "dots": [sl.remat("dots")], "names": [sl.remat(save=["attn/out"])]}


@pytest.mark.nightly
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("remat", REMAT)
@pytest.mark.parametrize("others", [[], [sl.offload()], [sl.accumulate(2)], [sl.precision("bf16")]])
def test_every_byte_has_a_name_in_every_combination(stage, remat, others):
    for found, peak, _ in sl.simulate(measured, lambda: [sl.zero(stage), *REMAT[remat], *others], mesh={"data": 2}):
        assert found.peak == pytest.approx(peak, rel=0.01)
        assert found.by_kind.get("other", 0) < 0.01 * found.peak


def test_the_peak_is_the_plans():
    """In bytes, and in the part of the step. At stage 3 the plan's network takes as long as it may, and this one no time."""
    for chain, part, above in (("stage 0", "outside of blocks", 0.001), ("stage 3, recomputed", "blocks/1", 0.05)):
        for found, _, _ in sl.simulate(measured, CHAINS[chain], mesh={"data": 2}):
            assert (1 - above) * found.planned[0] <= found.peak <= 1.001 * found.planned[0]
            assert (found.when.way, found.when.name) == ("backward", part)
            assert found.planned[1].startswith("in backward of")
            assert "planned" in str(found) and "blocks/1: mlp/hidden" in str(found)


def test_units_are_gathered_and_given_back():
    """At most two neighbours at once, and none in the end."""
    for found, _, plan in sl.simulate(measured, CHAINS["stage 3, recomputed"], mesh={"data": 2}):
        gathered = {}
        for change in found.changes:
            if change.name.kind == "gathered":
                gathered[change.name.of] = gathered.get(change.name.of, 0) + change.bytes
                assert sum(count > 0 for count in gathered.values()) <= 2
        assert gathered == dict.fromkeys(plan.units, 0)


def test_a_picture_of_memory(tmp_path):
    pytest.importorskip("matplotlib")
    found, _, _ = sl.simulate(measured, CHAINS["stage 0"], mesh={"data": 1})[0]
    found.plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_batch_that_is_a_view_is_counted_whole():
    whole = torch.ones(8, 4)
    state, step = sl.make_train_step(lambda p, x: (x @ p["w"]).sum(), {"w": torch.ones(2, 2)}, sl.optim.sgd(0.1))
    found = sl.report.memory(step, state, {"x": whole[:, :2]}["x"])
    assert found.by_kind["batch"] == whole.nbytes


def test_constants_that_a_loss_closes_over_are_not_counted():
    """Nor are they where a view of them is taken: a teacher's weights are no activations."""
    teacher, tx = torch.nn.Linear(256, 256), sl.optim.sgd(1e-3)
    loss_fn = lambda p, x: (teacher(x).detach() @ p["w"]).square().mean()  # noqa: E731
    state, step = sl.make_train_step(loss_fn, {"w": torch.ones(256, 2)}, tx)
    stored = stored_bytes((state.params.buffers, x := torch.ones(4, 256)))
    plan = sl.make_plan({"w": torch.ones(256, 2)}, sl.make_mesh(), loss_fn=loss_fn, batch=x, optimizer=tx)
    with WatchPeak() as watch:
        found = sl.report.memory(step, state, x, plan=plan)
    assert found.planned[0] == pytest.approx(found.peak, rel=0.01)
    assert found.peak == pytest.approx(watch.peak() + stored, rel=0.01)
    assert found.peak < teacher.weight.nbytes


def test_a_batch_of_arrays_is_counted_as_one_of_tensors():
    def found(x):
        params, loss_fn, tx = {"w": torch.ones(2, 4)}, lambda p, x: (x @ p["w"].T).sum(), sl.optim.sgd(0.1)
        state, step = sl.make_train_step(loss_fn, params, tx)
        plan = sl.make_plan(params, sl.make_mesh(), loss_fn=loss_fn, batch=x, optimizer=tx)
        return sl.report.memory(step, state, x, plan=plan)

    tensors, arrays = found(torch.ones(64, 4)), found(torch.ones(64, 4).numpy())
    assert (arrays.planned, arrays.by_kind) == (tensors.planned, tensors.by_kind)
    assert arrays.by_kind["batch"] == 64 * 4 * 4


def test_donated_memory_is_not_counted_twice():
    """An update in place makes no second copy of parameters or moments."""
    found, _, _ = sl.simulate(measured, CHAINS["stage 0"], mesh={"data": 1})[0]
    level = sum(change.bytes for change in found.changes if change.name.kind in ("parameters", "optimizer"))
    assert level <= found.by_kind["parameters"] + found.by_kind["optimizer"]


def test_what_inference_mode_computes_is_counted():
    """Composite operators are whole there: a cross entropy's log-softmax is seen, as it is in no_grad."""

    def peaks(mode):
        def loss_fn(p, x):
            with mode():
                weight = torch.nn.functional.cross_entropy(x, torch.zeros(512, dtype=torch.int64))
            return (x[:4] @ p["w"]).square().mean() * weight.clone()

        params, x = {"w": torch.ones(256, 2)}, torch.ones(512, 256)
        plan = sl.make_plan(params, sl.make_mesh(), loss_fn=loss_fn, batch=x, optimizer=sl.optim.sgd(0.1))
        state, step = sl.make_train_step(loss_fn, params, sl.optim.sgd(0.1))
        return sl.report.memory(step, state, x).peak, plan.peak_bytes

    assert peaks(torch.inference_mode) == peaks(torch.no_grad)
    assert min(peaks(torch.no_grad)) > 512 * 256 * 4  # what the mode computes is most of it
