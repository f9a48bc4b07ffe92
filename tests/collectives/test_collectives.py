"""Collectives by axis name: values, duals, higher derivatives and traffic, simulated and on real processes.

A loss summed over all ranks is one function of all ranks' inputs; an oracle computes it on one device from the
plain definition of each collective over a list of ranks' tensors.
"""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from helpers.measure import SCALARS, count_payload

import shardlib as sl
from shardlib import collectives
from shardlib.mesh.transport import EchoGroup
from shardlib.mesh.transport.simulation import RankMismatch

N = 4
SHAPE = (4, 3, 8)
PAIRS = [(0, 2), (2, 1), (3, 3)]

CASES = {
    "all_reduce varying": lambda x: collectives.all_reduce(x, "data", dst="varying"),
    "all_gather": lambda x: collectives.all_gather(x, "data", dim=1),
    "reduce_scatter": lambda x: collectives.reduce_scatter(x, "data", dim=2),
    "reduce_scatter 0": lambda x: collectives.reduce_scatter(x, "data"),
    "all_to_all": lambda x: collectives.all_to_all(x, "data", split_dim=0, concat_dim=2),
    "all_to_all back": lambda x: collectives.all_to_all(x, "data", split_dim=-1, concat_dim=1),
    "permute": lambda x: collectives.permute(x, "data", PAIRS),
    "broadcast": lambda x: collectives.broadcast(x, "data", source=1),
    # What is equal on all ranks, from what each rank brings: summed, then used by each rank in its own way.
    "all_reduce invariant, copy": lambda x: collectives.copy(
        collectives.all_reduce(x, "data", dst="invariant"), "data"
    ),
    "all_gather invariant, copy": lambda x: collectives.copy(
        collectives.all_gather(x, "data", dim=1, dst="invariant"), "data"
    ),
    "all_gather invariant, split": lambda x: collectives.split(
        collectives.all_gather(x, "data", dim=1, dst="invariant"), "data", dim=2
    ),
}

# The same over a list with every rank's tensor.
DEFINITIONS = {
    "all_reduce varying": lambda xs: [sum(xs)] * N,
    "all_gather": lambda xs: [torch.cat(xs, 1)] * N,
    "reduce_scatter": lambda xs: list(sum(xs).chunk(N, 2)),
    "reduce_scatter 0": lambda xs: list(sum(xs).chunk(N, 0)),
    "all_to_all": lambda xs: [torch.cat([x.chunk(N, 0)[r] for x in xs], 2) for r in range(N)],
    "all_to_all back": lambda xs: [torch.cat([x.chunk(N, 2)[r] for x in xs], 1) for r in range(N)],
    "permute": lambda xs: [torch.zeros_like(xs[0]), xs[2], xs[0], xs[3]],
    "broadcast": lambda xs: [xs[1]] * N,
    "all_reduce invariant, copy": lambda xs: [sum(xs)] * N,
    "all_gather invariant, copy": lambda xs: [torch.cat(xs, 1)] * N,
    "all_gather invariant, split": lambda xs: list(torch.cat(xs, 1).chunk(N, 2)),
}


def inputs():
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(N)]


def rank_loss(y, rank):
    """A nonlinear loss that differs on every rank."""
    weight = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape) + rank
    return (torch.sin(y) * weight).sum()


def penalty(grad, rank):
    """A function of the first derivative, to differentiate again."""
    return (grad.pow(3) * (1 + rank)).sum()


def oracle(name):
    """Values, first and second derivatives on one device."""
    xs = [x.requires_grad_() for x in inputs()]
    ys = DEFINITIONS[name](xs)
    total = sum(rank_loss(y, r) for r, y in enumerate(ys))
    first = torch.autograd.grad(total, xs, create_graph=True, materialize_grads=True)
    second = torch.autograd.grad(sum(penalty(g, r) for r, g in enumerate(first)), xs, materialize_grads=True)
    return [t.detach() for t in ys], [t.detach() for t in first], list(second)


def by_autograd(mesh, name):
    x = inputs()[mesh.rank].requires_grad_()
    y = CASES[name](x)
    (first,) = torch.autograd.grad(rank_loss(y, mesh.rank), x, create_graph=True)
    (second,) = torch.autograd.grad(penalty(first, mesh.rank), x, materialize_grads=True)
    return y.detach(), first.detach(), second


def by_forward_mode(mesh, name):
    x = inputs()[mesh.rank]
    y = CASES[name](forward_ad.make_dual(x, x.cos()))
    return forward_ad.unpack_dual(y)


def by_func_grad(mesh, name):
    x, fn = inputs()[mesh.rank], CASES[name]

    def loss(x):
        return rank_loss(fn(x), mesh.rank)

    first = torch.func.grad(loss)
    second = torch.func.grad(lambda x: penalty(first(x), mesh.rank))
    return fn(x), first(x), second(x)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", [by_autograd, by_func_grad])
def test_values_and_two_derivatives(how, name):
    for ours, theirs in zip(zip(*sl.simulate(how, name, mesh={"data": N})), oracle(name)):
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_a_tangent_is_exchanged_as_its_tensor_is(name):
    with forward_ad.dual_level():  # of the process: simulated ranks share it
        found = sl.simulate(by_forward_mode, name, mesh={"data": N})
    tangents = DEFINITIONS[name]([x.cos() for x in inputs()])  # all are linear
    for (_, tangent), wanted in zip(found, tangents, strict=True):
        torch.testing.assert_close(tangent, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", [by_autograd, by_func_grad])
def test_values_and_two_derivatives_on_real_processes(pool, how):
    results = pool.run(lambda mesh: [how(mesh, name) for name in CASES], mesh={"data": N})
    for position, name in enumerate(CASES):
        for ours, theirs in zip(zip(*[result[position] for result in results]), oracle(name)):
            for a, b in zip(ours, theirs):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_first_derivatives_are_finite_differences():
    step = 1e-6
    for name, define in DEFINITIONS.items():
        got = sl.simulate(by_autograd, name, mesh={"data": N})
        for rank in range(N):
            probe = torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
            values = []
            for sign in (1, -1):
                xs = inputs()
                xs[rank] = xs[rank] + sign * step * probe
                values.append(sum(rank_loss(y, r) for r, y in enumerate(define(xs))))
            slope = (values[0] - values[1]) / (2 * step)
            torch.testing.assert_close((got[rank][1] * probe).sum(), slope, rtol=1e-7, atol=1e-7)


def test_a_sum_that_is_followed_by_one_common_loss():
    """all_reduce to "invariant": the loss is one function, not one per rank, so cotangents are not summed."""
    total = sum(x.sin() for x in inputs())

    def run(mesh, gradient_of):
        x = inputs()[mesh.rank]
        return gradient_of(lambda x: collectives.all_reduce(x.sin(), "data", dst="invariant").pow(2).sum(), x)

    def by_autograd(loss, x):
        x = x.requires_grad_()
        return torch.autograd.grad(loss(x), x)[0]

    for gradient_of in (by_autograd, lambda loss, x: torch.func.grad(loss)(x)):
        for x, grad in zip(inputs(), sl.simulate(run, gradient_of, mesh={"data": N})):
            torch.testing.assert_close(grad, 2 * total * x.cos(), rtol=1e-12, atol=1e-12)


def test_each_axis_of_a_mesh_on_its_own():
    def run(mesh):
        x = torch.tensor([float(mesh.rank)])
        sums = [collectives.all_reduce(x, axis, dst="varying").item() for axis in ("a", "b", "c")]
        return sums, collectives.all_gather(collectives.all_gather(x, "c"), "a").tolist()

    results = sl.simulate(run, mesh={"a": 2, "b": 1, "c": 3})
    for rank, (sums, gathered) in enumerate(results):
        a, c = divmod(rank, 3)
        assert sums == [c + (3 + c), rank, sum(3 * a + other for other in range(3))]
        assert gathered == [0, 1, 2, 3, 4, 5]


def test_on_real_processes_each_axis_on_its_own(pool):
    def run(mesh):
        x = torch.tensor([float(mesh.rank)])
        return [collectives.all_reduce(x, axis, dst="varying").item() for axis in ("a", "b")]

    assert pool.run(run, mesh={"a": 2, "b": 2}) == [[2, 1], [4, 1], [2, 5], [4, 5]]


def test_sums_of_16_bit_numbers_are_in_fp32(pool):
    """Adding four bf16 numbers one by one would round three times."""
    values = torch.tensor([256.0, 1.0, 1.0, 1.0])

    def run(mesh):
        mine = values[mesh.rank].expand(4).to(torch.bfloat16)
        return collectives.reduce_scatter(mine, "data").item()

    assert sl.simulate(run, mesh={"data": N}) == [260.0] * N
    assert pool.run(run, mesh={"data": N}) == [260.0] * N


BYTES = 8 * 96  # of one input


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("all_reduce varying", 2 * BYTES * 3 // 4, 2 * BYTES * 3 // 4),
        ("all_gather", 3 * BYTES, 3 * BYTES),
        ("reduce_scatter", BYTES * 3 // 4, BYTES * 3 // 4),
        ("all_to_all", BYTES * 3 // 4, BYTES * 3 // 4),
    ],
)
def test_traffic_is_counted_exactly(name, forward, backward):
    def run(mesh):
        sent = count_payload(mesh)
        x = inputs()[mesh.rank].requires_grad_()
        loss = rank_loss(CASES[name](x), mesh.rank)
        recorded = [(sent()["data"], dict(mesh.traffic.payload))]
        mesh.traffic.reset()
        loss.backward()
        return [*recorded, (sent()["data"], dict(mesh.traffic.payload))]

    for recorded in sl.simulate(run, mesh={"data": N}):
        assert recorded == [(forward, {"data": forward}), (backward, {"data": backward})]


def test_traffic_of_point_to_point_is_counted_where_it_leaves():
    def run(mesh):
        x = inputs()[mesh.rank]
        collectives.permute(x, "data", PAIRS)
        moved = mesh.traffic.payload.get("data", 0)
        mesh.traffic.reset()
        collectives.broadcast(x, "data", source=1)
        return moved, mesh.traffic.payload.get("data", 0)

    assert sl.simulate(run, mesh={"data": N}) == [(BYTES, 0), (0, 3 * BYTES), (BYTES, 0), (0, 0)]


def test_an_echo_gathers_into_the_buffer_that_holds_its_input():
    buffer = torch.arange(6.0)
    EchoGroup(3, rank=1).all_gather(buffer, buffer[2:4])
    assert buffer.tolist() == [2, 3] * 3


def test_scalars_are_counted_separately_and_an_axis_of_one_rank_is_not():
    def run(mesh):
        params = sl.shard({"w": torch.ones(2)}, mesh, sl.chain(sl.zero(0), sl.zero(0, axis="single")))
        state, step = sl.make_train_step(lambda params, batch: params["w"].sum(), params, sl.optim.sgd(0.1))
        state, _ = step(state, torch.ones(1))  # in the first step ranks compare what they do
        mesh.traffic.reset()
        step(state, torch.ones(1))
        return mesh.traffic.payload, mesh.traffic.scalars

    for payload, scalars in sl.simulate(run, mesh={"data": 2, "single": 1}):
        assert payload == {"data": 8}  # an all-reduce of two numbers of 4 bytes: 2 · 8 · (2 − 1)/2
        assert scalars == {"data": 8 * SCALARS}  # and of numbers of 8 bytes


@pytest.mark.parametrize("stage", [2, 3])
def test_inside_the_loss_of_a_train_step(stage):
    """A batch norm over the global batch: statistics summed over ranks, right in value and gradient."""
    generator = torch.Generator().manual_seed(7)
    w = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    x = torch.randn(8, 3, generator=generator, dtype=torch.float64)

    def loss_fn(params, batch, total=lambda t: collectives.all_reduce(t, "data", dst="varying")):
        h = batch @ params["w"].T
        rows = total(torch.tensor(float(len(h)), dtype=torch.float64))
        mean = total(h.sum(0)) / rows
        var = total((h - mean).square().sum(0)) / rows
        return torch.tanh((h - mean) / (var + 0.1).sqrt()).pow(3).mean()

    def run(mesh):
        params = sl.shard({"w": w}, mesh, stage=stage)
        loss, grads = sl.value_and_grad(loss_fn)(params, x.chunk(2)[mesh.rank])
        return loss, sl.unshard(grads)["w"]

    leaf = w.clone().requires_grad_()
    expected = loss_fn({"w": leaf}, x, total=lambda t: t)
    expected.backward()
    for loss, grad in sl.simulate(run, mesh={"data": 2}):
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(grad, leaf.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: collectives.all_gather(x, "model"), r"axis 'model' is not on mesh\(data=4\); use one of 'data'"),
        (
            lambda x: collectives.all_gather(x, "data", dim=3),
            r"dimension 3 is outside a tensor of shape \(4, 3, 8\)",
        ),
        (
            lambda x: collectives.reduce_scatter(x, "data", dim=1),
            r"dimension 1 of shape \(4, 3, 8\) does not divide over axis 'data' of",
        ),
        (
            lambda x: collectives.all_to_all(x, "data", split_dim=1, concat_dim=0),
            r"all_to_all: dimension 1 of shape",
        ),
        (lambda x: collectives.permute(x, "data", [(0, 4)]), r"do not fit axis 'data' of size 4"),
        (lambda x: collectives.permute(x, "data", [(0, 1), (2, 1)]), r"each rank sends once and receives once at most"),
        (
            lambda x: collectives.broadcast(x, "data", source=4),
            r"broadcast source 4 is outside axis 'data' of size 4",
        ),
        (lambda x: collectives.all_reduce(x, "data", dst="replicated"), r"dst='replicated': pass 'invariant'"),
    ],
)
def test_impossible_calls_are_refused(call, message):
    with pytest.raises((sl.errors.ShardlibError, ValueError), match=message):
        sl.simulate(lambda mesh: call(inputs()[mesh.rank]), mesh={"data": N})


def test_without_a_mesh_the_call_says_so():
    with pytest.raises(sl.errors.ShardlibError, match="no mesh here for axis 'data'; pass mesh="):
        collectives.all_gather(torch.ones(2), "data")


def test_ranks_that_disagree_on_the_size_are_named():
    with pytest.raises(
        RankMismatch,
        match=r"rank 0 calls all_gather\(2 × float32\), .*; rank 1 calls all_gather\(3 × float32\), for activations",
    ):
        sl.simulate(lambda mesh: collectives.all_gather(torch.ones(2 + mesh.rank), "data"), mesh={"data": 2})
