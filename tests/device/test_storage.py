"""States that could not be moved or updated are still there, on a device with a memory of its own."""

import pytest


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_device_without_room_leaves_the_state_where_it_is(on_rig, tmp_path, kind):
    def run(mesh):
        import gc

        import pytest
        import torch
        from helpers import rig
        from helpers.models import mlp

        import shardlib as sl

        loss, params = mlp([40, 70, 30], dtype=torch.float32)
        state, _ = sl.make_train_step(loss, sl.shard(params, mesh, sl.precision("bf16")), sl.optim.adamw(0.1))
        before = [buffer.cpu() for buffer in state.params.buffers.values()]
        moved = sl.to_host(state) if kind == "host" else sl.to_disk(state, tmp_path)
        gc.collect()
        live = rig.counts().live
        with rig.limits(budget=live + 30_000), pytest.raises(torch.OutOfMemoryError):
            sl.to_device(moved)
        gc.collect()
        left = rig.counts().live - live
        state = sl.to_device(moved)
        return left, all(map(torch.equal, before, [buffer.cpu() for buffer in state.params.buffers.values()]))

    assert on_rig(run) == (0, True)


@pytest.mark.parametrize("where", ["device", "host"])
def test_a_step_that_fails_leaves_the_state_before_it(on_rig, tmp_path, where):
    """Though new parameters of some buckets are on their way to the device, over a slow link."""

    def run(mesh):
        import pytest
        import torch
        from helpers import rig
        from helpers.faults import BROKEN, Faults
        from helpers.models import mlp, regression_batch

        import shardlib as sl
        from shardlib.errors import StorageError

        loss, params = mlp([16, 64, 64, 64, 4], dtype=torch.float32)
        batch = tuple(leaf.to(mesh.device) for leaf in regression_batch(8, 16, 4, torch.float32))

        def trained(fails):
            disk = sl.offload("disk", params=None if where == "device" else where, folder=tmp_path / str(fails))
            parallel = sl.chain(sl.zero(0), sl.precision("bf16"), disk)
            state, step = sl.make_train_step(loss, sl.shard(params, mesh, parallel), sl.optim.adamw(1e-2))
            losses = []
            for number in range(4):
                if fails and number == 2:
                    with pytest.MonkeyPatch.context() as patch, rig.limits(up=2e5, down=1e6):
                        Faults(patch).fails("pwritev", BROKEN, ".data", after=5, times=1)
                        with pytest.raises(StorageError):
                            step(state, batch)
                state, metrics = step(state, batch)
                losses.append(metrics["loss"].item())
            return losses, [buffer.cpu().tolist() for buffer in state.params.buffers.values()]

        return trained(True) == trained(False)

    assert on_rig(run)
