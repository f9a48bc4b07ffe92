"""Pinned host memory: as many bytes as are asked for, and kept pinned by whatever copies it."""

import pytest


def test_as_many_bytes_are_pinned_as_are_asked_for(on_device):
    """Torch's own allocator takes the next power of two."""

    def run(mesh):
        import gc

        import torch
        from helpers import rig

        from shardlib.common.devices import alike, cloned, pages

        counted = mesh.device.type == "rig"
        gc.collect()
        before = rig.counts().pinned if counted else 0
        memory = pages(5_000, pinned=True)
        values = memory.view(torch.float32).fill_(3.0)
        held = rig.counts().pinned - before if counted else 5_000
        again, other = cloned(values[:1_000]), alike(values.view(125, 10))
        facts = (held, again.is_pinned(), other.is_pinned(), again.tolist() == [3.0] * 1_000, tuple(other.shape))
        there = again.to(mesh.device, non_blocking=True)
        del memory, values, other, again  # a copy may be under way
        gc.collect()
        left = rig.counts().pinned - before if counted else 0
        assert not cloned(torch.ones(2)).is_pinned() and not pages(10, pinned=False).is_pinned()
        return *facts, there.sum().item(), left

    assert on_device(run) == (5_000, True, True, True, (125, 10), 3_000.0, 0)


def test_memory_of_files_is_cut_anew_without_a_wait_for_the_device(on_rig):
    """A pool frees what lies idle in it for a buffer of another size; copies that are under way go on beside it."""

    def run(mesh):
        import torch
        from helpers import rig

        from shardlib.common.devices import pages
        from shardlib.sharded.disk.pool import Pool

        def freed(free):
            with rig.limits(down=-1):  # a copy takes until somebody waits for it
                copy = mesh.transfers.copy(torch.ones(1024, device=mesh.device), target)
                free()
                done = copy.done
                copy.wait()
            return done

        target = pages(4096, pinned=True).view(torch.float32)
        pool, held = Pool(8192, pinned=True), [pages(8192, pinned=True)]
        pool.give(pool.take(8192))
        return freed(lambda: pool.take(4096)), freed(held.clear), target.sum().item()

    assert on_rig(run) == (False, True, 1024.0)


@pytest.mark.parametrize("params", [None, "host"])
def test_copies_of_a_state_stay_pinned(on_device, params):
    def run(mesh):
        import optree
        import torch
        from helpers.models import mlp, regression_batch

        import shardlib as sl

        loss_fn, whole = mlp([16, 64, 4], torch.float32)
        transform = sl.chain(sl.zero(1), sl.precision("bf16"), sl.offload(params=params))
        state, step = sl.make_train_step(loss_fn, sl.shard(whole, mesh, transform), sl.optim.adamw(0.1), donate=False)
        batch = tuple(leaf.to(mesh.device) for leaf in regression_batch(8, 16, 4, torch.float32))
        seen = []
        for _ in range(2):
            state, _ = step(state, batch)
            replaced = sl.replace_params(state, optree.tree_map(lambda leaf: leaf * 2, whole), donate=False)
            for each in (state, replaced):
                here = [*each.opt.masters.values(), *(each.params.buffers.values() if params else ())]
                seen += [tensor.is_pinned() for tensor in here]
        return seen

    seen = on_device(run)
    assert seen and all(seen)
