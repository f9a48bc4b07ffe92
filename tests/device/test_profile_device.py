"""Profiles on a device with streams and a memory of its own: times are the device's, and memory what it holds."""

import pytest


def test_a_profile_on_a_device(on_device):
    def run(mesh):
        import torch

        import shardlib as sl
        from shardlib.models import gpt

        config = gpt.GPTConfig(vocab=64, layers=2, width=32, heads=4, sequence=16)
        tokens = torch.zeros(4, 16, dtype=torch.int64, device=mesh.device)
        batch = {"tokens": tokens, "targets": tokens}
        parallel = sl.chain(sl.zero(3), sl.offload(), sl.remat(store="host", smallest=1))
        params, loss_fn, tx = gpt.init(config), gpt.make_loss(config), sl.optim.adamw(1e-3)
        plan = sl.make_plan(params, mesh, parallel, loss_fn=loss_fn, batch=batch, optimizer=tx)
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, parallel), tx)
        found = sl.profile(step, state, batch, steps=2, plan=plan)
        own = found.step.own()
        names = {(part.kind, part.name) for part in own}
        return found.seconds, sum(own.values()), names, sum(found.by_kind.values()), found.memory.by_kind, str(found)

    seconds, own, names, kinds, memory, text = on_device(run)
    assert seconds > 0 and own == pytest.approx(seconds) and kinds == pytest.approx(seconds)
    assert {("offload", "down"), ("offload", "up"), ("wait", "the device"), ("optimizer", "")} <= names
    assert {("compute", "blocks/0"), ("compute", "blocks/1")} <= names
    assert memory["parameters"] > 0 and memory.get("optimizer", 0) < memory["parameters"]  # moments are on the host
    assert "offload" in text and "GFLOP" in text


@pytest.mark.parametrize("others", ["stage 0", "host", "all"])
def test_named_memory_is_what_the_device_counts(on_rig, others):
    """At its peak, from its own allocator; what rests in the host's memory is not in it."""

    def run(mesh, others):
        import gc

        import torch
        from helpers import rig

        import shardlib as sl
        from shardlib.models import gpt

        more = {
            "stage 0": [],
            "host": [sl.zero(3), sl.remat(store="host", smallest=1)],
            "all": [sl.offload(params="host", gradients="host"), sl.accumulate(2)],
        }[others]
        gc.collect()
        torch.accelerator.synchronize()
        before = rig.counts().live
        config = gpt.GPTConfig(vocab=256, layers=2, width=64, heads=4, sequence=32)
        drawn = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(0)).to(mesh.device)
        batch = {"tokens": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous()}
        params = sl.shard(gpt.init(config), mesh, sl.chain(sl.zero(0), *more) if others != "host" else sl.chain(*more))
        state, step = sl.make_train_step(gpt.make_loss(config), params, sl.optim.sgd(1e-3))
        for _ in range(2):
            state, _ = step(state, batch)
        torch.accelerator.synchronize()
        rig.reset()
        found = sl.report.memory(step, state, batch, warm=0)
        return found.peak, rig.counts().peak - before - drawn.nbytes, found.by_kind

    named, counted, kinds = on_rig(run, others)
    assert named == pytest.approx(counted, rel=0.01)
    assert kinds.get("other", 0) < 0.01 * named
    assert ("parameters" in kinds) == (others != "all") and ("gathered" in kinds) == (others == "all")
