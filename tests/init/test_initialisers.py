"""Initialisers: the same numbers on every mesh, of which a rank draws only its shards."""

import math

import pytest
import torch
from helpers.trees import assert_same
from torch import nn

import shardlib as sl
from shardlib.init.draws import Draw
from shardlib.rng import random_bits

KEY = sl.Key(3).fold_in("init")
MAKERS = {
    "uniform": lambda key, shape, **o: sl.init.uniform(key, shape, -0.5, 2.0, **o),
    "normal": lambda key, shape, **o: sl.init.normal(key, shape, 0.5, 1.0, **o),
    "truncated_normal": lambda key, shape, **o: sl.init.truncated_normal(key, shape, 0.5, 1.0, -1.0, 2.0, **o),
    "xavier_uniform": sl.init.xavier_uniform,
    "xavier_normal": sl.init.xavier_normal,
    "kaiming_uniform": sl.init.kaiming_uniform,
    "kaiming_normal": sl.init.kaiming_normal,
}
BY_NAME = pytest.mark.parametrize("name", MAKERS)


def distribution(name, x):
    """The distribution function at x, of a (300, 200) tensor."""
    normal = lambda z: 0.5 * (1 + torch.erf(z / math.sqrt(2)))  # noqa: E731
    bounds = {"uniform": (-0.5, 2.0)}
    for kind, torchs in (("xavier_uniform", nn.init.xavier_uniform_), ("kaiming_uniform", nn.init.kaiming_uniform_)):
        wide = torchs(torch.empty(300, 200), generator=torch.Generator().manual_seed(0)).abs().max().item()
        bounds[kind] = (-wide, wide)
    stds = {"normal": 0.5, "xavier_normal": math.sqrt(2 / 500), "kaiming_normal": math.sqrt(2 / 200)}
    if name in bounds:
        low, high = bounds[name]
        return ((x - low) / (high - low)).clamp(0, 1)
    if name == "truncated_normal":
        z, low, high = (x - 1.0) / 0.5, torch.tensor(-1.0), torch.tensor(2.0)
        return (normal(z) - normal(low)) / (normal(high) - normal(low))
    return normal((x - (1.0 if name == "normal" else 0.0)) / stds[name])


@BY_NAME
def test_elements_have_the_distribution_asked_for(name):
    """Kolmogorov and Smirnov's distance of 60,000 elements: above 0.0083 one time in two thousand."""
    x = MAKERS[name](KEY, (300, 200)).double().flatten().sort().values
    steps = torch.arange(1, len(x) + 1) / len(x)
    assert (distribution(name, x) - steps).abs().max() < 0.0083
    if name == "truncated_normal":
        assert x.min() >= 0.5 and x.max() <= 2.0


def test_torchs_standard_deviations():
    for ours, torchs in [
        (sl.init.xavier_normal, nn.init.xavier_normal_),
        (sl.init.kaiming_normal, nn.init.kaiming_normal_),
        (sl.init.xavier_uniform, nn.init.xavier_uniform_),
        (sl.init.kaiming_uniform, nn.init.kaiming_uniform_),
    ]:
        theirs = torchs(torch.empty(60, 40, 5, 5), generator=torch.Generator().manual_seed(0))
        assert ours(KEY, (60, 40, 5, 5)).std().item() == pytest.approx(theirs.std().item(), rel=0.02)
    with pytest.raises(ValueError, match=r"shape \(3,\) has no inputs and outputs"):
        sl.init.kaiming_normal(KEY, (3,))


def test_an_element_depends_on_the_key_and_its_index_alone():
    u = (random_bits(KEY, 12).numpy() + 0.5) / 2**24
    assert sl.init.uniform(KEY, (3, 4), dtype=torch.float64).flatten().tolist() == u.tolist()
    large = sl.init.normal(KEY, (1 << 17,))  # drawn by chunks
    assert torch.equal(sl.init.normal(KEY, (1000,)), large[:1000]) and len(large.unique()) > 1 << 16
    assert torch.equal(sl.init.normal(KEY.at_slot(2), (5, 10)).flatten(), large[100:150])
    assert not torch.equal(sl.init.normal(KEY.fold_in("w"), (1000,)), large[:1000])
    assert sl.init.normal(KEY, (3, 4), device="meta").is_meta
    assert torch.equal(sl.init.normal(KEY, (1000,), dtype=torch.bfloat16), large[:1000].bfloat16())


def init_params():
    return {
        "layers": [
            {"weight": sl.init.kaiming_normal(KEY.fold_in(f"layers/{i}"), (8, 6)), "bias": torch.zeros(8)}
            for i in range(2)
        ],
        "odd": nn.Parameter(sl.init.uniform(KEY.fold_in("odd"), (7, 3))),
        "scaled": sl.init.normal(KEY.fold_in("scaled"), (5,)) * 0.1,
    }


MESHES = [
    ({"data": 1}, sl.zero(0)),
    ({"data": 3}, sl.zero(1)),
    ({"data": 4}, sl.zero(3)),
    ({"data": 2, "model": 2}, sl.chain(sl.zero(3), sl.tensor_slicing({"layers/0": "column", "layers/1": "row"}))),
    ({"node": 2, "local": 2}, sl.zero(3, axis="local", replicate="node")),
]


@pytest.mark.parametrize(("mesh", "transform"), MESHES)
def test_shards_are_drawn_equal_on_every_mesh(mesh, transform):
    def run(mesh, transform):
        lazily = sl.unshard(sl.shard(init_params, mesh, transform))
        assert_same(lazily, sl.unshard(sl.shard(init_params(), mesh, transform)))
        return lazily

    for found in sl.simulate(run, transform, mesh=mesh):
        assert_same(found, init_params())


def test_a_rank_draws_only_its_shard(monkeypatch):
    drawn = []
    at = Draw.at
    monkeypatch.setattr(Draw, "at", lambda draw, index: drawn.append(index.numel()) or at(draw, index))
    make = lambda: {"w": sl.init.normal(KEY, (40, 10)), "b": sl.init.uniform(KEY.fold_in("b"), (10,))}  # noqa: E731
    sl.simulate(lambda mesh: sl.shard(make, mesh, stage=3) and None, mesh={"data": 4})
    assert sum(drawn) == 410  # by four ranks together
    drawn.clear()
    sl.make_plan(make, sl.abstract_mesh(data=4), stage=3)
    assert drawn == []


def test_ranks_with_different_keys_are_named():
    def run(mesh):
        sl.shard(lambda: {"w": sl.init.normal(sl.Key(mesh.rank), (4, 4))}, mesh, stage=3)

    with pytest.raises(sl.errors.ShardlibError, match=r"initial values differ"):
        sl.simulate(run, mesh={"data": 2})


def test_precision_rounds_what_is_drawn():
    make = lambda: {"w": sl.init.normal(KEY, (40, 10))}  # noqa: E731

    def run(mesh):
        return sl.unshard(sl.shard(make, mesh, sl.chain(sl.zero(3), sl.precision("bf16"))))["w"]

    for found in sl.simulate(run, mesh={"data": 2}):
        assert torch.equal(found, make()["w"].bfloat16())


@pytest.mark.parametrize("remat", [[], [sl.remat()]])
@pytest.mark.parametrize("ranks", [1, 2])
def test_noise_in_a_loss_is_equal_on_every_mesh_and_under_recompute(ranks, remat):
    @sl.block
    def noisy(weight, x, rng):
        return torch.tanh((x + sl.init.normal(rng, x.shape, dtype=x.dtype)) @ weight)

    def loss_fn(params, x, rng):
        return noisy(params["w"], x, rng.fold_in("noise")).square().mean()

    params = {"w": sl.init.normal(KEY, (6, 6), dtype=torch.float64)}
    x = sl.init.normal(KEY.fold_in("x"), (8, 6), dtype=torch.float64)

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.chain(sl.zero(3), *remat))
        rows = 8 // ranks
        _, grads = sl.value_and_grad(loss_fn)(sharded, x[mesh.rank * rows : (mesh.rank + 1) * rows], rng=KEY)
        return sl.unshard(grads)["w"]

    weight = params["w"].clone().requires_grad_()
    loss_fn({"w": weight}, x, KEY).backward()
    for grad in sl.simulate(run, mesh={"data": ranks}):
        torch.testing.assert_close(grad, weight.grad, rtol=1e-12, atol=1e-14)
