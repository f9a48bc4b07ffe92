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
