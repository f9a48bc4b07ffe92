"""Leaves that are complex or floats of 8 bits: trained by the remedy, held when frozen, and never silently left untrained."""

import optree
import pytest
import torch
from helpers.trees import assert_same

import shardlib as sl
from shardlib.errors import LossError, TreeError

GENERATOR = torch.Generator().manual_seed(0)
C64, C128, E4M3, E5M2 = torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2
BIAS = torch.randn(3, generator=GENERATOR, dtype=torch.float64)  # of odd size: what follows lies at an odd offset
WEIGHT = torch.randn(4, 3, 2, generator=GENERATOR, dtype=torch.float64)
BATCH = torch.randn(8, 4, generator=GENERATOR, dtype=torch.float64)


def fit(params, x):
    weight = params["weight"]
    if not weight.is_complex():
        weight = torch.complex(weight[..., 0], weight[..., 1])
    return ((x.to(weight.dtype) @ weight).abs() + params["bias"]).square().mean()


def params_of(dtype):
    return {"bias": BIAS, "weight": torch.view_as_complex(WEIGHT).to(dtype)}


@pytest.mark.parametrize("dtype", [C64, C128])
@pytest.mark.parametrize(
    "use",
    [
        lambda params: sl.shard(params, sl.make_mesh()),
        lambda params: sl.shard(params, sl.make_mesh(), sl.precision("bf16")),
        lambda params: sl.make_train_step(fit, params, sl.optim.adamw(0.1)),
        lambda params: sl.value_and_grad(fit)(params, BATCH),
        lambda params: sl.make_plan(params, sl.abstract_mesh(data=2), sl.zero(3)),
    ],
)
def test_complex_leaves_are_refused_at_once(dtype, use):
    message = rf"1 leaves of dtypes .*\n.*weight: {dtype}; hold torch\.view_as_real\(leaf\).*torch\.complex"
    with pytest.raises(TreeError, match=message):
        use(params_of(dtype))


@pytest.mark.parametrize("stage", range(4))
def test_the_remedy_trains_as_torch_does(stage):
    """Complex Adam of torch's, which is Adam of the pairs."""
    theirs = [BIAS.clone().requires_grad_(), torch.view_as_complex(WEIGHT).clone().requires_grad_()]
    tx = torch.optim.Adam(theirs, 0.05)
    for _ in range(4):
        tx.zero_grad()
        fit({"bias": theirs[0], "weight": theirs[1]}, BATCH).backward()
        tx.step()

    def run(mesh):
        params = sl.shard({"bias": BIAS, "weight": WEIGHT}, mesh, sl.zero(stage))
        state, step = sl.make_train_step(fit, params, sl.optim.adam(0.05))
        for _ in range(4):
            state, _ = step(state, BATCH.chunk(2)[mesh.rank])
        return sl.unshard(state.params)

    for found in sl.simulate(run, mesh={"data": 2}):
        torch.testing.assert_close(found["bias"], theirs[0].detach(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(torch.view_as_complex(found["weight"]), theirs[1].detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_floats_of_8_bits_are_refused_at_once(dtype):
    params = {"bias": BIAS, "weight": WEIGHT.to(dtype)}
    with pytest.raises(TreeError, match=rf"weight: {dtype}; hold leaf\.bfloat16\(\).*sl\.precision\('bf16'\)"):
        sl.shard(params, sl.make_mesh())


@pytest.mark.parametrize("stage", range(4))
def test_floats_of_8_bits_are_trained_where_they_are_cast(stage):
    def run(mesh):
        params = {"bias": BIAS.float(), "weight": WEIGHT[..., 0].to(E4M3)}
        sharded = sl.shard(params, mesh, sl.chain(sl.zero(stage), sl.precision("bf16")))
        loss = lambda p, x: (x @ p["weight"] + p["bias"]).square().mean()  # noqa: E731
        state, step = sl.make_train_step(loss, sharded, sl.optim.sgd(0.1))
        before = sl.unshard(state.params)["weight"]
        after = sl.unshard(step(state, BATCH.float().chunk(2)[mesh.rank])[0].params)["weight"]
        return before.dtype, after.dtype, torch.equal(before, after)

    assert sl.simulate(run, mesh={"data": 2}) == [(torch.bfloat16, torch.bfloat16, False)] * 2


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("dtype", [C64, C128, E4M3, E5M2, torch.int64, torch.bool])
def test_frozen_ones_are_held_as_they_are(dtype, stage):
    """Integers and booleans are frozen without a transform."""
    held = torch.view_as_complex(WEIGHT).to(dtype) if dtype.is_complex else (WEIGHT[..., 0] * 3).to(dtype)
    params = {"bias": BIAS, "weight": held}

    def loss(p, x):
        weight = p["weight"] if dtype.is_complex else p["weight"].to(torch.float64)
        return ((x.to(weight.dtype) @ weight).abs() + p["bias"]).square().mean()

    def run(mesh):
        message = dtype.is_floating_point or dtype.is_complex
        how = sl.chain(sl.zero(stage), sl.freeze("weight")) if message else sl.zero(stage)
        state, step = sl.make_train_step(loss, sl.shard(params, mesh, how), sl.optim.adamw(0.1))
        state, metrics = step(state, BATCH.chunk(2)[mesh.rank])
        return metrics["loss"], sl.unshard(state.params)

    for value, after in sl.simulate(run, mesh={"data": 2}):
        torch.testing.assert_close(value, loss(params, BATCH))
        assert after["weight"].dtype == dtype
        assert bytes(after["weight"].view(torch.uint8).numpy()) == bytes(held.view(torch.uint8).numpy())
        assert not torch.equal(after["bias"], BIAS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_complex_buffers_are_averaged_as_floating_ones_are(ranks):
    buffers = {"real": torch.zeros(3), "complex": torch.zeros(3, dtype=C64), "count": torch.tensor(0)}

    def loss(p, buffers, x):
        mean = x.mean(0)
        after = {"real": mean, "complex": torch.complex(mean, -2 * mean), "count": buffers["count"] + 1}
        return (x @ p["w"]).square().mean(), after

    def run(mesh):
        kinds = {"count": "rank-local", "*": "averaged"}
        state, step = sl.make_train_step(
            loss, sl.shard({"w": torch.ones(3)}, mesh), sl.optim.sgd(0.1), buffers=buffers, buffer_kinds=kinds
        )
        return step(state, x.chunk(ranks)[mesh.rank])[0].buffers

    x = torch.arange(12.0).view(4, 3)
    for found in sl.simulate(run, mesh={"data": ranks}):
        wanted = x.mean(0)
        torch.testing.assert_close(found["real"], wanted)
        torch.testing.assert_close(found["complex"], torch.complex(wanted, -2 * wanted))
        assert found["count"] == 1


def test_complex_losses_and_means_are_refused():
    params, imaginary = {"w": torch.ones(3)}, 1j
    losses = {
        "the loss is complex": lambda p, x: (p["w"] * imaginary).sum(),
        "the loss is complex and": lambda p, x: sl.Mean((p["w"] * imaginary).sum(), 1.0),
        "a sl.Mean is of real": lambda p, x: (p["w"].sum(), {"m": sl.Mean((p["w"] * imaginary).sum(), 1.0)}),
    }
    for message, loss in losses.items():
        state, step = sl.make_train_step(loss, params, sl.optim.sgd(0.1))
        with pytest.raises(LossError, match=message):
            step(state, torch.ones(2))
    evaluate = sl.make_eval_step(lambda p, x: sl.Mean((p["w"] * imaginary).sum(), 1.0), params)
    with pytest.raises(LossError, match=r"a sl\.Mean is of real"):
        evaluate(params, torch.ones(2))


def test_complex_batches_are_cut_and_left_complex():
    params, batch = {"w": torch.ones(3)}, torch.complex(torch.ones(4, 3), torch.ones(4, 3))

    def loss(p, x):
        assert x.is_complex() and len(x) == 2
        return (x.abs().to(p["w"].dtype) @ p["w"]).mean()

    sharded = sl.shard(params, sl.make_mesh(), sl.chain(sl.accumulate(2), sl.precision("bf16")))
    state, step = sl.make_train_step(loss, sharded, sl.optim.sgd(0.1))
    step(state, batch)


@pytest.mark.parametrize("make", [sl.optim.sgd, sl.optim.adamw, sl.optim.lion, sl.optim.lamb])
@pytest.mark.parametrize("dtype", [C64, E4M3])
def test_optimizers_by_themselves_refuse_them_too(make, dtype):
    """For complex numbers g² is no magnitude, and for floats of 8 bits moments would lose everything."""
    params = optree.tree_map(lambda leaf: leaf.to(dtype), {"weight": WEIGHT[..., 0]})
    with pytest.raises(TreeError, match="weight: "):
        make(0.1).init(params)
    plain = {"weight": WEIGHT}
    assert_same(make(0.1).init(plain), make(0.1).init(plain))
