"""Tiles on a device with a memory of its own: the numbers are the CPU's."""

import pytest

# name -> transforms
PLANS = {
    "outputs": lambda sl: [sl.zero(3), sl.tile(["*/mlp/*", "*/attn/*", "head/weight", "embed/tokens"], 2)],
    "outputs, sliced": lambda sl: [sl.zero(3), sl.tile(["*/mlp/*", "*/attn/*"], 2)],
    "outputs, offloaded": lambda sl: [sl.zero(3), sl.accumulate(2), sl.offload(), sl.tile("*/mlp/*", 4)],
    "outputs, in another memory": lambda sl: [sl.zero(0), sl.offload(params="host"), sl.tile("*/mlp/*", 4)],
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
