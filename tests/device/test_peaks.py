"""Peaks of device memory are the plan's: counted at the test device, for every transform, alone and together."""

import tempfile

import pytest
from helpers.peaks import Case, measured
from helpers.profile import NIGHTLY
from hypothesis import Phase, given, settings
from hypothesis import strategies as st


@st.composite
def cases(draw):
    """Steps in which parameters, gradients, activations or the optimizer's state may be what is most."""
    stage, ranks, tokens = draw(st.integers(0, 3)), draw(st.integers(1, 2)), draw(st.sampled_from([32, 128]))
    offload = draw(st.sampled_from(["", "states", "half", "params", "all", "disk"]))
    # Parameters that are whole in another memory have tiles where the optimizer's state is whole too.
    divides = offload not in ("params", "all", "disk") or ranks == 1 or stage in (0, 3)
    return Case(
        stage=stage,
        ranks=ranks,
        precision=draw(st.sampled_from(["", "bf16", "bf16 sums"])),
        remat=draw(st.sampled_from(["", "full", "dots", "host", "names"])),
        tiles=draw(st.sampled_from([1, 2, 4])) if divides else 1,
        offload=offload,
        microbatches=draw(st.sampled_from([1, 2, 3])),
        layers=draw(st.integers(1, 4)),
        width=draw(st.sampled_from([64, 96, 128])),
        vocab=draw(st.sampled_from([64, 256])),
        samples=tokens // 16,
        sequence=16,
        merged=draw(st.sampled_from([0, 410_000, 1 << 20])),
    )


KNOWN = [
    Case(stage=3, ranks=2, tiles=4, remat="full", width=96),
    Case(stage=2, ranks=2, precision="bf16", microbatches=2, width=96, samples=2),
    Case(stage=1, ranks=2, remat="host", samples=2, width=96),
    Case(precision="bf16 sums", offload="all", microbatches=2, layers=3, samples=2, width=96),
    Case(precision="bf16", offload="disk", microbatches=2, layers=4, samples=2, width=96),
    Case(remat="names", tiles=2, offload="params", layers=1, vocab=64, sequence=16, samples=2),
    Case(offload="disk", microbatches=2, layers=1, sequence=16, samples=2),
    Case(offload="disk", microbatches=2, layers=2, sequence=16, samples=2),
    Case(stage=3, ranks=2, layers=4, merged=410_000),  # pairs of blocks
    Case(stage=3, ranks=2, layers=3, offload="states", remat="full", microbatches=2, merged=1 << 20),
]


@pytest.mark.parametrize("case", KNOWN, ids=range(len(KNOWN)))
def test_the_peak_of_a_known_step_is_the_plans(rigs, case):
    assert_peak(rigs, case)


@settings(max_examples=200 if NIGHTLY else 4, phases=list(Phase) if NIGHTLY else (Phase.explicit, Phase.generate))
@given(case=cases())
def test_the_peak_of_any_step_is_the_plans(rigs, case):
    assert_peak(rigs, case)


def assert_peak(rigs, case):
    """Of a first step, in which ranks agree on each gather, and of a second, which gathers ahead; on the slowest links."""

    def run(mesh, folder):
        plan, batch, peaks = measured(mesh, case, folder)
        return plan.peak_bytes + batch, max(peaks)

    with tempfile.TemporaryDirectory() as folder:
        found = rigs.run(run, folder, mesh={"data": case.ranks})
    for planned, peak in found:
        assert peak == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize("others", ["alone", "accumulated", "offloaded", "below"])
def test_a_layer_in_tiles(rigs, others):
    """Beside its state and gradient, a layer in n tiles takes an n-th of what it takes whole, and one tile more."""

    def run(mesh):
        import gc

        import torch
        import torch.nn.functional as F
        from helpers import rig

        import shardlib as sl

        more = {
            "alone": [],
            "accumulated": [sl.accumulate(2)],
            "offloaded": [sl.offload()],
            "below": [sl.offload(params="host", gradients="host")],
        }[others]
        params = {"layer": {"weight": torch.randn(4096, 256, generator=torch.Generator().manual_seed(3)) / 16}}
        x, found = torch.ones(2, 256, device=mesh.device), []

        def loss_fn(params, x):
            return F.linear(x, params["layer"]["weight"]).square().mean()

        for tiles in (1, 4, 16):
            parallel = sl.chain(sl.zero(3), *more, *([sl.tile("layer/weight", tiles)] if tiles > 1 else []))
            plan = sl.make_plan(params, mesh, parallel, loss_fn=loss_fn, batch=x)
            compute, sharded = sl.value_and_grad(loss_fn), sl.shard(params, mesh, parallel)
            peaks = []
            for _ in range(2):
                gc.collect()
                rig.reset()
                before = rig.counts().live
                with rig.limits(up=-1, down=-1):
                    result = compute(sharded, x)
                    torch.accelerator.synchronize()
                peaks.append(rig.counts().peak - before)
                del result
            shard = plan.trained[0].owned * 4
            found.append((max(peaks) - shard, plan.peak_bytes - plan.bytes("param", "device") - shard))
        weight = params["layer"]["weight"]
        return found, weight.nbytes, 4 * weight.shape[0] * x.element_size() * len(x)

    for found, weight, outputs in rigs.run(run, mesh={"data": 2}):
        for peak, planned in found:
            assert peak == pytest.approx(planned, rel=0.01)
        (whole, _), (quarter, _), (sixteenth, _) = found
        assert quarter <= (whole + weight) / 4 + outputs and sixteenth <= (whole + weight) / 16 + outputs


def test_what_a_stage_receives_goes_to_host_memory_too(rigs):
    """The input of a stage's first block, with those of its other blocks, for every micro-batch in flight."""

    def run(mesh):
        import gc

        import torch
        from helpers import rig

        import shardlib as sl
        from shardlib.models import gpt

        config = gpt.GPTConfig(vocab=64, layers=4, width=64, heads=4, sequence=32)
        params, loss_fn, tx = gpt.to_blocks(gpt.init(config)), gpt.make_sequential(config), sl.optim.sgd(0.1)
        drawn = torch.randint(64, (32, 33), generator=torch.Generator().manual_seed(4))
        batch = {"tokens": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous()}
        batch = {name: rows.to(mesh.device) for name, rows in batch.items()}
        found = {}
        for store in ("device", "host"):
            parallel = sl.chain(sl.pipeline("gpipe", 4), sl.zero(0), sl.remat(store=store, smallest=1))
            plan = sl.make_plan(params, mesh, parallel, loss_fn=loss_fn, batch=batch, optimizer=tx)
            state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, parallel), tx)
            for _ in range(2):
                gc.collect()
                rig.reset()
                before = rig.counts().live
                state, _ = step(state, batch)
                torch.accelerator.synchronize()
            found[store] = rig.counts().peak - before, [trace.kept for trace in plan.traces]
        return found

    _, found = rigs.run(run, mesh={"pipe": 2, "data": 1})
    (stay, kept), (moved, less) = found["device"], found["host"]
    carry = 8 * 32 * 64 * 4
    assert kept[1] - less[1] >= 3 * carry  # two or three layers, and the head
    # At its peak a rank holds three micro-batches' carries in the second one's backward, and inputs of later blocks.
    assert stay - moved >= 3.5 * carry


def test_divided_inputs_of_blocks(rigs):
    """Each of two ranks with the same activations keeps half of every block's input, and sends it once more."""

    def run(mesh):
        import gc

        import torch
        from helpers import rig
        from helpers.measure import CountingGroup

        import shardlib as sl
        from shardlib.models import gpt

        config = gpt.GPTConfig(vocab=64, layers=10, width=64, heads=4, sequence=32)
        params, loss_fn, tx = gpt.init(config), gpt.make_loss(config), sl.optim.sgd(0.1)
        drawn = torch.randint(64, (32, 33), generator=torch.Generator().manual_seed(4))
        batch = {"tokens": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous()}
        batch = {name: rows.to(mesh.device) for name, rows in batch.items()}
        found = []
        for store in ("device", "sharded"):
            groups = {}
            counted = mesh.with_transport(
                lambda axis, group, groups=groups: groups.setdefault(axis, CountingGroup(group))
            )
            rules = sl.tensor_slicing(gpt.slicing_rules(config))
            parallel = sl.chain(sl.zero(0), rules, sl.remat(store=store, smallest=1))
            state, step = sl.make_train_step(loss_fn, sl.shard(params, counted, parallel), tx)
            for _ in range(2):
                gc.collect()
                groups["model"].sent = 0
                rig.reset()
                before = rig.counts().live
                state, metrics = step(state, batch)
                loss = metrics["loss"].item()
            plan = sl.make_plan(params, mesh, parallel, loss_fn=loss_fn, batch=batch, optimizer=tx)
            planned = plan.peak_bytes - plan.bytes("param", "device")
            found.append((loss, groups["model"].sent, rig.counts().peak - before, planned))
        return found

    layers, each = 10, 32 * 32 * 64 * 4
    for whole, divided in rigs.run(run, mesh={"data": 1, "model": 2}):
        assert whole[0] == divided[0] and divided[1] - whole[1] == layers * each // 2
        assert whole[2] - divided[2] >= (layers - 5) * each // 2  # one is gathered, and another on its way
        for _, _, peak, planned in (whole, divided):
            assert peak == pytest.approx(planned, rel=0.01)
