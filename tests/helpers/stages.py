"""Training at every ZeRO stage, in two halves with a checkpoint between them, on meshes that differ."""

import optree
import pytest
import torch
from oracle import one_device

import shardlib as sl
from helpers.measure import count_payload, stored_bytes
from helpers.trees import assert_close

MESHES = {"data": 4}, {"data": 2}
ADAMW = sl.optim.adamw(1e-3, eps=1e-5, weight_decay=0.01)  # the oracle's


def check_like_one_device(model, transform, folder, pool, **where):
    """Losses and parameters are those of the whole batches on one device; see `in_halves`."""
    expected, _, final = one_device.train(*model())
    for half, _, losses, params in in_halves(model, transform, ADAMW, folder, pool, **where):
        assert losses == pytest.approx(expected[len(expected) // 2 * half :][: len(losses)], rel=1e-10)
        if half == 1:
            assert_close(params, final, 1e-10)


def train_stages(mesh, model, transform, tx, folder, half, axis="data", count=count_payload):
    """Per stage: losses of a half of the batches, bytes that the last step sent and that are held, and parameters.

    The second half goes on from the checkpoints in ``folder``. ``model() -> loss_fn, params, batches``; ``count(mesh)()``
    gives the bytes sent since its last call, by axis.
    """
    sent, found = count(mesh), {}
    for stage in range(4):
        loss_fn, params, batches = model()
        placed = sl.shard(params, mesh, sl.chain(sl.zero(stage, axis=axis), transform))
        state, step = sl.make_train_step(loss_fn, placed, tx)
        if half == 1:
            state = sl.checkpoint.restore(folder / str(stage), state)
        losses, middle = [], len(batches) // 2
        for batch in batches[half * middle :][:middle]:
            sent()
            state, metrics = step(state, share(batch, mesh))
            losses.append(metrics["loss"].item())
        held = {"param": stored_bytes(state.params), "comm": stored_bytes(state.comm)}
        held["optimizer"] = stored_bytes(state.opt, counters=True)
        found[stage] = losses, sent(), held, sl.unshard(state.params)
        sl.checkpoint.save(folder / str(stage), state)
    return mesh.coords, found


def in_halves(model, transform, tx, folder, pool, meshes=MESHES, axis="data", train=train_stages):
    """Half, stage, losses and parameters of every rank: first on simulated ones, then on real ones of another mesh.

    What each rank sent and held is what its plan says.
    """
    for half, (run, shape) in enumerate(zip((sl.simulate, pool.run), meshes)):
        plans = [plan_of(model, transform, tx, stage, shape, axis) for stage in range(4)]
        for coords, found in run(train, model, transform, tx, folder, half, axis, mesh=shape):
            for stage, (losses, sent, held, params) in found.items():
                plan = plans[stage].at(coords)
                assert sent == plan.payload() and all(sent.values())
                assert held == {role: plan.bytes(role) for role in held}
                yield half, stage, losses, params


def linear():
    """A loss whose gradients do not depend on the parameters, and as many empty batches as others."""
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(97, generator=generator, dtype=torch.float64) for name in ("scale", "shift")}
    batches = [torch.randn(8, 97, generator=generator, dtype=torch.float64) for _ in range(4)]
    return _product, params, [*batches, *map(torch.zeros_like, batches)]


def _product(params, x):
    return (x * params["scale"] + x.flip(1) * params["shift"]).sum(1).mean()


def plan_of(model, transform, tx, stage, shape=MESHES[0], axis="data"):
    loss_fn, params, batches = model()
    mesh, transform = sl.abstract_mesh(**shape), sl.chain(sl.zero(stage, axis=axis), transform)
    return sl.make_plan(params, mesh, transform, loss_fn=loss_fn, optimizer=tx, batch=share(batches[0], mesh))


def share(batch, mesh):
    """A rank's rows of a batch."""
    return optree.tree_map(lambda leaf: leaf.chunk(mesh.shape.get("data", 1))[mesh.coords.get("data", 0)], batch)
