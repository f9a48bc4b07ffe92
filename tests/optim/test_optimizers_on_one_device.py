"""Gradient transformations against torch.optim and closed forms, on one device and on shards."""

import dataclasses
import math

import optree
import pytest
import torch
from helpers.models import mlp, regression_batch, share
from helpers.trees import assert_close, assert_same, copy_of

import shardlib as sl
from shardlib.plan.loss_scale import LossScale
from shardlib.sharded.tree import Sharded


class PlainLion(torch.optim.Optimizer):
    """The paper's algorithm 2, line by line; torch has none."""

    def __init__(self, params, lr, b1, b2, weight_decay):
        super().__init__(params, {})
        self.lr, self.b1, self.b2, self.weight_decay = lr, b1, b2, weight_decay

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            m = self.state[param].setdefault("m", torch.zeros_like(param))
            c = self.b1 * m + (1 - self.b1) * param.grad
            self.state[param]["m"] = self.b2 * m + (1 - self.b2) * param.grad
            param.copy_(param - self.lr * (torch.sign(c) + self.weight_decay * param))


OPTIMIZERS = {
    "sgd": (lambda: sl.optim.sgd(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (lambda: sl.optim.sgd(0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "nesterov": (
        lambda: sl.optim.sgd(0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    ),
    "adam": (lambda: sl.optim.adam(0.1, b1=0.8), lambda p: torch.optim.Adam(p, 0.1, betas=(0.8, 0.999))),
    "adamw": (
        lambda: sl.optim.adamw(0.1, weight_decay=0.3, eps=1e-3),
        lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.3, eps=1e-3),
    ),
    "lion": (lambda: sl.optim.lion(0.01, b2=0.98, weight_decay=0.3), lambda p: PlainLion(p, 0.01, 0.9, 0.98, 0.3)),
}
BY_NAME = pytest.mark.parametrize("name", OPTIMIZERS)


def params_and_grads(dtype=torch.float64, steps=5):
    generator = torch.Generator().manual_seed(16)

    def tree():
        return {
            "a": torch.randn(3, 4, generator=generator).to(dtype),
            "b": [torch.randn(5, generator=generator).to(dtype)],
        }

    return tree(), [tree() for _ in range(steps)]


def by_torch(make, params, all_grads):
    leaves = [leaf.clone().requires_grad_() for leaf in optree.tree_leaves(params)]
    tx = make(leaves)
    for grads in all_grads:
        for leaf, grad in zip(leaves, optree.tree_leaves(grads)):
            leaf.grad = grad.clone()
        tx.step()
    return optree.tree_unflatten(optree.tree_structure(params), [leaf.detach() for leaf in leaves])


@BY_NAME
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_update_and_add_is_torchs_step(name, dtype, tolerance):
    params, all_grads = params_and_grads(dtype)
    tx = OPTIMIZERS[name][0]()
    current, state = params, tx.init(params)
    for grads in all_grads:
        given = copy_of((grads, state, current))
        updates, state_after = tx.update(grads, state, current)
        assert_same((grads, state, current), given)  # pure
        current, state = sl.optim.apply_updates(current, updates), state_after
    assert_close(current, by_torch(OPTIMIZERS[name][1], params, all_grads), tolerance)


@BY_NAME
@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_apply_is_update_and_add_in_one_pass(name, dtype, tolerance, scale):
    params, all_grads = params_and_grads(dtype)
    tx = sl.optim.chain(sl.optim.clip_by_global_norm(2.0), OPTIMIZERS[name][0]())
    current, state = params, tx.init(params)
    in_place, its_state = copy_of(params), tx.init(copy_of(params))
    factor = None if scale is None else torch.tensor(scale, dtype=torch.float64)
    for grads in all_grads:
        scaled = grads if scale is None else optree.tree_map(lambda g: g * scale, grads)
        updates, state = tx.update(scaled, state, current)
        current = sl.optim.apply_updates(current, updates)
        its_state = tx.apply(in_place, copy_of(grads), its_state, scale=factor)
    assert_close(in_place, current, tolerance)


@pytest.mark.parametrize("make", [sl.optim.adamw, sl.optim.lion])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_update_and_apply_keep_the_same_moments(make, dtype):
    """To the last bit, in 16 bits too: one formula serves both."""
    params, all_grads = params_and_grads(dtype)
    tx = make(0.01)
    state, its_state = tx.init(params), tx.init(copy_of(params))
    for grads in all_grads:
        state = tx.update(grads, state, params)[1]
        its_state = tx.apply(copy_of(params), copy_of(grads), its_state)
    assert_same(state, its_state)


@pytest.mark.parametrize("make", [sl.optim.adamw, sl.optim.lion])
def test_update_maps_over_a_batch_and_has_derivatives(make):
    tx = make(lambda step: 0.1 / (step + 1))
    grads, params = torch.rand(3, 5) - 0.5, torch.rand(3, 5)
    states = torch.func.vmap(tx.init)(params)
    updates, after = torch.func.vmap(tx.update)(grads, states, params)
    for row in range(3):
        assert_same(tx.update(grads[row], tx.init(params[row]), params[row])[0], updates[row])
    slope = torch.func.grad(lambda p: tx.update(grads[0], tx.init(p), p)[0].sum())(params[0])
    assert (slope < 0).all()  # weight decay
    assert after.count.tolist() == [1.0] * 3


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_clipping_is_torchs(max_norm):
    _, (grads, *_) = params_and_grads()
    clip = sl.optim.clip_by_global_norm(max_norm)
    clipped, _ = clip.update(grads, clip.init(grads))
    leaves = [torch.zeros_like(leaf).requires_grad_() for leaf in optree.tree_leaves(grads)]
    for leaf, grad in zip(leaves, optree.tree_leaves(grads)):
        leaf.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(leaves, max_norm)  # adds 1e-6 to the norm
    for ours, leaf in zip(optree.tree_leaves(clipped), leaves):
        torch.testing.assert_close(ours, leaf.grad, rtol=2e-6, atol=0)
    norm = math.sqrt(sum(leaf.square().sum().item() for leaf in optree.tree_leaves(clipped)))
    assert norm == pytest.approx(
        min(max_norm, math.sqrt(sum(g.square().sum().item() for g in optree.tree_leaves(grads))))
    )


def test_centred_rmsprop_with_a_constant_gradient_stays_finite():
    """Then the variance is 0, which rounding may bring below."""
    tx = sl.optim.rmsprop(1e-3, centered=True)
    params = {"a": torch.zeros(4)}
    state = tx.init(params)
    for _ in range(300):
        updates, state = tx.update({"a": torch.tensor([1.0, 30.0, 1e2, 3e3])}, state, params)
        assert updates["a"].isfinite().all()


def test_clipping_leaves_zero_gradients_alone():
    zero = {"w": torch.zeros(3)}
    clip = sl.optim.clip_by_global_norm(1.0)
    assert torch.equal(clip.update(zero, clip.init(zero))[0]["w"], torch.zeros(3))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@BY_NAME
def test_by_hand_on_shards(name, stage):
    """value_and_grad, tx.update and apply_updates: what a GAN or RL loop is made of."""
    loss_fn, params = mlp([6, 9, 4])
    batches = [regression_batch(6, 6, 4, seed=seed) for seed in range(3)]

    def run(mesh):
        tx = sl.optim.chain(sl.optim.clip_by_global_norm(0.5), OPTIMIZERS[name][0]())
        sharded = sl.shard(params, mesh, stage=stage)
        state, value_and_grad = tx.init(sharded), sl.value_and_grad(loss_fn)
        losses = []
        for batch in batches:
            before = copy_of(sl.unshard(sharded))
            loss, grads = value_and_grad(sharded, share(batch, mesh.rank, 3))
            updates, state = tx.update(grads, state, sharded)
            moved = sl.optim.apply_updates(sharded, updates)
            assert isinstance(grads, Sharded) and isinstance(moved, Sharded)
            assert_same(sl.unshard(sharded), before)  # pure
            sharded = moved
            losses.append(loss.item())
        return losses, sl.unshard(sharded)

    tx = sl.optim.chain(sl.optim.clip_by_global_norm(0.5), OPTIMIZERS[name][0]())
    whole, state, expected = params, tx.init(params), []
    for batch in batches:
        leaves = optree.tree_map(lambda leaf: leaf.clone().requires_grad_(), whole)
        loss = loss_fn(leaves, batch)
        flat = torch.autograd.grad(loss, optree.tree_leaves(leaves))
        updates, state = tx.update(optree.tree_unflatten(optree.tree_structure(whole), list(flat)), state, whole)
        whole = sl.optim.apply_updates(whole, updates)
        expected.append(loss.item())
    for losses, final in sl.simulate(run, mesh={"data": 3}):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert_close(final, whole, 1e-10)


def test_on_a_plain_pytree_everything_is_plain():
    loss_fn, params = mlp([6, 9, 4])
    batch = regression_batch(6, 6, 4)
    loss, grads = sl.value_and_grad(loss_fn)(params, batch)
    leaves = optree.tree_map(lambda leaf: leaf.clone().requires_grad_(), params)
    expected = loss_fn(leaves, batch)
    expected.backward()
    assert isinstance(grads, dict)
    torch.testing.assert_close(loss.to(expected.dtype), expected.detach())
    assert_close(grads, optree.tree_map(lambda leaf: leaf.grad, leaves), 1e-12)


# --- loss scale and 16 bits ------------------------------------------------------------------------------------


def test_the_loss_scale_follows_deepspeeds_rules():
    scale = LossScale(value=8.0, window=3, hysteresis=2, minimum=2.0)
    trace = []
    for finite in [True, True, True, False, False, False, True, True, True, False, False, False, False, False]:
        scale = scale.after(finite)
        trace.append(scale.value)
    # three good steps double it; the first bad step is tolerated, later ones halve it, down to the minimum;
    # growing restores the tolerance
    assert trace == [8, 8, 16, 16, 8, 4, 4, 4, 8, 8, 4, 2, 2, 2]


def test_a_skipped_step_of_fp16_changes_the_scale_alone():
    loss_fn, params = mlp([6, 9, 4], torch.float32)
    x, y = regression_batch(6, 6, 4, torch.float32)

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.chain(sl.zero(3), sl.precision("fp16")))
        state, step = sl.make_train_step(
            loss_fn, sharded, sl.optim.adamw(sl.optim.warmup_linear_decay_schedule(0.0, 1e-3, 5, 10))
        )
        state.scale = dataclasses.replace(state.scale, value=2.0**8)
        state, _ = step(state, (x, y))
        before = copy_of((sl.unshard(state.params), state.opt))
        mine = (x, y) if mesh.rank == 0 else (x, torch.full_like(y, torch.inf))
        for expected in (2.0**8, 2.0**7):  # the first is tolerated
            state, metrics = step(state, mine)
            assert not metrics["finite"] and state.scale.value == expected
        assert_same((sl.unshard(state.params), state.opt), before)  # the schedule's count too
        state, metrics = step(state, (x, y))
        assert metrics["finite"] and state.step == 4
        return metrics["loss"].item(), metrics["grad_norm"].item()

    assert len(set(sl.simulate(run, mesh={"data": 2}))) == 1


SMALL, SUMMED = {"reduce_dtype": "fp16"}, {"master": False}


@pytest.mark.parametrize(
    ("options", "gradient", "make"),
    [
        (SMALL, 1e-9, lambda: sl.optim.sgd(1e7)),
        (SMALL, 1e-9, lambda: sl.optim.chain(sl.optim.clip_by_value(1.0), sl.optim.sgd(1e7))),
        (SMALL, 1e-9, lambda: sl.optim.chain(sl.optim.masked(sl.optim.clip_by_value(1.0), "b"), sl.optim.sgd(1e7))),
        (SMALL, 1e-9, lambda: sl.optim.from_torch(torch.optim.SGD, lr=1e7)),
        (SUMMED, 0.5, lambda: sl.optim.rmsprop(0.01, decay=0.0)),
        (SUMMED, 0.5, lambda: sl.optim.lamb(0.01, b1=0.0)),
        (SUMMED, 0.5, lambda: sl.optim.from_torch(torch.optim.SGD, lr=0.02)),
    ],
)
def test_scaled_gradients_are_unscaled_where_they_fit(options, gradient, make):
    """By 2^16 they are within fp16, without it below the smallest number of that; or, of several micro-batches, above the
    largest, where the sum in fp32 is not. All of these move each parameter by 0.01."""
    params = {"a": torch.ones(3), "b": torch.ones(2)}
    transform = sl.chain(sl.zero(1), sl.accumulate(4), sl.precision("fp16", **options))

    def loss_fn(params, batch):
        return sl.Mean(sum(leaf.float().sum() for leaf in params.values()) * gradient, 1.0)

    def run(mesh):
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), make())
        state, metrics = step(state, torch.zeros(4))
        assert metrics["finite"]
        return sl.unshard(state.params)

    for got in sl.simulate(run, mesh={"data": 2}):
        for leaf in got.values():
            # fp16 holds numbers below 1 to within 2^-12, and the step of 0.01 comes of gradients that fp16 rounded.
            torch.testing.assert_close(leaf.float(), torch.full_like(leaf, 0.99).float(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda: sl.optim.sgd(3e-3),
        lambda: sl.optim.chain(sl.optim.add_decayed_weights(1e-3), sl.optim.sgd(0.125)),
        lambda: sl.optim.chain(sl.optim.masked(sl.optim.add_decayed_weights(1e-3), "w"), sl.optim.sgd(0.125)),
        lambda: sl.optim.chain(sl.optim.add_noise(1e-6, 0.5, key=1), sl.optim.sgd(0.125)),
        lambda: sl.optim.partition({"all": sl.optim.sgd(3e-3)}, {"*": "all"}),
    ],
)
def test_nothing_is_lost_beside_a_gradient_in_16_bits(make, ranks):
    """A rate, a decay and noise that 16 bits do not hold beside the gradient move fp32 masters as they would from fp32."""
    params, factor = (
        {"w": torch.tensor([1.0, 0.5, 2.0, -3.0])},
        torch.tensor([0.75, 0.125, -0.25, 1.0]),
    )  # exact in bf16

    def run(mesh, reduce_dtype):
        transform = sl.chain(sl.zero(0), sl.precision("bf16", reduce_dtype=reduce_dtype))
        loss_fn = lambda params, batch: (params["w"] * batch).sum()  # noqa: E731
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), make())
        for _ in range(3):
            state, _ = step(state, factor)
        return sl.checkpoint.read_leaf(state, "w")["master"]

    for ours, theirs in zip(
        *(sl.simulate(run, dtype, mesh={"data": ranks}) for dtype in ("bf16", "fp32")), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("name", "dtype", "scale"), [("bf16", torch.bfloat16, 1.0), ("fp16", torch.float16, 2.0**8)])
def test_mixed_precision_is_the_textbooks(stage, name, dtype, scale):
    """16-bit gradients of each share, summed in fp32, update fp32 masters; parameters are masters rounded."""
    fit, params = mlp([6, 9, 4], torch.float32)
    params["gain"] = torch.tensor([0.7, 1.3])
    batches = [regression_batch(8, 6, 4, torch.float32, seed=seed) for seed in range(4)]
    ranks = 2

    def loss_fn(params, batch):
        assert batch[0].dtype == params["layers"][0]["weight"].dtype and params["gain"].dtype == torch.float32
        return fit(params, batch).float() * params["gain"].prod()

    def run(mesh):
        transform = sl.chain(sl.zero(stage), sl.precision(name, keep="gain"))
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), sl.optim.adamw(1e-2, eps=1e-4))
        if name == "fp16":
            state.scale = dataclasses.replace(state.scale, value=scale)
        for batch in batches:
            state, metrics = step(state, share(batch, mesh.rank, ranks))
            assert metrics["finite"]
        return sl.unshard(state.params)

    kept = [path == ("gain",) for path in optree.tree_paths(params)]
    leaves, structure = optree.tree_flatten(params)
    # What is sharded is the rounded parameters, and masters start from them.
    masters = [leaf.clone() if keep else leaf.to(dtype).float() for leaf, keep in zip(leaves, kept)]
    tx = torch.optim.AdamW(masters, lr=1e-2, eps=1e-4, weight_decay=1e-4)

    def rounded():
        return [master.clone() if keep else master.to(dtype) for master, keep in zip(masters, kept)]

    for batch in batches:
        sums = [torch.zeros_like(master) for master in masters]
        for rank in range(ranks):
            leaves = [leaf.requires_grad_() for leaf in rounded()]
            mine = tuple(t.to(dtype) for t in share(batch, rank, ranks))
            loss = loss_fn(optree.tree_unflatten(structure, leaves), mine)
            for total, grad in zip(sums, torch.autograd.grad(loss * (scale / ranks), leaves)):
                total += grad.float()
        for master, total in zip(masters, sums):
            master.grad = total / scale
        tx.step()
    for final in sl.simulate(run, mesh={"data": ranks}):
        for ours, theirs in zip(optree.tree_leaves(final), rounded()):
            assert ours.dtype == theirs.dtype
            # Masters agree to fp32's rounding: here and there one rounds to the neighbouring 16-bit number.
            step = torch.finfo(ours.dtype).eps if ours.dtype == dtype else 1e-6
            torch.testing.assert_close(ours, theirs, rtol=step, atol=1e-7)
            assert (ours != theirs).float().mean() < 0.1 or ours.dtype == torch.float32


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("make", [sl.optim.adamw, sl.optim.lion, sl.optim.lamb])
def test_a_large_leafs_parameters_are_its_masters_rounded(stage, make):
    """The leaf is a bucket of its own, whose shard is a view of the stored parameter."""
    start = torch.randn(512, 300, generator=torch.Generator().manual_seed(1)) * 0.05

    def loss_fn(params, batch):
        return (batch @ params["w"]).float().square().mean()

    def run(mesh):
        transform = sl.chain(sl.zero(stage), sl.precision("bf16"))
        state, step = sl.make_train_step(loss_fn, sl.shard({"w": start}, mesh, transform), make(1e-2))
        for seed in range(3):
            batch = torch.randn(8, 512, generator=torch.Generator().manual_seed(seed))
            state, _ = step(state, share(batch, mesh.rank, 2))
        (masters,) = state.opt.masters.values()
        return sl.unshard(state.params)["w"], masters

    (first, one), (second, other) = sl.simulate(run, mesh={"data": 2})
    masters = (one if stage == 0 else torch.cat([one, other])).view(512, 300)
    assert torch.equal(first, masters.bfloat16()) and torch.equal(second, first)
    assert not torch.equal(first, start.bfloat16())
