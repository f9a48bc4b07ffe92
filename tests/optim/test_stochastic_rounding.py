"""States in bf16 with stochastic rounding."""

import optree
import pytest
import torch
import torch.nn.functional as F
from helpers.models import mlp, regression_batch, share
from helpers.trees import assert_same

import shardlib as sl
from shardlib.errors import IllegalComposition
from shardlib.kernels.common.saved import round_to_bf16
from shardlib.optim.wrappers import rounding

FIT, PARAMS = mlp([6, 9, 4], torch.float32)
BARE = sl.precision("bf16", master=False)


def rounded_adamw():
    return sl.optim.stochastic_rounding(sl.optim.adamw(1e-2, b2=0.95), seed=3)


def test_rounding_goes_to_a_neighbour_with_odds_by_distance():
    x = torch.tensor([1.0 + 2**-9, -(1.0 + 3 * 2**-9), 3e-40, 1.0, -0.0, torch.inf, -torch.inf, 65504.25])
    found = round_to_bf16(x[:, None].expand(-1, 1 << 16).contiguous(), torch.arange(1 << 16))
    assert torch.equal(found.bfloat16().float(), found)
    finite = torch.isfinite(x)
    # Over all bits the mean is what was rounded: exactly, since what is cut off is a whole number of them.
    torch.testing.assert_close(found[finite].double().mean(1), x[finite].double(), rtol=1e-12, atol=0)
    assert torch.equal(found[~finite][:, 0], x[~finite]) and (found[3] == 1).all()
    assert sorted(found[0].unique().tolist()) == [1.0, 1.0 + 2**-7]
    assert round_to_bf16(torch.tensor([torch.nan]), torch.tensor([65535])).isnan().all()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_are_kept_in_bf16_and_planned_so(stage):
    def run(mesh):
        transform = sl.chain(sl.zero(stage), BARE)
        state, step = sl.make_train_step(FIT, sl.shard(PARAMS, mesh, transform), rounded_adamw())
        losses = []
        for _ in range(20):
            state, metrics = step(state, share(regression_batch(8, 6, 4, torch.float32), mesh.rank, 2))
            losses.append(metrics["loss"].item())
        adam = state.opt.inner.inner
        assert state.opt.masters == {} and int(state.opt.inner.count) == 20 == adam.count
        moments = [*adam.mu.values(), *adam.nu.values()]
        assert {leaf.dtype for leaf in [*state.params.buffers.values(), *moments]} == {torch.bfloat16}
        plan = sl.make_plan(PARAMS, mesh, transform, optimizer=rounded_adamw())
        assert plan.bytes("optimizer") == sum(2 * leaf.numel() for leaf in moments)
        return losses

    for losses in sl.simulate(run, mesh={"data": 2}):
        assert losses[-1] < 0.8 * losses[0]


def test_every_tree_is_rounded_by_bits_of_its_own(monkeypatch):
    """Parameters and both moments, leaf by leaf: what is rounded up in one of them says nothing of the others."""
    keys, bits_at = [], rounding.bits_at
    monkeypatch.setattr(rounding, "bits_at", lambda key, places: keys.append(key) or bits_at(key, places))
    params = {name: torch.ones(3, dtype=torch.bfloat16) for name in "ab"}
    tx = rounded_adamw()
    tx.update(params, tx.init(params), params)
    assert len(keys) == len(set(keys)) == 3 * 2


def given_gradients(params, batch):
    """Exact on every mesh: no element of a gradient is a sum, and shares are of powers of two."""
    generator = torch.Generator().manual_seed(6)
    total = 0.0
    for name in ("whole", "sliced"):
        weight, g = params[name]["weight"], torch.randn(6, 6, generator=generator)
        y = F.linear(torch.eye(6, dtype=torch.bfloat16), weight) if name == "sliced" else weight
        total = total + (y.float() * g).sum() * batch[0]
    return total


@pytest.mark.parametrize(
    ("mesh", "transform"),
    [
        ({"data": 2}, sl.zero(0)),
        ({"data": 2}, sl.zero(2)),
        ({"data": 4}, sl.zero(3)),
        ({"data": 2, "model": 2}, sl.chain(sl.zero(3), sl.tensor_slicing({"sliced": "colwise_gather_output"}))),
    ],
)
def test_the_bits_are_equal_on_every_mesh(mesh, transform):
    generator = torch.Generator().manual_seed(5)
    params = {name: {"weight": torch.randn(6, 6, generator=generator)} for name in ("sliced", "whole")}

    def run(mesh, transform):
        sharded = sl.shard(params, mesh, sl.chain(transform, BARE))
        state, step = sl.make_train_step(given_gradients, sharded, rounded_adamw())
        for number in range(4):
            state, _ = step(state, torch.full((1,), 2.0**number))
        return sl.unshard(state.params)

    (wanted,) = sl.simulate(run, sl.zero(0), mesh={"data": 1})
    for found in sl.simulate(run, transform, mesh=mesh):
        assert_same(found, wanted)
    assert not torch.equal(wanted["sliced"]["weight"], params["sliced"]["weight"].bfloat16())


def test_each_update_is_the_wide_one_rounded_to_a_neighbour():
    """Against AdamW on fp32 copies of the state and parameters as they are before each update."""
    generator = torch.Generator().manual_seed(7)
    params = {"w": torch.randn(50, generator=generator).bfloat16(), "kept": torch.randn(3, generator=generator)}
    plain, tx = sl.optim.adamw(1e-2, b2=0.95), rounded_adamw()
    state = tx.init(params)
    for _ in range(5):
        grads = optree.tree_map(lambda p: torch.randn(p.shape, generator=generator).to(p.dtype), params)
        wide = optree.tree_map(lambda leaf: leaf.float(), (grads, state.inner, params))
        moved, inner = plain.update(*wide)
        wanted = sl.optim.apply_updates(wide[2], moved)
        updates, state = tx.update(grads, state, params)
        params = sl.optim.apply_updates(params, updates)
        pairs = [(params, wanted), (state.inner.mu, inner.mu), (state.inner.nu, inner.nu)]
        for ours, theirs in [(a["w"], b["w"]) for a, b in pairs]:
            down = theirs.view(torch.int32) & -(1 << 16)
            down, up = (raw.view(torch.float32) for raw in (down, down + (1 << 16)))
            assert ours.dtype == torch.bfloat16
            assert ((ours == down) | (ours == up)).all() and (ours == down).any() and (ours == up).any()
        assert params["kept"].dtype == torch.float32 and torch.equal(params["kept"], wanted["kept"])


def test_applying_is_updating_and_adding():
    params = {"w": torch.randn(50, generator=torch.Generator().manual_seed(8)).bfloat16()}
    tx = rounded_adamw()
    state = tx.init(params)
    updates, after = tx.update(params, state, params)
    wanted, here = sl.optim.apply_updates(params, updates), {"w": params["w"].clone()}
    its_state = tx.apply(here, params, state)
    assert_same((here, its_state), (wanted, after))


def test_small_updates_are_not_lost():
    """Steps of 2^-12 from 1: to the nearest bf16 number nothing ever moves; at random they arrive in the mean."""
    params = {"w": torch.ones(4000, dtype=torch.bfloat16)}
    grads = {"w": torch.full((4000,), 2.0**-12, dtype=torch.bfloat16)}

    def after(tx):
        current, state = params, tx.init(params)
        for _ in range(64):
            updates, state = tx.update(grads, state, current)
            current = sl.optim.apply_updates(current, updates)
        return current["w"].double()

    assert (after(sl.optim.sgd(1.0)) == 1).all()
    found = after(sl.optim.stochastic_rounding(sl.optim.sgd(1.0)))
    assert found.mean().item() == pytest.approx(1 - 64 * 2**-12, abs=4e-4)
    assert found.std() > 1e-3  # each by bits of its own


@pytest.mark.parametrize("name", ["clip", "momentum", "lamb"])
def test_other_optimizers_are_rounded_too(name):
    """With sums over leaves and over all of them: the same on shards as on one device, where gradients are exact."""
    inner = {
        "clip": lambda: sl.optim.chain(sl.optim.clip_by_global_norm(0.5), sl.optim.adamw(1e-2)),
        "momentum": lambda: sl.optim.sgd(1e-2, momentum=0.9),
        "lamb": lambda: sl.optim.lamb(1e-2),
    }[name]
    generator = torch.Generator().manual_seed(5)
    params = {name: {"weight": torch.randn(6, 6, generator=generator)} for name in ("sliced", "whole")}

    def run(mesh, stage):
        sharded = sl.shard(params, mesh, sl.chain(sl.zero(stage), BARE))
        state, step = sl.make_train_step(given_gradients, sharded, sl.optim.stochastic_rounding(inner()))
        for number in range(3):
            state, _ = step(state, torch.full((1,), 2.0**number))
        return sl.unshard(state.params)

    (wanted,) = sl.simulate(run, 0, mesh={"data": 1})
    for found in sl.simulate(run, 2, mesh={"data": 2}):
        different = [(a != b).sum().item() for a, b in zip(*map(optree.tree_leaves, (found, wanted)))]
        assert sum(different) <= 1  # a norm's last bit may tip one element over


def test_optimizers_that_reduce_gradients_are_refused():
    with pytest.raises(IllegalComposition, match=r"stochastic_rounding around onebit_adam, which reduces gradients"):
        sl.optim.stochastic_rounding(sl.optim.onebit_adam(1e-3, freeze_step=5))
