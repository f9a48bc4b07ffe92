"""Mixed precision: loss scales, dtypes by leaf, and the dtype of sums."""

import re

import optree
import pytest
import torch
from helpers.models import mlp, regression_batch, share
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.errors import IllegalComposition
from shardlib.plan.loss_scale import LossScale

FIT, PARAMS = mlp([6, 9, 4], torch.float32)
BATCH = regression_batch(8, 6, 4, torch.float32)


def documented(start, factor, window, hysteresis, minimum, trace):
    """The scale after each step, by the steps' numbers: it grows where the last overflow is a multiple of the window ago,
    and falls at an overflow for which no tolerance is left."""
    scale, overflow, left, found = start, -1, hysteresis, []
    for step, finite in enumerate(trace):
        if not finite:
            if left == 1:
                scale = max(scale / factor, minimum)
            else:
                left -= 1
            overflow = step
        elif (step - overflow) % window == 0:
            scale, left = scale * factor, hysteresis
        found.append(scale)
    return found


@given(
    window=st.integers(1, 4),
    hysteresis=st.integers(1, 4),
    factor=st.sampled_from([2.0, 4.0]),
    start=st.integers(2, 8),
    trace=st.lists(st.booleans(), max_size=60),
)
def test_traces_equal_the_documented_algorithm(window, hysteresis, factor, start, trace):
    scale = LossScale(2.0**start, factor, window, hysteresis, minimum=2.0)
    found = []
    for finite in trace:
        scale = scale.after(finite)
        found.append(scale.value)
    assert found == documented(2.0**start, factor, window, hysteresis, 2.0, trace)


def test_the_defaults_are_deepspeeds():
    scale = LossScale()
    assert (scale.value, scale.factor, scale.window, scale.hysteresis, scale.minimum) == (65536, 2, 1000, 2, 1)


def test_a_static_scale_stays():
    scale = LossScale.static(0.5)
    for finite in [False] * 5 + [True] * 1001:
        scale = scale.after(finite)
        assert scale.value == 0.5


@pytest.mark.parametrize("bad", [{"minimum": 0.0}, {"value": 0.5}, {"factor": 0.5}, {"window": 0}, {"hysteresis": 0}])
def test_a_scale_out_of_range_is_refused(bad):
    with pytest.raises(ValueError, match="minimum lies above 0 and not above value"):
        LossScale(**bad)


@pytest.mark.parametrize(
    ("given", "expected", "factors"),
    [
        (None, LossScale(), [1, 1, 1]),
        (128.0, LossScale.static(128.0), [1, 1, 1]),
        (LossScale(64.0, window=1, hysteresis=1), LossScale(64.0, window=1, hysteresis=1), [2, 1, 2]),
    ],
)
def test_a_train_step_scales_as_the_plan_says(given, expected, factors):
    def run(mesh):
        params = sl.shard(PARAMS, mesh, sl.chain(sl.zero(2), sl.precision("fp16", loss_scale=given)))
        state, step = sl.make_train_step(FIT, params, sl.optim.sgd(0.1))
        assert state.scale == expected
        mine, found = share(BATCH, mesh.rank, 2), []
        for batch in (mine, (mine[0], torch.full_like(mine[1], torch.inf)), mine):
            state, metrics = step(state, batch)
            found.append((metrics["finite"], state.scale.value / expected.value))
        return found

    wanted = list(zip([True, False, True], factors))
    assert sl.simulate(run, mesh={"data": 2}) == [wanted] * 2


def test_a_scale_survives_a_checkpoint(tmp_path):
    params = sl.shard(PARAMS, sl.make_mesh(), sl.precision("fp16", loss_scale=LossScale(8.0, window=3, hysteresis=4)))
    state, step = sl.make_train_step(FIT, params, sl.optim.sgd(0.1), donate=False)
    later, _ = step(state, (BATCH[0], torch.full_like(BATCH[1], torch.inf)))
    sl.checkpoint.save(tmp_path, later)
    assert sl.checkpoint.restore(sl.checkpoint.latest(tmp_path), state).scale == later.scale != state.scale


SAVED = LossScale(64.0, window=5, hysteresis=4, finite_steps=3, tolerance=3)
RESUMED = [
    (LossScale.static(128.0), LossScale.static(128.0)),
    (LossScale(2.0**16, factor=4, window=9), LossScale(64.0, factor=4, window=9, finite_steps=3)),
    (LossScale(256.0, window=2, minimum=128.0), LossScale(128.0, window=2, minimum=128.0, finite_steps=1)),
]


@pytest.mark.parametrize(("planned", "resumed"), RESUMED)
def test_a_resumed_run_scales_by_its_own_rules(tmp_path, planned, resumed):
    def start(scale):
        params = sl.shard(PARAMS, sl.make_mesh(), sl.precision("fp16", loss_scale=scale))
        return sl.make_train_step(FIT, params, sl.optim.sgd(0.1))[0]

    sl.checkpoint.save(tmp_path, start(SAVED))
    assert sl.checkpoint.restore(sl.checkpoint.latest(tmp_path), start(planned)).scale == resumed


def test_dtypes_by_leaf():
    params = PARAMS | {"gain": torch.ones(2), "count": torch.zeros(2, dtype=torch.int64)}
    rules = {"layers/0/bias": "fp32", "layers/0/*": "fp16", "gain": "fp32"}
    transform = sl.precision("bf16", leaves=rules, keep="layers/1/bias")
    plan = sl.make_plan(params, sl.abstract_mesh(data=2), sl.chain(sl.zero(1), transform))
    found = {p.path: (p.compute.dtype, p.optimizer and p.optimizer.dtype) for p in plan.placements}
    assert found == {
        "layers/0/weight": (torch.float16, torch.float32),
        "layers/0/bias": (torch.float32, torch.float32),
        "layers/1/weight": (torch.bfloat16, torch.float32),
        "layers/1/bias": (torch.float32, torch.float32),
        "gain": (torch.float32, torch.float32),
        "count": (torch.int64, None),
    }
    assert plan.step.loss_scale == LossScale() and plan.step.cast_batch == torch.bfloat16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sl.precision("fp4"), "compute='fp4'.: use 'bf16', 'fp16', 'fp32' or 'fp8'"),
        (lambda: sl.precision(leaves={"*": "half"}), r"leaves={'\*': 'half'}.: use 'bf16'"),
        (lambda: sl.precision("bf16", loss_scale=8), "only gradients in fp16 need a scale"),
        (
            lambda: sl.make_plan(PARAMS, sl.abstract_mesh(data=2), sl.precision(leaves={"ln/*": "fp32"})),
            re.escape("match no parameter:\n  - 'ln/*': 'fp32'"),
        ),
    ],
)
def test_impossible_dtypes_are_refused(make, message):
    with pytest.raises(IllegalComposition, match=message):
        make()


@pytest.mark.parametrize("name", ["fp32", "bf16", None])
@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_are_summed_in_the_dtype_asked_for(stage, name):
    """Over two micro-batches and two ranks: the same additions by hand, in that dtype, to the last bit.

    Nothing is asked for where the parameters are bf16 by themselves: fp32.
    """
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, None: torch.float32}[name]
    half_params, half_batch = optree.tree_map(lambda leaf: leaf.bfloat16(), (PARAMS, BATCH))

    def run(mesh):
        transform, params, batch = sl.chain(sl.zero(stage), sl.accumulate(2)), half_params, half_batch
        if name is not None:
            transform, params, batch = sl.chain(transform, sl.precision("bf16", reduce_dtype=name)), PARAMS, BATCH
        _, grads = sl.value_and_grad(FIT)(sl.shard(params, mesh, transform), share(batch, mesh.rank, 2))
        return sl.unshard(grads)

    def gradient(index):
        leaves = optree.tree_map(lambda leaf: leaf.clone().requires_grad_(), half_params)
        (FIT(leaves, share(half_batch, index, 4)) / 4).backward()
        return [leaf.grad.to(dtype) for leaf in optree.tree_leaves(leaves)]

    parts = [gradient(index) for index in range(4)]
    # Stage 2 reduces after every micro-batch; stage 0 adds them up first.
    order = (0, 2, 1, 3) if stage == 2 else (0, 1, 2, 3)
    wanted = [(a + b) + (c + d) for a, b, c, d in zip(*(parts[index] for index in order))]
    for grads in sl.simulate(run, mesh={"data": 2}):
        for ours, theirs in zip(optree.tree_leaves(grads), wanted):
            assert ours.dtype == dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("stage", [1, 3])
def test_leaves_of_several_dtypes_train(stage):
    """Each leaf trains as it does alone: fp32 masters, rounded to the leaf's dtype for the loss."""
    rules = {"layers/0/bias": "fp32", "layers/1/*": "fp16"}
    dtypes = {"layers/0/weight": torch.bfloat16, "layers/0/bias": torch.float32}

    def loss_fn(params, batch):
        for path, leaf in zip(optree.tree_paths(params), optree.tree_leaves(params)):
            assert leaf.dtype == dtypes.get("/".join(map(str, path)), torch.float16)
        wide = optree.tree_map(lambda leaf: leaf.float(), params)
        return FIT(wide, tuple(part.float() for part in batch))

    def run(mesh):
        transform = sl.chain(sl.zero(stage), sl.precision("bf16", leaves=rules, loss_scale=256.0))
        state, step = sl.make_train_step(loss_fn, sl.shard(PARAMS, mesh, transform), sl.optim.sgd(0.1))
        for _ in range(3):
            state, metrics = step(state, share(BATCH, mesh.rank, 2))
            assert metrics["finite"]
        return sl.unshard(state.params)

    paths, leaves, structure = optree.tree_flatten_with_path(PARAMS)
    own = [dtypes.get("/".join(map(str, path)), torch.float16) for path in paths]
    masters = [leaf.to(dtype).float() for leaf, dtype in zip(leaves, own)]
    batch = tuple(part.bfloat16() for part in BATCH)
    for _ in range(3):
        used = [master.to(dtype).requires_grad_() for master, dtype in zip(masters, own)]
        # Each rank's gradient is rounded to the leaf's dtype, scaled; then they are summed in fp32.
        parts = [
            torch.autograd.grad(loss_fn(optree.tree_unflatten(structure, used), share(batch, rank, 2)) * 128, used)
            for rank in range(2)
        ]
        masters = [m - 0.1 * (a.float() + b.float()) / 256 for m, a, b in zip(masters, *parts)]
    for final in sl.simulate(run, mesh={"data": 2}):
        for ours, master, dtype in zip(optree.tree_leaves(final), masters, own):
            assert ours.dtype == dtype
            torch.testing.assert_close(ours, master.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("transform", [sl.zero(0), sl.zero(3), sl.chain(sl.zero(2), sl.accumulate(3))], ids=str)
def test_a_16_bit_loss_over_three_ranks_or_micro_batches(transform):
    """A third, rounded to bf16, would make every gradient 0.13 % too large."""
    w = torch.randn(5, generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, 5, generator=torch.Generator().manual_seed(1))

    def loss_fn(params, x):
        return (x @ params["w"]).square().mean().bfloat16()

    leaf = w.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss_fn({"w": leaf}, x), leaf)

    def run(mesh):
        _, grads = sl.value_and_grad(loss_fn)(sl.shard({"w": w}, mesh, transform), x.expand(3, 5))
        return sl.unshard(grads)["w"]

    for grads in sl.simulate(run, mesh={"data": 3}):
        torch.testing.assert_close(grads, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("reduce_dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("size", [1e-7, 1.0, 6e3])
def test_gradients_by_value_and_grad_are_scaled_and_unscaled(stage, size, reduce_dtype):
    """Small ones would be 0 in fp16 without a scale, and large ones overflow with the first; calls go on from the last."""
    slope = torch.tensor([1.0, -2.0, 3.0, 0.5]) * size

    def run(mesh):
        transform = sl.chain(sl.zero(stage), sl.precision("fp16", reduce_dtype=reduce_dtype))
        params, calls = sl.shard({"w": torch.ones(4)}, mesh, transform), []

        def loss_fn(params, batch):
            calls.append(batch)
            return (params["w"].float() * slope).sum() * batch.float()

        grad_fn = sl.value_and_grad(loss_fn)
        for _ in range(2):
            before = len(calls)
            loss, grads = grad_fn(params, torch.ones(()))
            assert float(loss) == pytest.approx(float(slope.sum()), rel=1e-6)
            torch.testing.assert_close(sl.unshard(grads)["w"].float(), slope, rtol=1e-3, atol=0)
        assert len(calls) == before + 1

    sl.simulate(run, mesh={"data": 2})


def test_gradients_that_no_scale_makes_finite_are_returned():
    params = sl.shard({"w": torch.ones(1)}, sl.make_mesh(), sl.precision("fp16"))
    _, grads = sl.value_and_grad(lambda params, batch: (params["w"].float() * 1e30).sum())(params, torch.ones(()))
    assert not sl.unshard(grads)["w"].isfinite().any()
