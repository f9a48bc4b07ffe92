"""Updates beside a device's computation: a missing wait shows as a wrong number; links and pinned memory as planned."""

import pytest

SLOW = {"up": 1e6, "down": 1e6}  # a copy takes longer than what comes after it


def trained(mesh, options, stage=0, steps=6, rates=None):
    """Losses, undone updates, parameters, and pinned bytes, bytes at the links and the plan after the last step."""
    import gc

    import torch
    from helpers import rig
    from helpers.models import mlp, regression_batch, share

    import shardlib as sl

    gc.collect()
    before = rig.counts().pinned
    loss_fn, params = mlp([16, 64, 64, 4], torch.float32)
    more = [] if options is None else [sl.offload(**options)]
    transform = sl.chain(sl.zero(stage), sl.precision("bf16", reduce_dtype="bf16"), *more)
    tx = sl.optim.chain(sl.optim.clip_by_global_norm(2.4), sl.optim.adamw(1e-2))
    state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), tx)
    plan = sl.make_plan(params, mesh, transform, optimizer=tx)
    x, y = regression_batch(8, 16, 4, torch.float32)
    losses, undone = [], []
    for number in range(steps):
        batch = share((x.roll(number, 0), y), mesh.rank, mesh.size)
        batch = tuple(leaf.to(mesh.device) for leaf in batch)
        torch.accelerator.synchronize()
        rig.reset()
        with rig.limits(**(rates or {})):
            state, metrics = step(state, batch)
            torch.accelerator.synchronize()
        losses.append(metrics["loss"].item())
        undone.append(metrics.get("undone"))
        counts = rig.counts()
    found = [leaf.cpu().tolist() for layer in sl.unshard(state.params)["layers"] for leaf in layer.values()]
    return losses, undone, found, counts.pinned - before, (counts.down, counts.up), plan


@pytest.mark.parametrize("params", [None, "host"])
def test_speculation_changes_no_number_and_no_byte_at_the_links(on_rig, params):
    def run(mesh):
        exact = trained(mesh, {"params": params})
        return exact[:-1], trained(mesh, {"params": params, "speculate": True}, rates=SLOW)[:-1]

    (losses, _, wanted, _, moved), (again, undone, found, _, links) = on_rig(run)
    assert (again, found, links) == (losses, wanted, moved)
    assert {bool(count) for count in undone} == {True, False}, "some steps clip, others do not"


@pytest.mark.parametrize("stage", [1, 3])
def test_two_processes_speculate(rigs, stage):
    def run(mesh):
        exact = trained(mesh, None, stage)
        return exact[:3], trained(mesh, {"speculate": True}, stage, rates=SLOW)[:3]

    for (losses, _, wanted), (again, undone, found) in rigs.run(run, mesh={"data": 2}):
        assert (again, found) == (losses, wanted) and {bool(count) for count in undone} == {True, False}


def test_delayed_updates_need_no_device_and_move_the_same_bytes(on_rig):
    """The numbers are those on a CPU mesh, where the same kernels update at the same times."""

    def run(mesh):
        exact = trained(mesh, {})
        slow = trained(mesh, {"delay": True}, rates=SLOW)
        quick = trained(mesh, {"delay": True})
        return exact[4], slow[:-1], quick[:-1]

    moved, slow, quick = on_rig(run)
    assert slow == quick and slow[4] == moved


@pytest.mark.parametrize("mode", ["exact", "speculate", "delay"])
def test_pinned_memory_is_the_plans(on_rig, mode):
    """Masters, old ones beside new, gradients and new parameters are pinned; moments are not copied to the device."""

    def run(mesh):
        *_, pinned, _, plan = trained(mesh, {} if mode == "exact" else {mode: True}, steps=3)
        largest = max(bucket.owned for bucket in plan.trained)
        return pinned, plan.parameters, plan.bytes("optimizer", "host"), plan.bytes("grad", "host"), 2 * 2 * largest

    pinned, count, states, grads, slots = on_rig(run)
    assert grads == 2 * count
    if mode == "exact":
        assert states == 12 * count and pinned <= 4 * count + grads + slots + 3 * 64
    else:
        moments = 2 * 8 * count
        staged = 3 * 64  # new parameters of a bucket end at a multiple of 64 bytes
        assert 0 <= pinned - (states - moments + grads) <= staged


def test_a_state_is_not_where_the_next_gradients_land(on_rig):
    """The optimizer's state is the gradient that it was given."""

    def run(mesh):
        import torch
        from helpers.models import mlp, regression_batch

        import shardlib as sl
        from shardlib.tree import tree_map

        def update(grads, state, params, *, shards):
            return tree_map(lambda grad, before: -0.1 * grad - 0.05 * (grad - before), grads, state), grads

        tx = sl.optim.GradientTransformation(
            lambda params, shards: tree_map(torch.zeros_like, params), update, sl.optim.Locality.ELEMENTWISE
        )
        x, y = (leaf.to(mesh.device) for leaf in regression_batch(4, 6, 4, torch.float32))
        found = []
        for more in ([], [sl.offload()], [sl.offload(speculate=True)]):
            loss_fn, params = mlp([6, 9, 4], torch.float32)
            state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, sl.chain(sl.zero(0), *more)), tx)
            for number in range(4):
                state, _ = step(state, (x.roll(number, 0), y))
            found.append(sl.unshard(state.params)["layers"][0]["weight"].cpu())
        return [(each - found[0]).abs().max().item() for each in found]

    assert max(on_rig(run)) < 1e-6


def test_updates_ahead_are_on_the_ranks_device(on_rig):
    """A thread begins on the process's first device. Pages that it frees wait for the copies of their own."""

    def run(mesh):
        import pytest
        import torch

        from shardlib.common.devices import pages

        calls = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.accelerator, "set_device_index", lambda index: calls.append(("set", index)))
            trained(mesh, {"speculate": True}, steps=1)
            patch.setattr(torch.accelerator, "current_device_index", lambda: 3)
            memory = pages(100, pinned=True)
            patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
            patch.setattr(torch.accelerator, "synchronize", lambda *device: calls.append(("wait", *device)))
            del memory
        return calls

    assert on_rig(run) == [("set", 0), ("wait", 3)]
