"""What torch differentiates, maps and compiles inside of a loss, and around a step: right, or refused with the remedy."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from helpers import training
from helpers.models import mlp, regression_batch, share
from helpers.trees import assert_close
from oracle import one_device

import shardlib as sl
from shardlib.errors import HandleError, LossError

STAGES = pytest.mark.parametrize("stage", [0, 2, 3])
RANKS = 2
BATCHES = [regression_batch(8, 6, 4, seed=seed) for seed in range(2)]
POLICIES = {"none": None, "full": sl.remat(), "dots": sl.remat("dots"), "named": sl.remat(save=["product"])}


def layer(p, x):
    return torch.tanh(sl.nn.checkpoint_name(x @ p["weight"].t(), "product") + p["bias"])


def fit(params, x, y, block=layer):
    for p in params["layers"]:
        x = block(p, x)
    return (x - y).square().mean()


def attacked(gradient):
    """The loss at inputs that are moved against it (FGSM)."""

    def loss_fn(params, batch):
        x = batch[0].clone().requires_grad_()
        return fit(params, x.detach() + 0.1 * gradient(fit(params, x, batch[1]), x).sign(), batch[1])

    return loss_fn


def by_inputs(value, x):
    value.backward(inputs=[x])
    return x.grad


def by_backward(value, x):
    value.backward()
    return x.grad


def by_grad(value, x):
    return torch.autograd.grad(value, x)[0]


def penalty(block, params, batch):
    """A gradient's norm beside the loss."""
    x = batch[0].clone().requires_grad_()
    value = fit(params, x, batch[1], block)
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    return value + slope.square().sum()


def directional(block, params, batch):
    """The derivative along a direction, in forward mode."""
    with forward_ad.dual_level():
        x = forward_ad.make_dual(batch[0], batch[0].cos())
        return forward_ad.unpack_dual(fit(params, x, batch[1], block)).tangent.square()


func = torch.func


def fit_batch(params, batch):
    return fit(params, *batch)


def slopes(params, batch):
    """The norms of a model's gradients with respect to each of its inputs."""
    each = lambda x, y: fit(params, x[None], y[None])  # noqa: E731
    return (func.vmap(func.grad(each))(*batch).norm(dim=-1) - 1).square().mean() + fit(params, *batch)


def jacobian(params, batch):
    p = params["layers"][0]
    return func.vmap(func.jacrev(lambda x: layer(p, x)))(batch[0]).square().mean() + fit(params, *batch)


def cotangents(params, batch):
    value, pull = func.vjp(lambda x: fit(params, x, batch[1]), batch[0])
    return value + pull(torch.ones_like(value))[0].square().sum()


def adapted(params, batch):
    """The loss of parameters that took a step of their own (MAML)."""
    inner = func.grad(lambda params: fit(params, *batch))(params)
    step = lambda p, g: p - 0.1 * g  # noqa: E731
    return fit(torch.utils._pytree.tree_map(step, params, inner), *batch)


def clipped(params, batch):
    """A function of the gradient of each sample."""
    each = lambda params, x, y: fit(params, x[None], y[None])  # noqa: E731
    gradients = func.vmap(func.grad(each), (None, 0, 0))(params, *batch)
    norms = sum(g.flatten(1).square().sum(1) for g in torch.utils._pytree.tree_leaves(gradients)).sqrt()
    return (norms.clamp(max=1.0)).sum() + fit(params, *batch)


def ensemble(params, batch):
    """Two models whose first layers are the halves of one leaf."""
    first, second = params["layers"]
    halves = {"weight": first["weight"].unflatten(0, (3, -1)), "bias": first["bias"].unflatten(0, (3, -1))}
    outputs = func.vmap(layer, (0, None))(halves, batch[0]).movedim(0, -2).flatten(-2)
    return (layer(second, outputs) - batch[1]).square().mean()


def tangents(params, batch):
    value, tangent = func.jvp(lambda x: fit(params, x, batch[1]), (batch[0],), (batch[0].cos(),))
    return value + tangent.square()


def curvature(params, batch):
    """The Hessian with respect to inputs, and a product of that with respect to parameters."""
    energy = lambda x, y: fit(params, x[None], y[None])  # noqa: E731
    of_inputs = func.vmap(func.hessian(energy))(*batch).square().mean()
    gradient = func.grad(lambda params: fit(params, *batch))
    along = torch.utils._pytree.tree_map(lambda p: p.detach().sin(), params)
    product = func.jvp(gradient, (params,), (along,))[1]
    return of_inputs + sum(p.square().sum() for p in torch.utils._pytree.tree_leaves(product)) + fit(params, *batch)


REVERSE = {fn.__name__: fn for fn in (slopes, jacobian, cotangents, adapted, clipped, ensemble)}
FORWARD = {fn.__name__: fn for fn in (tangents, curvature)}


def network():
    return mlp([6, 9, 4])[1]


def check(results, loss_fn):
    mean = lambda params, batch: sum(loss_fn(params, share(batch, r, RANKS)) for r in range(RANKS)) / RANKS  # noqa: E731
    wanted = one_device.train(mean, network(), BATCHES, max_norm=0.5)
    for losses, _, final in results:
        assert losses == pytest.approx(wanted[0], rel=1e-10)
        assert_close(final, wanted[2], 1e-10)


@STAGES
@pytest.mark.parametrize("gradient", [by_grad, by_inputs])
def test_adversarial_examples(stage, gradient):
    run = lambda m: training.train(m, loss_fn, network(), BATCHES, sl.zero(stage), training.optimizer(0.5))  # noqa: E731
    loss_fn = attacked(gradient)
    check(sl.simulate(run, mesh={"data": RANKS}), loss_fn)


@STAGES
def test_backward_inside_the_loss_is_refused(stage):
    """Its gradients would be the step's: in a later micro-batch nothing would stop them."""
    calls = []

    def loss_fn(params, batch):
        calls.append(batch)
        return attacked(by_backward if len(calls) > 1 else by_grad)(params, batch)

    sharded = sl.shard(network(), sl.make_mesh(), sl.chain(sl.zero(stage), sl.accumulate(2)))
    with pytest.raises(
        LossError, match=r"backward\(\) inside the loss reaches layers/1. Use torch.autograd.grad\(value"
    ):
        sl.value_and_grad(loss_fn)(sharded, BATCHES[0])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stage", [0, 3])
def test_derivatives_through_recomputed_blocks(pool, stage, policy):
    """In processes: forward mode is of a process, not of a thread."""
    how = POLICIES[policy]
    transform = sl.zero(stage) if how is None else sl.chain(sl.zero(stage), how)

    def run(mesh, of):
        loss_fn = lambda params, batch: of(sl.block(layer), params, batch)  # noqa: E731
        return training.train(mesh, loss_fn, network(), BATCHES, transform, training.optimizer(0.5))

    for of in (penalty, directional):
        check(pool.run(run, of, mesh={"data": RANKS}), lambda params, batch, of=of: of(layer, params, batch))


@pytest.mark.parametrize("loss", REVERSE)
@STAGES
def test_torch_func_in_a_loss(stage, loss):
    """At stage 3 the first call in a transform is taken again, without hooks on saved tensors."""
    run = lambda m: training.train(m, REVERSE[loss], network(), BATCHES, sl.zero(stage), training.optimizer(0.5))  # noqa: E731
    check(sl.simulate(run, mesh={"data": RANKS}), REVERSE[loss])


def test_torch_func_in_pipeline_stages():
    """Each micro-batch in flight is a run of its own; the plan traces a stage anew once it knows that it holds parameters."""

    def sloped(p, x, batch):
        return x + func.vmap(func.grad(lambda x: layer(p, x).square().sum()))(x)

    width = mlp([6, 6, 6, 6, 6])[1]["layers"]
    last = lambda p, x, batch: (layer(p, x) - batch["y"]).square().mean()  # noqa: E731
    loss_fn = sl.sequential([lambda p, _, batch: layer(p, batch["x"]), sloped, sloped, last])
    batches = [dict(zip("xy", regression_batch(8, 6, 6, seed=seed))) for seed in range(2)]
    chain = sl.chain(sl.pipeline("1f1b", microbatches=2), sl.zero(3))
    run = lambda m: training.train(m, loss_fn, width, batches, chain, training.optimizer(0.5))  # noqa: E731
    wanted = one_device.train(loss_fn, width, batches, max_norm=0.5)
    for losses, *_ in sl.simulate(run, mesh={"data": 2, "pipe": 2}):
        assert losses == pytest.approx(wanted[0], rel=1e-10)
    shares = {name: leaf[:4] for name, leaf in batches[0].items()}
    assert sl.make_plan(width, sl.abstract_mesh(data=2, pipe=2), chain, loss_fn=loss_fn, batch=shares).live_bytes


def test_torch_func_that_one_rank_begins_to_call_later():
    """That rank leaves the trace, in whose backward the others gather."""

    def run(mesh):
        steps = []

        def loss_fn(params, batch):
            return (slopes if mesh.rank == 1 and len(steps) >= 2 else fit_batch)(params, batch)

        state, step = sl.make_train_step(loss_fn, sl.shard(network(), mesh, stage=3), sl.optim.sgd(0.1))
        for _ in range(4):
            state, metrics = step(state, share(BATCHES[0], mesh.rank, RANKS))
            steps.append(float(metrics["loss"]))
        return steps

    params, wanted = network(), []
    leaves = [leaf.requires_grad_() for p in params["layers"] for leaf in p.values()]
    for number in range(4):
        losses = [fit_batch, slopes if number >= 2 else fit_batch]
        loss = sum(fn(params, share(BATCHES[0], rank, RANKS)) for rank, fn in enumerate(losses)) / RANKS
        wanted.append(loss.item())
        with torch.no_grad():
            for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
                leaf -= 0.1 * gradient
    for losses in sl.simulate(run, mesh={"data": RANKS}):
        assert losses == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("loss", FORWARD)
def test_forward_mode_of_torch_func_in_a_loss(pool, loss):
    def run(mesh, loss_fn, stage):
        return training.train(mesh, loss_fn, network(), BATCHES, sl.zero(stage), training.optimizer(0.5))

    for stage in (1, 3):
        check(pool.run(run, FORWARD[loss], stage, mesh={"data": RANKS}), FORWARD[loss])


def test_forward_mode_around_an_exchange_of_simulated_ranks_is_refused():
    run = lambda m: training.train(m, tangents, network(), BATCHES, sl.zero(3), training.optimizer(0.5))  # noqa: E731
    with pytest.raises(HandleError, match=r"simulated ranks, all_gather.*or sl.launch"):
        sl.simulate(run, mesh={"data": RANKS})


def test_compiled_functions_that_would_trace_the_library(pool):
    def errors(mesh):
        def loss_fn(params, batch):
            return fit(params, *batch, torch.compile(layer, backend="eager"))

        def compiled(fn, *args):
            torch._dynamo.reset()
            try:
                torch.compile(fn, backend="eager")(*args)
            except HandleError as error:
                return str(error)

        plain = lambda params, batch: fit(params, *batch)  # noqa: E731
        state, step = sl.make_train_step(plain, sl.shard(network(), mesh, stage=3), sl.optim.sgd(0.1))
        evaluate = sl.make_eval_step(plain, state.params)
        found = [
            compiled(step, state, BATCHES[0]),
            compiled(lambda state, batch: step(state, batch)[1]["loss"] * 2, state, BATCHES[0]),
            compiled(sl.value_and_grad(plain), state.params, BATCHES[0]),
            compiled(evaluate, state.params, BATCHES[0]),
        ]
        try:
            sl.value_and_grad(loss_fn)(state.params, BATCHES[0])
        except HandleError as error:
            found.append(str(error))
        return found

    for found in pool.run(errors, mesh={"data": RANKS}):
        starts = ["a train step is", "a train step is", "value_and_grad's function is", "an eval step is"]
        for error, start in zip(found, [*starts, "a compiled function uses layers/0,"], strict=True):
            assert error.startswith(start) and error.endswith("sl.block(torch.compile(fn))")


SLICED = {
    "up": {"weight": torch.linspace(-1, 1, 48).double().view(8, 6).sin(), "bias": torch.linspace(-1, 1, 8).double()},
    "down": {"weight": torch.linspace(-2, 1, 32).double().view(4, 8).cos()},
}


def sliced_rows(params, batch):
    """Gradients of inputs, of one row at a time, by layers of which two read the same input."""
    up, down = params["up"], params["down"]["weight"]

    def of_row(x, y):
        both = F.linear(x, up["weight"]) * torch.tanh(F.linear(x, up["weight"], up["bias"]))
        return (F.linear(both, down) - y).square().mean()

    x, y = batch
    each = torch.func.vmap(torch.func.grad(of_row))(x, y)
    together = torch.func.grad(lambda x: torch.func.vmap(of_row)(x, y).sum())(x)
    return (each * x.cos()).sum(1).mean() + together.square().sum(1).mean() + of_row(x, y)


@pytest.mark.parametrize("stage", [0, 3])
def test_torch_func_of_sliced_layers(stage):
    transform = sl.chain(sl.zero(stage), sl.tensor_slicing({"up/*": "column", "down/*": "row"}, axis="model"))
    mesh = {"data": 2, "model": 2}
    got = training.simulate(mesh, sliced_rows, SLICED, BATCHES, transform, training.optimizer(0.5))
    losses, _, final = one_device.train(sliced_rows, SLICED, BATCHES, max_norm=0.5)
    assert got[0] == pytest.approx(losses, rel=1e-10)
    assert_close(got[2], final, 1e-10)
