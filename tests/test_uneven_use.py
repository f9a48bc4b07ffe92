"""Ranks whose batches use different units (experts, branches): they train like one device, and none waits for ever."""

import optree
import pytest
import torch
from helpers.measure import count_payload
from helpers.trees import assert_close
from hypothesis import given, note, settings
from hypothesis import strategies as st

import shardlib as sl

TOLERANCE = 1e-10
EXPERTS = 3
RATE = 0.1


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "first": {"w": weight(3, 4)},
        "experts": [{"w": weight(4, 4), "b": weight(4)} for _ in range(EXPERTS)],
        "last": {"w": weight(4)},
    }


@sl.block
def expert(p, x):
    return torch.tanh(x @ p["w"] + p["b"])


def loss_fn(params, batch):
    """Row by row: a code's digits name the experts that the row goes through, in their order; 0 ends it."""
    total = 0.0
    for x, code in zip(batch["x"], batch["code"].tolist()):
        x = x @ params["first"]["w"]
        while code:
            code, number = divmod(code, EXPERTS + 1)
            x = expert(params["experts"][number - 1], x) if number else x
        total = total + (x @ params["last"]["w"]).square()
    return total / len(batch["x"])


def one_device(fn, params, batches, frozen=()):
    """Losses and parameters after a step of gradient descent with each batch."""
    params = optree.tree_map(torch.clone, params)
    paths, leaves, _ = optree.tree_flatten_with_path(params)
    trained = [leaf.requires_grad_() for path, leaf in zip(paths, leaves) if path[0] not in frozen]
    losses = []
    for batch in batches:
        loss = fn(params, batch)
        grads = torch.autograd.grad(loss, trained, allow_unused=True)
        with torch.no_grad():
            for leaf, grad in zip(trained, grads):
                if grad is not None:
                    leaf -= RATE * grad
        losses.append(loss.item())
    return losses, optree.tree_map(torch.Tensor.detach, params)


def train(mesh, fn, params, batches, transform):
    sharded = sl.shard(params, mesh, transform)
    state, step = sl.make_train_step(fn, sharded, sl.optim.sgd(RATE))
    axes = sharded.plan.batch_axes
    ranks, index = sharded.plan.batch_ranks, 0
    for axis in axes:
        index = index * mesh.shape[axis] + mesh.coords[axis]
    losses = []
    for batch in batches:
        rows = len(batch["x"]) // ranks
        mine = {name: part[index * rows : (index + 1) * rows] for name, part in batch.items()}
        state, metrics = step(state, mine)
        losses.append(metrics["loss"].item())
    return losses, sl.unshard(state.params)


def batch_of(codes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(len(codes), 3, generator=generator, dtype=torch.float64), "code": torch.tensor(codes)}


TRANSFORMS = {
    "stage 0": ({"data": 2}, sl.zero(0)),
    "stage 1": ({"data": 2}, sl.zero(1)),
    "stage 2": ({"data": 2}, sl.zero(2)),
    "stage 3": ({"data": 2}, sl.zero(3)),
    "stage 3, three ranks": ({"data": 3}, sl.zero(3)),
    "no prefetch": ({"data": 2}, sl.zero(3, prefetch=False)),
    "hybrid": ({"data": 2, "copies": 2}, sl.zero(3, replicate="copies")),
    "second shards": ({"node": 2, "local": 2}, sl.chain(sl.zero(3, "node"), sl.zero(3, "local"), sl.hierarchical("local"))),
    "remat": ({"data": 2}, sl.chain(sl.zero(3), sl.remat())),
    "accumulate": ({"data": 2}, sl.chain(sl.zero(3), sl.accumulate(2))),
    "accumulate, kept whole": ({"data": 2}, sl.chain(sl.zero(3), sl.accumulate(2, sync="last"))),
    "accumulate at stage 2": ({"data": 2}, sl.chain(sl.zero(2), sl.accumulate(2))),
    "accumulate at stage 1": ({"data": 2}, sl.chain(sl.zero(1), sl.accumulate(2))),
    "frozen": ({"data": 2}, sl.chain(sl.zero(3), sl.freeze(["first/*"]))),
}


@st.composite
def routes(draw, rows, steps=4):
    """Each row's code in each step; in some steps all rows have the same."""
    codes = st.integers(0, (EXPERTS + 1) ** 2 - 1)
    alike = codes.map(lambda code: [code] * rows)
    return draw(st.lists(alike | st.lists(codes, min_size=rows, max_size=rows), min_size=steps, max_size=steps))


def check(name, codes, run):
    mesh, transform = TRANSFORMS[name]
    params, batches = parameters(), [batch_of(row, seed) for seed, row in enumerate(codes)]
    frozen = ("first",) if name == "frozen" else ()
    losses, final = one_device(loss_fn, params, batches, frozen)
    for got in run(train, loss_fn, params, batches, transform, mesh=mesh):
        assert got[0] == pytest.approx(losses, rel=TOLERANCE)
        assert_close(got[1], final, TOLERANCE)


@pytest.mark.parametrize("name", TRANSFORMS)
@settings(max_examples=max(6, settings().max_examples // 5))
@given(data=st.data())
def test_ranks_with_drawn_routes_train_like_one_device(name, data):
    rows = torch.Size(TRANSFORMS[name][0].values()).numel() * 2
    codes = data.draw(routes(rows))
    note(codes)
    check(name, codes, sl.simulate)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_real_processes_with_other_routes_train_like_one_device(pool, name):
    """Alike, then one strays, then all differ, then alike again; and different from the first step on."""
    rows = torch.Size(TRANSFORMS[name][0].values()).numel() * 2
    start = [1 + (EXPERTS + 1) * 2] * rows
    apart = [1 + number % EXPERTS for number in range(rows)]
    one = [*start[:-1], 3]
    check(name, [start, one, apart, start], pool.run)
    check(name, [apart, start, one], pool.run)
