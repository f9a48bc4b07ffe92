"""Training with PowerSGD: against a plain simulation, on meshes, in plans, in checkpoints."""

import math

import optree
import pytest
import torch
import torch.nn.functional as F
from helpers.measure import count_payload, stored_bytes
from oracle.power_sgd import PowerSGD

import shardlib as sl
from shardlib import checkpoint
from shardlib.checkpoint.residuals import residual_fragments

WIDE = torch.float64


def normal(*shape, seed, scale=0.3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=WIDE) * scale


def params(dtype=WIDE):
    """Leaves of one to three dimensions; c has no fewer numbers as factors of rank 2."""
    tree = {
        "a": normal(13, 6, seed=1),
        "b": normal(6, seed=2),
        "c": normal(6, 3, seed=3),
        "d": normal(6, 3, 6, seed=4),
    }
    return {"net": {name: leaf.to(dtype) for name, leaf in tree.items()}, "top": normal(13, seed=5).to(dtype)}


def loss_fn(params, batch):
    x, y = batch
    p = params["net"]
    hidden = torch.tanh(x @ p["a"] + p["b"]) + torch.einsum("ri,ijk->rjk", x[:, :6], p["d"]).tanh().mean(1)
    return (hidden @ p["c"] + (x[:, :13] @ params["top"])[:, None] - y).square().mean()


def batch_of(index, step, dtype=WIDE):
    return normal(4, 13, seed=1000 * step + index, scale=1).to(dtype), normal(4, 3, seed=step, scale=1).to(dtype)


def simulated(rank, ranks, steps, microbatches=1):
    """The same in a loop over ranks: torch's gradients and AdamW, sums by the oracle."""
    tree = params()
    leaves = [leaf.requires_grad_() for leaf in optree.tree_leaves(tree)]
    optimizer = torch.optim.AdamW(leaves, lr=1e-2, eps=1e-8, weight_decay=1e-4, foreach=False, fused=False)
    sums = [PowerSGD(ranks, tuple(leaf.shape), rank) for leaf in leaves]
    for step in range(steps):
        each = []
        for position in range(ranks):
            x, y = (part.chunk(microbatches) for part in batch_of(position, step))
            loss = sum(map(loss_fn, [tree] * microbatches, zip(x, y, strict=True)))
            each.append(torch.autograd.grad(loss / microbatches / ranks, leaves))
        for leaf, total, grads in zip(leaves, sums, zip(*each, strict=True), strict=True):
            leaf.grad = total(list(grads))
        optimizer.step()
    return [leaf.detach() for leaf in leaves]


def trained(mesh, transform, steps, dtype=WIDE, **kwargs):
    state, step = sl.make_train_step(loss_fn, sl.shard(params(dtype), mesh, transform), sl.optim.adamw(1e-2), **kwargs)
    for number in range(steps):
        state, _ = step(state, batch_of(mesh.coords["data"], number, dtype))
    return state, step


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("rank", [1, 2, 9])
def test_trains_like_the_simulation(rank, ranks, microbatches):
    """Rank 9 is more than some dimensions have, and leaves every matrix as it is."""
    transform = sl.chain(sl.zero(0), sl.powersgd(rank), sl.accumulate(microbatches))
    wanted = simulated(rank, ranks, 12, microbatches)

    def run(mesh):
        return optree.tree_leaves(sl.unshard(trained(mesh, transform, 12)[0].params))

    for got in sl.simulate(run, mesh={"data": ranks}):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_a_single_rank_sends_and_keeps_nothing():
    def run(mesh):
        plain, _ = trained(mesh, sl.zero(0), 3)
        state, _ = trained(mesh, sl.chain(sl.zero(0), sl.powersgd(1)), 3)
        return state.comm, all(map(torch.equal, *(optree.tree_leaves(s.params) for s in (plain, state))))

    assert sl.simulate(run, mesh={"data": 1}) == [({}, True)]


def halves(tree):
    """The leaves that two slices of ``up`` and ``down`` are, as leaves of their own."""
    up, down = tree["up"].chunk(2, 0), tree["down"].chunk(2, 1)
    return {"up": [part.contiguous() for part in up], "down": [part.contiguous() for part in down]}


def test_each_slice_is_factorised_separately():
    tree = {"up": normal(16, 12, seed=1), "down": normal(10, 16, seed=2)}
    rules = sl.tensor_slicing({"up": "column", "down": "row"})

    def sliced(p, x):
        return F.linear(torch.tanh(F.linear(x, p["up"])), p["down"]).square().mean()

    def in_halves(p, x):
        return sliced({"up": torch.cat(p["up"], 0), "down": torch.cat(p["down"], 1)}, x)

    def run(mesh, loss, tree, transform):
        transform = sl.chain(sl.zero(0), sl.powersgd(2), *transform)
        state, step = sl.make_train_step(loss, sl.shard(tree, mesh, transform), sl.optim.sgd(0.1, momentum=0.9))
        for number in range(6):
            state, _ = step(state, normal(4, 12, seed=10 * number + mesh.coords["data"], scale=1))
        return sl.unshard(state.params)

    wanted = sl.simulate(run, in_halves, halves(tree), [], mesh={"data": 2})[0]
    for got in sl.simulate(run, sliced, tree, [rules], mesh={"data": 2, "model": 2}):
        torch.testing.assert_close(halves(got), wanted, rtol=1e-10, atol=1e-10)


def test_stages_of_a_pipeline_change_nothing():
    tree = [{"w": normal(9, 9, seed=number)} for number in range(4)]

    def block(p, carry, x):
        return torch.tanh((x if carry is None else carry) @ p["w"])

    def last(p, carry, x):
        return (carry @ p["w"]).square().mean()

    loss = sl.sequential([block, block, block, last])

    def run(mesh, schedule):
        transform = sl.chain(sl.zero(0), sl.powersgd(2), schedule)
        state, step = sl.make_train_step(loss, sl.shard(tree, mesh, transform), sl.optim.sgd(0.1, momentum=0.9))
        for number in range(5):
            state, _ = step(state, normal(4, 9, seed=10 * number + mesh.coords["data"], scale=1))
        return sl.unshard(state.params)

    wanted = sl.simulate(run, sl.accumulate(2), mesh={"data": 2})[0]
    for got in sl.simulate(run, sl.pipeline("1f1b", 2), mesh={"data": 2, "pipe": 2}):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, WIDE])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_and_payload_are_the_plans_and_the_formulas(ranks, dtype):
    """2(n−1)/n of what the two messages of a unit hold; errors of every element, and factors [m, 2] of a and d."""

    def run(mesh):
        transform = sl.chain(sl.zero(0), sl.powersgd(2))
        plan = sl.make_plan(params(dtype), mesh, transform)
        state, step = trained(mesh, transform, 1, dtype)
        sent = count_payload(mesh)
        held = stored_bytes(state.comm)
        step(state, batch_of(mesh.rank, 1, dtype))
        specs = sum(leaf.local_bytes(plan.sizes) for leaf in plan.residuals)
        return sent()["data"], plan.payload()["data"], held, plan.bytes("comm"), specs

    def message(elements):
        return 2 * (ranks - 1) * math.ceil(elements / ranks) * dtype.itemsize

    payload = message(2 * (13 + 6)) + message(2 * (6 + 18) + 6 + 6 * 3) + message(13)
    kept = (13 * 6 + 6 + 6 * 3 + 6 * 18 + 13 + 2 * (6 + 18)) * dtype.itemsize
    assert sl.simulate(run, mesh={"data": ranks}) == [(payload, payload, kept, kept, kept)] * ranks


def test_specs_say_over_which_axes_residuals_and_factors_differ():
    """Errors are each rank's own; factors are equal over their axis, and differ over one that is summed after it."""
    transform = sl.chain(sl.zero(0, replicate="node"), sl.powersgd(2))

    def specs(**mesh):
        plan = sl.make_plan(params(), sl.abstract_mesh(**mesh), transform)
        return {leaf.path: (leaf.shape, leaf.spec) for leaf in plan.residuals if leaf.path.startswith("net")}

    errors, factors = 13 * 6 + 6 + 6 * 3 + 6 * 18, 2 * (6 + 18)
    before, after = specs(node=2, data=3), specs(data=3, node=2)
    assert before["net/float64@data/sent"] == ((6, errors), sl.P(("node", "data")))
    assert before["net/float64@data/factors"] == ((2, factors), sl.P("node"))
    assert after["net/float64@data/sent"] == ((3, errors), sl.P("data"))
    assert after["net/float64@data/factors"] == ((1, factors), sl.P())


def test_the_plan_prints_what_is_sent():
    plan = sl.make_plan(params(), sl.abstract_mesh(data=2), sl.chain(sl.zero(0), sl.powersgd(2)))
    assert "powersgd(2): gradients travel over axis 'data' in factors of rank 2" in str(plan)


MESHES = {
    "data": ({"data": 3}, sl.chain(sl.zero(0), sl.powersgd(2))),
    "before another": ({"data": 2, "node": 2}, sl.chain(sl.zero(0, replicate="node"), sl.powersgd(2))),
    "after another": ({"node": 2, "data": 2}, sl.chain(sl.zero(0, replicate="node"), sl.powersgd(2))),
    "both": ({"data": 2, "node": 2}, sl.chain(sl.zero(0, replicate="node"), sl.powersgd(2), sl.powersgd(1, "node"))),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_checkpoint_keeps_everything(tmp_path, name):
    shape, transform = MESHES[name]

    def go_on(mesh, state, step):
        for number in range(3, 6):
            state, _ = step(state, batch_of(mesh.rank, number))
        return optree.tree_leaves((sl.unshard(state.params), state.comm))

    def straight(mesh):
        state, step = trained(mesh, transform, 0)
        for number in range(3):
            state, _ = step(state, batch_of(mesh.rank, number))
        checkpoint.save(tmp_path, state)
        return go_on(mesh, state, step)

    def resumed(mesh):
        state, step = trained(mesh, transform, 0)
        return go_on(mesh, checkpoint.restore(checkpoint.latest(tmp_path), state), step)

    for wanted, got in zip(sl.simulate(straight, mesh=shape), sl.simulate(resumed, mesh=shape), strict=True):
        assert all(map(torch.equal, wanted, got))


def result(mesh, state):
    """Σ over ranks of each leaf's errors, as they are saved; and the factors."""
    totals = {}
    for fragment in residual_fragments(state):
        kind, _, _, path = fragment.name.split("/", 4)[1:]
        if kind == "sum":
            totals[path] = totals.get(path, 0) + fragment.data.clone()
    return totals, {name: value.clone() for name, value in state.comm.items() if name.endswith("/factors")}


@pytest.mark.parametrize("ranks", [(3, 2), (2, 4)])
@pytest.mark.parametrize("rank", [2, 1])
def test_the_total_residual_and_the_factors_are_kept_on_another_number_of_ranks(tmp_path, ranks, rank):
    """Factors of another rank start anew."""

    def save(mesh):
        state, _ = trained(mesh, sl.chain(sl.zero(0), sl.powersgd(2)), 3)
        checkpoint.save(tmp_path, state)
        return result(mesh, state)

    def load(mesh):
        state, _ = trained(mesh, sl.chain(sl.zero(0), sl.powersgd(rank)), 0)
        _, fresh = result(mesh, state)
        return *result(mesh, checkpoint.restore(checkpoint.latest(tmp_path), state)), fresh

    before, after = sl.simulate(save, mesh={"data": ranks[0]}), sl.simulate(load, mesh={"data": ranks[1]})
    for path in ("net/a", "net/d"):
        wanted = sum(totals[path] for totals, _ in before)
        assert wanted.abs().sum() > 0
        torch.testing.assert_close(sum(totals[path] for totals, _, _ in after), wanted, rtol=1e-12, atol=1e-12)
    for _, factors, fresh in after:
        wanted = before[0][1] if rank == 2 else fresh
        assert all(torch.equal(factors[name], wanted[name]) for name in wanted)


def test_factors_that_differ_between_nodes_are_taken_over_from_the_first(tmp_path):
    transform = sl.chain(sl.zero(0, replicate="node"), sl.powersgd(2))

    def save(mesh):
        state, step = trained(mesh, transform, 0)
        state, _ = step(state, batch_of(mesh.rank, 0))
        checkpoint.save(tmp_path, state)
        return result(mesh, state)[1]

    def load(mesh):
        state, _ = trained(mesh, transform, 0)
        return result(mesh, checkpoint.restore(checkpoint.latest(tmp_path), state))[1]

    first, _, second, _ = sl.simulate(save, mesh={"node": 2, "data": 2})
    after = sl.simulate(load, mesh={"node": 3, "data": 2})
    name = "net/float64@data/factors"
    assert not torch.equal(first[name], second[name])
    assert all(torch.equal(factors[name], first[name]) for factors in after)


SPLITS = [
    ({"data": 2}, sl.zero(1), "data"),
    ({"data": 2}, sl.zero(2), "data"),
    ({"data": 2}, sl.zero(3), "data"),
    ({"data": 1}, sl.zero(3), "data"),
    ({"node": 2, "local": 2}, sl.zero(1, axis="local", replicate="node"), "local"),
]


@pytest.mark.parametrize(("shape", "split", "over"), SPLITS)
def test_split_gradients_are_refused(shape, split, over):
    axis = "node" if "node" in shape else "data"
    message = (
        f"axis '{axis}' in factors of rank 4, .* whole leaves.* zero splits the state over axis '{over}': use zero"
    )
    with pytest.raises(sl.errors.IllegalComposition, match=message):
        sl.make_plan(params(), sl.abstract_mesh(**shape), sl.chain(split, sl.powersgd(axis=axis)))


def test_what_makes_no_sense_is_refused():
    for rank in (0, -1, 1.5, True, "4"):
        with pytest.raises(sl.errors.IllegalComposition, match="use the number of columns of the factors, 1 or more"):
            sl.powersgd(rank)
    mesh = sl.abstract_mesh(data=2)
    with pytest.raises(sl.errors.IllegalComposition, match=r"onebit.* and powersgd.* both claim"):
        sl.make_plan(params(), mesh, sl.chain(sl.zero(0), sl.onebit(), sl.powersgd()))
    with pytest.raises(sl.errors.IllegalComposition, match="nothing sums them there: add zero"):
        sl.make_plan(params(), sl.abstract_mesh(data=2, model=1), sl.chain(sl.zero(0), sl.powersgd(axis="model")))
    with pytest.raises(sl.errors.IllegalComposition, match="already sends them over it in factors of rank 4; drop one"):
        transform, tx = sl.chain(sl.zero(0), sl.powersgd()), sl.optim.onebit_adam(1e-3, 4)
        sl.make_plan(params(), mesh, transform, optimizer=tx)


def test_without_a_state_residuals_are_refused():
    def run(mesh):
        sharded = sl.shard(params(), mesh, sl.chain(sl.zero(0), sl.powersgd()))
        with pytest.raises(sl.errors.IllegalComposition, match=r"use sl\.make_train_step"):
            sl.value_and_grad(loss_fn)(sharded, batch_of(mesh.rank, 0))

    sl.simulate(run, mesh={"data": 2})


def test_real_processes_get_what_simulated_ranks_get(pool):
    def run(mesh):
        state, _ = trained(mesh, sl.chain(sl.zero(0), sl.powersgd(2)), 4)
        return optree.tree_leaves((sl.unshard(state.params), state.comm))

    for real, simulated in zip(pool.run(run, mesh={"data": 2}), sl.simulate(run, mesh={"data": 2}), strict=True):
        torch.testing.assert_close(real, simulated, rtol=1e-12, atol=1e-12)
