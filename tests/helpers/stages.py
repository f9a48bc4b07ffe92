"""Training at every ZeRO stage, in two halves with a checkpoint between them, on meshes that may differ."""

import optree
import torch

import shardlib as sl
from helpers.measure import count_payload


def train_stages(mesh, model, transform, tx, folder, half):
    """Per stage: losses of a half of the batches, what the last step sent, and parameters. Goes on from ``folder``.

    ``model() -> loss_fn, params, batches``.
    """
    sent, found = count_payload(mesh), {}
    for stage in range(4):
        loss_fn, params, batches = model()
        placed = sl.shard(params, mesh, sl.chain(sl.zero(stage), transform))
        state, step = sl.make_train_step(loss_fn, placed, tx)
        if half == 1:
            state = sl.checkpoint.restore(folder / str(stage), state)
        losses, middle = [], len(batches) // 2
        for batch in batches[half * middle :][:middle]:
            sent()
            state, metrics = step(state, share(batch, mesh))
            losses.append(metrics["loss"].item())
        found[stage] = losses, sent(), sl.unshard(state.params)
        sl.checkpoint.save(folder / str(stage), state)
    return found


def in_halves(train, model, transform, tx, folder, *args):
    """Half, stage, losses and parameters of every rank: first on 4 simulated ones, then on 2 real ones.

    ``train(mesh, folder, half, *args)`` calls `train_stages`. What ranks sent is what their plans say.
    """
    for half, run, ways in [(0, sl.simulate, 4), (1, sl.launch, 2)]:
        for found in run(train, folder, half, *args, mesh={"data": ways}):
            for stage, (losses, sent, params) in found.items():
                assert sent == plan_of(model, transform, tx, stage, ways).payload() and sent["data"] > 0
                yield half, stage, losses, params


def linear():
    """A loss whose gradients do not depend on the parameters, and as many empty batches as others."""
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(97, generator=generator, dtype=torch.float64) for name in ("scale", "shift")}
    batches = [torch.randn(8, 97, generator=generator, dtype=torch.float64) for _ in range(4)]
    return _product, params, [*batches, *map(torch.zeros_like, batches)]


def _product(params, x):
    return (x * params["scale"] + x.flip(1) * params["shift"]).sum(1).mean()


def plan_of(model, transform, tx, stage, ways):
    loss_fn, params, batches = model()
    mesh, transform = sl.abstract_mesh(data=ways), sl.chain(sl.zero(stage), transform)
    return sl.make_plan(params, mesh, transform, loss_fn=loss_fn, optimizer=tx, batch=share(batches[0], mesh))


def share(batch, mesh):
    """A rank's rows of a batch."""
    return optree.tree_map(lambda leaf: leaf.chunk(mesh.shape["data"])[mesh.coords["data"]], batch)
