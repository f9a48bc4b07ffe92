"""Tiles on a device with a memory of its own: the peak is a tile's, and the plan's; the numbers are the CPU's."""

import pytest

# name -> transforms
PLANS = {
    "outputs": lambda sl: [sl.zero(3), sl.tile(["*/mlp/*", "*/attn/*", "head/weight", "embed/tokens"], 2)],
    "outputs, sliced": lambda sl: [sl.zero(3), sl.tile(["*/mlp/*", "*/attn/*"], 2)],
    "outputs, offloaded": lambda sl: [sl.zero(3), sl.accumulate(2), sl.offload(), sl.tile("*/mlp/*", 4)],
    "outputs, in bf16": lambda sl: [sl.zero(3), sl.precision("bf16"), sl.tile("*/mlp/*", 4)],
}


def trained(sl, name, device):
    """The losses of three steps of a small GPT with dropout on a simulated mesh."""
    import torch
    from helpers.models import share

    from shardlib.models import gpt

    config = gpt.GPTConfig(vocab=32, layers=2, width=16, heads=4, sequence=8, dropout=0.1)
    drawn = torch.randint(32, (16, 9), generator=torch.Generator().manual_seed(4))
    slices = [sl.tensor_slicing(gpt.slicing_rules(config))] if "sliced" in name else []

    def run(mesh):
        params = sl.shard(gpt.init(config), mesh, sl.chain(*PLANS[name](sl), *slices))
        state, step = sl.make_train_step(gpt.make_loss(config), params, sl.optim.adamw(1e-2), rng=5)
        rows = share(drawn, mesh.coords["data"], 2).to(mesh.device)
        losses = []
        for _ in range(3):
            state, metrics = step(state, {"tokens": rows[:, :-1], "targets": rows[:, 1:]})
            losses.append(metrics["loss"].item())
        return losses

    mesh = {"data": 2, "model": 2} if slices else {"data": 2}
    return sl.simulate(run, mesh=mesh, device=device)


@pytest.mark.parametrize("name", PLANS)
def test_tiles_train_as_on_the_cpu(on_rig, name):
    def run(mesh):
        import shardlib as sl

        return trained(sl, name, "rig"), trained(sl, name, "cpu")

    found, wanted = on_rig(run)
    for rank, other in zip(found, wanted, strict=True):
        assert rank == pytest.approx(other, rel=1e-2 if "bf16" in name else 1e-5)


def measured(mesh, loss_fn, params, batch, *transforms):
    """Most bytes that a rank's device held beside the parameters while it computed gradients; and what the plan says."""
    import gc

    import torch
    from helpers import rig
    from helpers.models import share

    import shardlib as sl
    from shardlib.plan.memory import live_bytes

    parallel = sl.chain(*transforms)
    mine = share(batch, mesh.rank, mesh.size)
    plan = sl.make_plan(params, sl.abstract_mesh(**mesh.shape), parallel, loss_fn=loss_fn, batch=mine)
    sharded, rows = sl.shard(params, mesh, parallel), mine.to(mesh.device)
    compute = sl.value_and_grad(loss_fn)
    for _ in range(2):  # the second run gathers ahead
        gc.collect()
        torch.accelerator.synchronize()
        rig.reset()
        before = rig.counts().live
        results = compute(sharded, rows)
        torch.accelerator.synchronize()
        peak = rig.counts().peak - before
        del results
    return peak, plan.bytes("grad") + live_bytes(plan)


def wide(x, tiles=1, width=128):
    """A loss with a layer that is most of it, whose input needs a gradient; its parameters; a batch."""
    import torch
    import torch.nn.functional as F

    def loss_fn(params, x):
        return F.linear(x * params["scale"]["scale"], params["layer"]["weight"]).square().mean()

    return (
        loss_fn,
        {"scale": {"scale": torch.ones(width)}, "layer": {"weight": torch.ones(4096, width)}},
        torch.ones(x, width),
    )


@pytest.mark.parametrize("tiles", [4, 16])
def test_a_gathered_weight_is_two_tiles(rigs, tiles):
    def run(mesh):
        import shardlib as sl

        loss_fn, params, batch = wide(2)
        whole = measured(mesh, loss_fn, params, batch, sl.zero(3))
        return whole, measured(mesh, loss_fn, params, batch, sl.zero(3), sl.tile("layer/*", tiles))

    weight = 4096 * 128 * 4
    for (whole, planned_whole), (cut, planned) in rigs.run(run, mesh={"data": 2}):
        print(whole, planned_whole, cut, planned)
        assert whole == pytest.approx(planned_whole, rel=0.01) and cut == pytest.approx(planned, rel=0.01)
        # Beside the tile: this rank's share of the gradient, and activations of one row.
        rest = weight // 2 + 6 * 4096 * 4
        assert cut - rest <= (whole - rest) // tiles + weight // tiles
