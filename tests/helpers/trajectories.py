"""Trajectories of optimizers that compress: the state of each rank after every step, on a small model."""

import math

import optree
import torch

import shardlib as sl
from helpers.profile import NIGHTLY

STEPS, FREEZE, RISE, LATE = (200, 60, 20, 100) if NIGHTLY else (100, 30, 10, 50)
PEAK = 0.02
ROWS = 4  # of one rank's batch


def lr(step):
    """A linear warm-up, then half a cosine to a tenth."""
    if step < RISE:
        return PEAK * step / RISE
    return PEAK / 10 + 0.45 * PEAK * (1 + math.cos(math.pi * (step - RISE) / (STEPS - RISE)))


RATE = sl.optim.warmup_cosine_decay_schedule(0.0, PEAK, RISE, STEPS, PEAK / 10)


def model():
    """Two units; one leaf starts at zero. Rows of the table are looked up late or never: see `batch_of`."""
    generator = torch.Generator().manual_seed(5)

    def leaf(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.4

    return {"table": leaf(9, 5), "net": {"a": leaf(5, 11), "b": torch.zeros(11, dtype=torch.float64), "c": leaf(11, 3)}}


GROUPS = [[3], [0, 1, 2]]  # buffers of a rank: the table is a unit of its own; leaves in optree's order
PATHS = ["net/a", "net/b", "net/c", "table"]


def loss_fn(params, batch):
    tokens, y = batch
    p = params["net"]
    return (torch.tanh(params["table"][tokens] @ p["a"] + p["b"]) @ p["c"] - y).square().mean()


def batch_of(rank, step):
    """Row 6 of the table is met first at step ``LATE``, when variances are frozen; rows 7 and 8 never are."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(6 if step < LATE else 7, (ROWS,), generator=generator), torch.randn(
        ROWS, 3, generator=generator, dtype=torch.float64
    )


def grads(rank, step, leaves):
    """Flat gradients of one rank's batch at flat leaves."""
    shapes, structure = optree.tree_flatten(model())
    inputs = [leaf.view(shape.shape).clone().requires_grad_() for leaf, shape in zip(leaves, shapes)]
    loss = loss_fn(optree.tree_unflatten(structure, inputs), batch_of(rank, step))
    return [grad.reshape(-1) for grad in torch.autograd.grad(loss, inputs)]


def flat_model():
    return [leaf.reshape(-1) for leaf in optree.tree_leaves(model())]


def trajectory(mesh, tx, transform, steps=STEPS, trees=("mu", "nu")):
    """After every step what this rank holds, leaf by leaf, padding left out: {name: [leaf]}."""
    sharded = sl.shard(model(), mesh, transform)
    state, step = sl.make_train_step(loss_fn, sharded, tx)
    buckets = state.params.plan.trained
    recorded = []

    def parts(tree):
        found = {}
        for bucket in buckets:
            cut = bucket.leaf_segments(tree[bucket.name], bucket.levels)
            for path, part, (start, stop) in zip(bucket.paths, cut, bucket.filled(mesh.coords, bucket.levels)):
                found[path] = part[: stop - start].clone()
        return [found[path] for path in PATHS]

    for number in range(steps):
        state, _ = step(state, batch_of(mesh.rank, number))
        params = [leaf.reshape(-1).clone() for leaf in optree.tree_leaves(sl.unshard(state.params))]
        recorded.append({"params": params} | {name: parts(getattr(state.opt.inner, name)) for name in trees})
    return recorded


def assert_same_trajectory(got, wanted, owners=1, owner_of=lambda rank: (rank, 0)):
    """``owner_of(rank)``: which of the oracle's ranks it is, and which chunk of each leaf's state it holds."""
    wanted = list(wanted)
    assert {len(mine) for mine in got} == {len(wanted)}
    for step, recorded in enumerate(wanted):
        for rank, mine in enumerate(got):
            oracles, owner = owner_of(rank)
            for name in mine[step]:
                for i, ours in enumerate(mine[step][name]):
                    theirs = recorded[name][oracles][i]
                    if name != "params":
                        theirs = theirs[owner * math.ceil(len(theirs) / owners) :][: math.ceil(len(theirs) / owners)]
                    scale = recorded[name][oracles][i].abs().max().clamp(min=1e-3)
                    error = ((ours - theirs).abs().max() / scale).item() if len(ours) else 0.0
                    assert error < 1e-10, f"step {step}, rank {rank}: {name} of {PATHS[i]} differs by {error:.1e}"
