"""Bytes of host memory at their peak, as plans say: `shardlib.plan.memory`."""

import pytest

CASES = {
    "states": lambda sl: [sl.offload()],
    "bf16": lambda sl: [sl.precision("bf16"), sl.offload()],
    "a share": lambda sl: [sl.precision("bf16"), sl.offload(fraction=0.5)],
    "parameters and gradients too": lambda sl: [sl.precision("bf16"), sl.offload(params="host", gradients="host")],
    "accumulated": lambda sl: [sl.precision("bf16"), sl.offload(params="host", gradients="host"), sl.accumulate(2)],
    "inputs of blocks": lambda sl: [sl.offload(), sl.remat(store="host", smallest=1)],
    "on disk": lambda sl: [sl.precision("bf16"), sl.offload("disk", folder="states")],
    "gradients on disk": lambda sl: [sl.precision("bf16"), sl.offload("disk", gradients="disk", folder="all")],
    "all on disk": lambda sl: [sl.precision("bf16"), sl.offload("disk", params="disk", gradients="disk", folder="all")],
}


@pytest.mark.parametrize("layers", [3, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_host_holds_what_the_plan_says(on_rig, case, layers, tmp_path):
    assert_as_planned(on_rig, case, layers, tmp_path)


@pytest.mark.parametrize("writes", ["at once", "late"])
@pytest.mark.parametrize("case", ["on disk", "all on disk"])
def test_it_does_so_however_quick_the_disk_is(on_rig, case, writes, tmp_path):
    assert_as_planned(on_rig, case, 4, tmp_path, writes)


def assert_as_planned(on_rig, case, layers, tmp_path, writes=None):
    def run(mesh):
        import contextlib
        import gc
        import os
        import time
        from unittest import mock

        import optree
        import torch
        from helpers import rig

        import shardlib as sl
        from shardlib.plan.memory import memory_peaks
        from shardlib.sharded.disk import Store

        write, pwritev = Store.write, os.pwritev

        def at_once(store, *args):
            write(store, *args)
            store.flush()

        def late(*args):
            time.sleep(0.02)
            return pwritev(*args)

        patches = {"at once": mock.patch.object(Store, "write", at_once), "late": mock.patch("os.pwritev", late)}
        os.chdir(tmp_path)
        params = [{"w": torch.eye(64)} for _ in range(layers)]
        layer = sl.block(lambda p, x: torch.tanh(x @ p["w"]))

        def loss_fn(params, x):
            for p in params:
                x = layer(p, x)
            return x.float().square().mean()

        parallel, tx = sl.chain(sl.zero(0), *CASES[case](sl)), sl.optim.adamw(1e-3)
        batch = torch.ones(16, 64, device=mesh.device)
        there = sl.abstract_mesh(data=1)
        plan = sl.make_plan(params, there, parallel, loss_fn=loss_fn, batch=batch.cpu(), optimizer=tx)
        gc.collect()
        before = rig.counts().pinned
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, parallel), tx)
        with patches.get(writes, contextlib.nullcontext()):
            for _ in range(3):
                state, _ = step(state, batch)
        torch.accelerator.synchronize()
        # Moments stay where they are, so they need not be pinned.
        leaves = [leaf for leaf in optree.tree_leaves(state.opt.inner) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        pageable = sum(leaf.nbytes for leaf in leaves if leaf.device.type == "cpu" and not leaf.is_pinned())
        return rig.counts().pinned - before + pageable, memory_peaks(plan)["host"].bytes

    held, planned = on_rig(run)
    assert held == planned > 0
