"""Autocast as a part of the precision: models that make fp32 numbers of their own train as under torch's, at every stage."""

import functools

import pytest
import torch
import torch.nn.functional as F
from helpers import training
from helpers.measure import count_payload
from helpers.models import share, tiny_gpt, token_batches
from helpers.trees import assert_close, assert_same
from oracle import one_device

import shardlib as sl
from shardlib.errors import HandleError, IllegalComposition

RANKS = 2
# A product of two numbers that are rounded to 8 bits is off by 2⁻⁸ at most. Whoever computes casts alike; what is left comes
# from weights that no product uses (embeddings, positions), which one device has in fp32.
ROUNDING = 2**-8


def transformer(p, batch):
    """Timesteps as sinusoids, and norms of fp32 sums with them: diffusion transformers, whisper's positions."""
    x, steps, y = batch
    angles = steps[:, None] * torch.exp(-torch.arange(8.0))
    time = F.linear(torch.cat([angles.sin(), angles.cos()], -1), p["time"]["weight"], p["time"]["bias"])
    h = F.conv2d(x, p["patches"]["weight"], p["patches"]["bias"], stride=4).flatten(2).mT + p["positions"]["weight"]
    for layer in p["layers"]:
        normed = F.layer_norm(h + time[:, None], (16,), layer["gain"], layer["shift"])
        q, k, v = F.linear(normed, layer["qkv"]).view(len(x), -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
        h = h + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return F.mse_loss(F.linear(h, p["out"]["weight"]).mean(1), y)


def convolutions(p, batch):
    """Norms of batches and of groups, of activations in 16 bits and in fp32: residual networks and U-Nets."""
    x, _, y = batch
    h = F.relu(F.batch_norm(F.conv2d(x, p["first"]["weight"]), None, None, *p["norm"], training=True))
    h = h + F.group_norm(F.avg_pool2d(h, 3, 1, 1).float(), 2, *p["groups"])
    up = F.conv_transpose2d(h, p["up"]["weight"], p["up"]["bias"], stride=2)
    return F.mse_loss(up.mean((2, 3)) @ p["out"]["weight"].T, y)


def codebook(p, batch):
    """Distances to codes, and the nearest ones taken as one-hots: VQ-VAE."""
    _, _, y = batch
    z = F.linear(y, p["into"]["weight"], p["into"]["bias"])
    codes = p["codes"]["weight"]
    nearest = (codes.square().sum(-1) - 2 * z @ codes.T).argmin(-1)
    chosen = F.one_hot(nearest, len(codes)).float() @ codes
    rebuilt = F.linear(z + (chosen - z).detach(), p["out"]["weight"])
    return F.mse_loss(rebuilt, y) + F.mse_loss(chosen, z.detach()) + F.mse_loss(z, chosen.detach())


def weights(seed, **shapes):
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) / max(shape[-1], 4) ** 0.5 for name, shape in shapes.items()}
    return {name: leaf.bfloat16().float() for name, leaf in drawn.items()}  # masters begin with what is stored


def layer(seed):
    return weights(seed, qkv=(48, 16)) | {"gain": torch.ones(16), "shift": torch.zeros(16)}


MODELS = {
    transformer: {
        "time": weights(1, weight=(16, 16), bias=(16,)),
        "patches": weights(2, weight=(16, 3, 4, 4), bias=(16,)),
        "positions": weights(3, weight=(4, 16)),
        "layers": [layer(4), layer(5)],
        "out": weights(6, weight=(6, 16)),
    },
    convolutions: {
        "first": weights(1, weight=(8, 3, 3, 3)),
        "norm": [torch.ones(8), torch.zeros(8)],
        "groups": [torch.ones(8), torch.zeros(8)],
        "up": weights(2, weight=(8, 8, 2, 2), bias=(8,)),
        "out": weights(3, weight=(6, 8)),
    },
    codebook: {
        "into": weights(1, weight=(16, 6), bias=(16,)),
        "codes": weights(2, weight=(12, 16)),
        "out": weights(3, weight=(6, 16)),
    },
}
BATCH = (*weights(7, x=(4, 3, 8, 8)).values(), torch.tensor([1, 5, 400, 900]), *weights(8, y=(4, 6)).values())


def under_autocast(loss_fn, ranks=RANKS):
    """The mean of the losses of ranks' shares on one device, under torch's autocast."""

    def mean(params, batch):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return sum(loss_fn(params, share(batch, rank, ranks)) for rank in range(ranks)) / ranks

    return mean


@pytest.mark.parametrize("loss_fn", MODELS, ids=lambda fn: fn.__name__)
def test_models_with_fp32_numbers_of_their_own(loss_fn):
    params, batches, tx = MODELS[loss_fn], [BATCH] * 3, training.optimizer()
    wanted = one_device.train(under_autocast(loss_fn), params, batches)
    train = functools.partial(training.simulate, {"data": RANKS}, loss_fn, params, batches)
    for stage in range(4):
        losses, norms, got = train(sl.chain(sl.zero(stage), sl.precision("bf16", autocast=True, keep="*")), tx)
        assert losses == pytest.approx(wanted[0], rel=1e-6) and norms == pytest.approx(wanted[1], rel=1e-6)
        assert_close(got, wanted[2], 1e-5)
        losses, norms, _ = train(sl.chain(sl.zero(stage), sl.precision("bf16", autocast=True)), tx)
        near = 1e-6 if loss_fn is convolutions else ROUNDING
        assert losses == pytest.approx(wanted[0], rel=near) and norms == pytest.approx(wanted[1], rel=4 * near)
    with pytest.raises(HandleError, match=r"(?s)dtype.*sl.precision\('bf16', autocast=True\).*keep="):
        train(sl.chain(sl.zero(3), sl.precision("bf16")), tx)


@pytest.mark.parametrize("stage", [0, 3])
def test_where_autocast_is_on(stage):
    """In forward, in what a checkpoint computes again and in evaluation; not in backward."""
    seen = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(("forward", torch.is_autocast_enabled("cpu")))
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(("backward", torch.is_autocast_enabled("cpu")))
            return grad

    @sl.block
    def block(p, x):
        return F.linear(Noted.apply(x), p["weight"], p["bias"])

    def loss_fn(params, x):
        assert x.dtype == torch.float32
        for p in params["layers"]:
            x = block(p, x)
        assert x.dtype == torch.bfloat16
        return x.float().square().mean()

    params = {"layers": [weights(1, weight=(8, 8), bias=(8,)), weights(2, weight=(8, 8), bias=(8,))]}
    x, mesh = torch.randn(4, 8), sl.make_mesh()
    sharded = sl.shard(params, mesh, sl.chain(sl.zero(stage), sl.precision("bf16", autocast=True), sl.remat()))
    state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(0.1))
    state, _ = step(state, x)
    assert seen == [("forward", True)] * 3 + [("backward", False), ("forward", True)]
    seen.clear()
    sl.make_eval_step(loss_fn, state.params)(state.params, x)
    assert seen == [("forward", True)] * 2
    assert not torch.is_autocast_enabled("cpu")


def test_what_is_stored_and_sent():
    loss_fn, params = tiny_gpt()
    (batch,) = token_batches(1)
    for keep, size in ((), 2), ("*", 4):
        transform = sl.chain(sl.zero(3), sl.precision("bf16", autocast=True, keep=keep))
        plan = sl.make_plan(
            params, sl.abstract_mesh(data=RANKS), transform, loss_fn=loss_fn, batch=share(batch, 0, RANKS)
        )
        sizes = {p.compute.dtype.itemsize for p in plan.placements if len(p.compute.shape) > 1}
        assert sizes == {size} and plan.placement_of["head/norm/weight"].compute.dtype == torch.float32
        assert "autocast=bfloat16" in str(plan)

        def sent(mesh, transform=transform):
            state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), sl.optim.sgd(0.1))
            rows = share(batch, mesh.rank, RANKS)
            state, _ = step(state, rows)  # agrees on the order of gathers
            counted = count_payload(mesh)
            step(state, rows)
            return counted()

        assert sl.simulate(sent, mesh={"data": RANKS})[0] == plan.payload()


@pytest.mark.parametrize("stage", [0, 3])
def test_autocast_of_the_functions_own(stage):
    """Under the precision, in which it copies nothing that is whole; turned off, it leaves operands as they are."""

    def loss_fn(params, batch, dtype=None):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
            h = torch.tanh(F.linear(batch, params["first"]["weight"]))
            if dtype is not None:
                h = h.to(dtype)
            return F.linear(h, params["last"]["weight"]).float().square().mean()

    params = {"first": weights(1, weight=(8, 8)), "last": weights(2, weight=(4, 8))}
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    wanted = one_device.train(under_autocast(loss_fn, 1), params, [x])[:2]
    for transform in (sl.precision("bf16"), sl.precision("bf16", autocast=True)):
        train = functools.partial(training.train, sl.make_mesh(), params=params, batches=[x], tx=training.optimizer())
        got = train(loss_fn=loss_fn, transform=sl.chain(sl.zero(stage), transform))[:2]
        assert got[0] == pytest.approx(wanted[0], rel=ROUNDING) and got[1] == pytest.approx(wanted[1], rel=ROUNDING)
    with pytest.raises(HandleError, match=r"Autocast does not cast this operation: leave the layer's.*keep="):
        plain = functools.partial(loss_fn, dtype=torch.float32)
        train(loss_fn=plain, transform=sl.chain(sl.zero(stage), sl.precision("bf16", autocast=True)))


def test_fp16_with_its_scale():
    params, batches, tx = MODELS[convolutions], [BATCH] * 3, sl.optim.sgd(0.1)
    run = functools.partial(training.simulate, {"data": RANKS}, convolutions, params, batches, tx=tx)
    wanted = run(transform=sl.zero(0))
    got = run(transform=sl.chain(sl.zero(3), sl.precision("fp16", autocast=True, loss_scale=256.0)))
    assert got[0] == pytest.approx(wanted[0], rel=2**-8) and got[1] == pytest.approx(wanted[1], rel=2**-8)


def test_tiles_multiply_in_the_dtype_that_autocast_asks_for():
    def loss_fn(params, x):
        return torch.addmm(params["bias"], torch.relu(x @ params["up"]), params["down"]).float().square().mean()

    params = weights(1, up=(8, 16), down=(16, 8), bias=(8,))
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(2))] * 2
    wanted = one_device.train(under_autocast(loss_fn), params, batches)
    for keep in (), "*":
        precision = sl.precision("bf16", autocast=True, keep=keep)
        transform = sl.chain(sl.zero(3), precision, sl.tile(["up", "down"], 2))
        got = training.simulate({"data": RANKS}, loss_fn, params, batches, transform, training.optimizer())
        assert got[0] == pytest.approx(wanted[0], rel=2 * ROUNDING)


def test_autocast_is_to_16_bits():
    with pytest.raises(IllegalComposition, match=r"precision\('fp32', autocast=True\).*use 'bf16' or 'fp16'"):
        sl.precision("fp32", autocast=True)


@pytest.mark.parametrize(
    "transform", [sl.zero(2), sl.chain(sl.zero(0), sl.powersgd(2)), sl.chain(sl.zero(1), sl.remat())]
)
def test_autocast_around_a_step_casts_for_the_loss_alone(transform):
    """As ``with autocast: loss = model(x)`` of a loop in torch, whose backward and optimizer are outside."""

    def loss_fn(params, batch):
        return tanh_mlp(params, batch).square().mean()

    @sl.block
    def tanh_mlp(params, batch):
        assert torch.is_autocast_enabled("cpu")
        return F.linear(torch.tanh(F.linear(batch, params["first"])), params["last"]).float()

    def inside(params, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(params, batch)

    def run(mesh, around):
        params = {"first": weights(1, w=(8, 8))["w"], "last": weights(2, w=(4, 8))["w"]}
        tx = sl.optim.muon(0.02)
        state, step = sl.make_train_step(loss_fn if around else inside, sl.shard(params, mesh, transform), tx)
        for seed in range(3):
            x = weights(3 + seed + 10 * mesh.rank, x=(4, 8))["x"]
            with torch.autocast("cpu", torch.bfloat16, enabled=around):
                state, metrics = step(state, x)
        return metrics["loss"], sl.unshard(state.params)

    around, within = (sl.simulate(run, around, mesh={"data": RANKS})[0] for around in (True, False))
    assert_same(around, within)
