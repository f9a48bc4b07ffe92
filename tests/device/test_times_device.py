"""Predicted step times against a device with links of given rates: `sl.report.predict_step`."""

import pytest

CASES = {
    "states": lambda sl: [sl.offload()],
    "parameters and gradients too": lambda sl: [sl.offload(params="host", gradients="host")],
    "inputs of blocks": lambda sl: [sl.remat(store="host", smallest=1)],
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
            for _ in range(3):
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
