"""States that leave the device and come back: their memory is free, their bits are the same."""

import pytest


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_moved_state_frees_the_device(on_rig, tmp_path, kind, stage):
    def run(mesh):
        import gc

        import torch
        from helpers import rig
        from helpers.models import mlp, regression_batch

        import shardlib as sl
        from shardlib.tree import leaves_of

        loss, params = mlp([40, 70, 30], dtype=torch.float32)
        batch = tuple(part.to(mesh.device) for part in regression_batch(12, 40, 30, dtype=torch.float32))
        live = []

        def trained(moves):
            optimizer = sl.optim.adamw(0.1)
            state, step = sl.make_train_step(
                loss, sl.shard(params, mesh, sl.chain(sl.zero(stage), sl.precision("bf16"))), optimizer
            )
            losses = []
            for _ in range(3):
                if moves:
                    gc.collect()
                    before = rig.counts().live
                    tensors = [*state.params.buffers.values(), *leaves_of((state.opt, state.comm))]
                    there = [leaf.untyped_storage() for leaf in tensors if leaf.device == mesh.device]
                    held = sum({storage.data_ptr(): storage.nbytes() for storage in there}.values())
                    del tensors, there
                    moved = sl.to_host(state) if kind == "host" else sl.to_disk(state, tmp_path)
                    gc.collect()
                    during = rig.counts().live
                    if kind == "host":
                        pinned = [part.nbytes for part in moved.holding().values() if part.is_pinned()]
                        assert sum(pinned) == held
                    state = sl.to_device(moved)
                    assert all(leaf.device == mesh.device for leaf in leaves_of(state.params))
                    live.append((before - during, held, rig.counts().live - before))
                state, metrics = step(state, batch)
                losses.append(metrics["loss"].item())
            return losses, [leaf.cpu().view(torch.uint8).tolist() for leaf in leaves_of(state.params)]

        return trained(True) == trained(False), live

    same, live = on_rig(run)
    assert same
    for freed, held, after in live:
        assert freed == held > 0 and after == 0
