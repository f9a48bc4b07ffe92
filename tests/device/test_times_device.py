"""Predicted step times against a device with links of given rates: `sl.report.predict_step`."""

import pytest

CASES = {
    "states": lambda sl: [sl.offload()],
    "parameters and gradients too": lambda sl: [sl.offload(params="host", gradients="host")],
    "inputs of blocks": lambda sl: [sl.remat(store="host", smallest=1)],
}
ON_DISK = {
    "states": {},
    "parameters": {"params": "disk"},
    "parameters and gradients": {"params": "disk", "gradients": "disk"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_takes_as_long_as_predicted(on_rig, case):
    def run(mesh):
        import time

        import torch
        from helpers import rig

        import shardlib as sl

        width, layers, rate = 128, 6, 5e5  # a layer takes 131 ms down or up; to compute it, next to nothing
        params = [{"w": torch.eye(width)} for _ in range(layers)]
        layer = sl.block(lambda p, x: torch.tanh(x @ p["w"]))

        def loss_fn(params, x):
            for p in params:
                x = layer(p, x)
            return x.square().mean()

        parallel, tx = sl.chain(sl.zero(0), *CASES[case](sl)), sl.optim.adamw(1e-3)
        batch = torch.ones(width, width, device=mesh.device)
        plan = sl.make_plan(params, mesh, parallel, loss_fn=loss_fn, batch=batch, optimizer=tx)
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, parallel), tx)
        seconds = []
        with rig.limits(up=rate, down=rate):
            for _ in range(5):  # the quickest counts: a busy machine stops a step for longer than the margin
                torch.accelerator.synchronize()
                start = time.perf_counter()
                state, _ = step(state, batch)
                torch.accelerator.synchronize()
                seconds.append(time.perf_counter() - start)
        found = sl.report.predict_step(plan, 0.0, {"down": rate, "up": rate})
        return min(seconds[1:]), found.total, found.links

    measured, predicted, links = on_rig(run)
    assert predicted > max(links.values())
    assert 0.97 * predicted <= measured <= 1.15 * predicted


def test_disks_take_as_long_as_predicted(on_rig, tmp_path):
    """Plans that read and write more take longer, as predicted: each is measured with disks of one rate."""

    def run(mesh, cases):
        import threading
        import time

        import torch

        import shardlib as sl
        from shardlib.sharded.disk import pool

        width, layers, rate = 128, 6, 2e6  # a layer's parameters take 33 ms, its states three times that
        params = [{"w": torch.eye(width)} for _ in range(layers)]
        layer = sl.block(lambda p, x: torch.tanh(x @ p["w"]))

        def loss_fn(params, x):
            for p in params:
                x = layer(p, x)
            return x.square().mean()

        def slowed(call):
            lock = threading.Lock()

            def slow(fd, view, *where):
                with lock:
                    time.sleep(len(view) / rate)
                    call(fd, view, *where)

            return slow

        batch, real, found = torch.ones(width, width, device=mesh.device), (pool.read, pool.write), {}
        for case, (folder, more) in cases.items():
            parallel, tx = sl.chain(sl.zero(0), sl.offload("disk", folder=folder, **more)), sl.optim.adamw(1e-3)
            plan = sl.make_plan(params, mesh, parallel, loss_fn=loss_fn, batch=batch, optimizer=tx)
            state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, parallel), tx)
            seconds = []
            pool.read, pool.write = map(slowed, real)
            try:
                for _ in range(3):
                    start = time.perf_counter()
                    state, _ = step(state, batch)
                    torch.accelerator.synchronize()
                    seconds.append(time.perf_counter() - start)
            finally:
                pool.read, pool.write = real
            predicted = sl.report.predict_step(plan, 0.0, {"read": rate, "written": rate})
            found[case] = min(seconds[1:]), predicted.total, predicted.links
            del state, step
        return found

    found = on_rig(run, {case: (str(tmp_path / case), more) for case, more in ON_DISK.items()})
    measured, predicted = ([times[number] for times in found.values()] for number in (0, 1))
    assert measured == sorted(measured) and predicted == sorted(predicted)
    for seconds, expected in zip(measured, predicted, strict=True):
        assert 0.95 * expected <= seconds <= 1.6 * expected  # files' records, and a machine that does other work
