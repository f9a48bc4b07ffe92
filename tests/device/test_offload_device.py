"""Offload on a device with a memory of its own: bytes counted at its links; a missing wait shows as a wrong number."""

import pytest
from helpers.optimizer_cases import CASES

# name -> (transforms, axes of a mesh of one process)
PLANS = {
    "stage 0": lambda sl: [sl.zero(0)],
    "stage 3": lambda sl: [sl.zero(3)],
    "bf16": lambda sl: [sl.zero(0), sl.precision("bf16", reduce_dtype="bf16")],
    "bf16, sums in fp32": lambda sl: [sl.zero(0), sl.precision("bf16")],
    "fp16, accumulated": lambda sl: [sl.zero(1), sl.precision("fp16"), sl.accumulate(2)],
}


def trained(mesh, plan, rates, *more, steps=3):
    """Losses, parameters on the host, counts and planned transfers of the last step, and live bytes after it."""
    import gc

    import optree
    import torch
    from helpers import rig
    from helpers.models import mlp, regression_batch

    import shardlib as sl

    gc.collect()  # what earlier runs left is not counted
    loss_fn, params = mlp([16, 64, 64, 4], torch.float32)
    transform = sl.chain(*PLANS[plan](sl), *(make(sl) for make in more))
    tx = sl.optim.chain(sl.optim.clip_by_global_norm(0.5), sl.optim.adamw(1e-2))
    state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), tx)
    batch = tuple(leaf.to(mesh.device) for leaf in regression_batch(8, 16, 4, torch.float32))
    losses = []
    for _ in range(steps):
        torch.accelerator.synchronize()
        rig.reset()
        with rig.limits(**rates):
            state, metrics = step(state, batch)
            torch.accelerator.synchronize()
        counts = rig.counts()
        losses.append(metrics["loss"].item())
    held = [leaf for leaf in optree.tree_leaves(state.opt) if leaf.dim()]
    found = optree.tree_map(lambda leaf: leaf.cpu().tolist(), sl.unshard(state.params))
    planned = sl.make_plan(params, mesh, transform, loss_fn=loss_fn, batch=batch).transfers()
    return losses, found, counts, planned, {leaf.device.type for leaf in held}


@pytest.mark.parametrize("options", [{}, {"params": "host"}, {"gradients": "host"}], ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_bytes_at_the_links_are_the_plans_and_numbers_those_without(on_rig, plan, options):
    def run(mesh):
        slow = {"up": 1e6, "down": 1e6}  # a copy takes longer than what comes after it
        without = trained(mesh, plan, {})
        return without, trained(mesh, plan, slow, lambda sl: sl.offload(**options))

    (losses, final, before, nothing, there), (again, found, counts, planned, here) = on_rig(run)
    assert again == losses and found == final
    assert nothing == {"down": 0, "up": 0} and there == {"rig"} and here == {"cpu"}
    # Without offload the links carry numbers alone, such as the loss.
    assert counts.down - before.down == planned["down"] > 0
    assert counts.up - before.up == planned["up"] > 0
    assert counts.live < before.live and counts.pinned > before.pinned


@pytest.mark.parametrize("params", [None, "host"])
def test_a_share_of_the_states_stays_on_the_device(on_rig, params):
    def run(mesh):
        rates = {"up": 1e6, "down": 1e6}
        shared = trained(mesh, "bf16", rates, lambda sl: sl.offload(params=params, fraction=0.5))
        return trained(mesh, "bf16", {}), shared

    (losses, final, before, _, _), (again, found, counts, planned, here) = on_rig(run)
    assert again == losses and found == final and here == {"rig", "cpu"}
    assert (counts.down - before.down, counts.up - before.up) == (planned["down"], planned["up"])


def test_gradients_leave_while_backward_goes_on(on_rig):
    """The device never holds all gradients: those that have left are freed before others come."""

    def run(mesh):
        import torch
        from helpers import rig

        import shardlib as sl

        layers, width = 12, 64
        params = [{"w": torch.eye(width)} for _ in range(layers)]

        def loss_fn(params, x):
            for p in params:
                x = x @ p["w"]
            return x.square().mean()

        peaks = []
        for more in ([], [sl.offload()]):
            state, step = sl.make_train_step(
                loss_fn, sl.shard(params, mesh, sl.chain(sl.zero(0), *more)), sl.optim.sgd(0.1)
            )
            batch = torch.ones(2, width, device=mesh.device)
            state, _ = step(state, batch)
            torch.accelerator.synchronize()
            rig.reset()
            before = rig.counts().live
            state, _ = step(state, batch)
            peaks.append((rig.counts().peak - before) / (4 * width * width))
        return peaks

    without, with_offload = on_rig(run)
    assert without >= 12  # in units of one layer's gradient
    # Two that leave, one that has left and one that is computed; and the activations of two rows in all twelve layers.
    assert with_offload <= 4 + 12 * 2 / 64


def test_two_processes_update_their_shards_on_the_host(rigs):
    def run(mesh):
        import torch
        from helpers import rig
        from helpers.models import mlp, regression_batch, share

        import shardlib as sl

        loss_fn, params = mlp([16, 64, 64, 4], torch.float32)
        batch = share(regression_batch(8, 16, 4, torch.float32), mesh.rank, 2)
        batch = tuple(leaf.to(mesh.device) for leaf in batch)
        seen = []
        for stage, more in (
            (2, []),
            (2, [sl.offload()]),
            (1, [sl.offload(params="host")]),
            (3, [sl.offload(params="host", gradients="host")]),
        ):
            sharded = sl.shard(params, mesh, sl.chain(sl.zero(stage), sl.precision("bf16"), sl.accumulate(2), *more))
            state, step = sl.make_train_step(loss_fn, sharded, sl.optim.adamw(1e-2))
            with rig.limits(up=1e6, down=1e6):
                losses = []
                for _ in range(3):
                    state, metrics = step(state, batch)
                    losses.append(metrics["loss"].item())
            seen.append((losses, sl.unshard(state.params)["layers"][1]["weight"].cpu().tolist()))
        return seen

    for without, *ways in rigs.run(run, mesh={"data": 2}):
        assert ways == [without] * 3


@pytest.mark.parametrize("name", CASES)
def test_every_optimizer_steps_on_the_host(on_rig, name):
    def run(mesh):
        import torch
        from helpers.optimizer_cases import CASES, VECTORS, batches, model

        import shardlib as sl

        def losses(*more):
            def rank(mesh):
                loss_fn, params = model()
                frozen = [sl.freeze(VECTORS)] if CASES[name].matrices else []
                sharded = sl.shard(params, mesh, sl.chain(sl.zero(1), *frozen, *more))
                state, step = sl.make_train_step(loss_fn, sharded, CASES[name].make())
                seen = []
                for batch in batches(3):
                    state, metrics = step(state, tuple(leaf.chunk(2)[mesh.rank].to(mesh.device) for leaf in batch))
                    seen.append(metrics["loss"].item())
                held = [leaf for leaf in torch.utils._pytree.tree_leaves(state.opt) if isinstance(leaf, torch.Tensor)]
                return seen, {leaf.device.type for leaf in held}

            return sl.simulate(rank, mesh={"data": 2}, device="rig")[0]

        return losses(), losses(sl.offload())

    (wanted, _), (found, where) = on_rig(run)
    assert found == pytest.approx(wanted, rel=1e-9) and where == {"cpu"}


def test_the_device_holds_no_more_of_a_deeper_model_whose_parameters_are_on_the_host(on_rig):
    def run(mesh):
        import torch
        from helpers import rig

        import shardlib as sl

        width = 64

        def loss_fn(params, x):
            for p in params:
                x = x @ p["w"]
            return x.square().mean()

        def peak(layers):
            params = [{"w": torch.eye(width)} for _ in range(layers)]
            transform = sl.chain(sl.zero(0), sl.offload(params="host"))
            state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), sl.optim.sgd(0.1))
            batch = torch.ones(2, width, device=mesh.device)
            for _ in range(2):
                torch.accelerator.synchronize()
                rig.reset()
                before = rig.counts().live
                state, _ = step(state, batch)
            return (rig.counts().peak - before) / (4 * width * width)

        return peak(8), peak(24)

    # In units of a layer: parameters of three, gradients of up to four, as copies go ahead or lag; and rows of activations.
    assert all(peak <= 8 for peak in on_rig(run))
