"""Training at every ZeRO stage, in two halves with a checkpoint between them, on meshes that may differ."""

import optree

import shardlib as sl
from helpers.measure import count_payload

STAGES = (0, 1, 2, 3)


def train_stages(mesh, model, transform, tx, folder, half, stages=STAGES):
    """Per stage: losses of a half of the batches, what the last step sent, and parameters. Goes on from ``folder``.

    ``model() -> loss_fn, params, batches``.
    """
    sent, found = count_payload(mesh), {}
    for stage in stages:
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


def plan_of(model, transform, tx, stage, ways):
    loss_fn, params, batches = model()
    mesh, transform = sl.abstract_mesh(data=ways), sl.chain(sl.zero(stage), transform)
    return sl.make_plan(params, mesh, transform, loss_fn=loss_fn, optimizer=tx, batch=share(batches[0], mesh))


def share(batch, mesh):
    """A rank's rows of a batch."""
    return optree.tree_map(lambda leaf: leaf.chunk(mesh.shape["data"])[mesh.coords["data"]], batch)
