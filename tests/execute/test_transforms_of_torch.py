"""What torch differentiates, maps and compiles inside of a loss, and around a step: right, or refused with the remedy."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
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
    with pytest.raises(LossError, match=r"backward\(\) inside the loss reaches layers/1,.*torch.autograd.grad\(value"):
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
