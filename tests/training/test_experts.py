"""Layers of experts that are dealt out over a mesh axis: the training of one device on the joined batch, leaf by leaf."""

import pytest
import torch
from helpers import training
from helpers.trees import assert_close

import shardlib as sl
from shardlib.nn import routers

WIDTH, HIDDEN, EXPERTS, ROWS = 4, 6, 4, 8


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 2


def layer_params(kind, seed, experts=EXPERTS):
    """The second layer has a shared expert, and biases."""
    up, down = (HIDDEN, WIDTH), (WIDTH, HIDDEN)
    names = {"gate": up, "up": up, "down": down}
    if kind == "gelu":
        names = {"up": up, "up_bias": (HIDDEN,), "down": down, "down_bias": (WIDTH,)}
    params = {
        "router": {"weight": normal(experts, WIDTH, seed=seed)},
        "experts": {name: normal(experts, *shape, seed=seed + n) for n, (name, shape) in enumerate(names.items(), 1)},
    }
    if kind == "gelu":
        params["shared"] = {name: normal(*shape, seed=seed + n) for n, (name, shape) in enumerate(names.items(), 6)}
    return params


KINDS = ("swiglu", "gelu")
PARAMS = [{"w": normal(WIDTH, WIDTH, seed=50), **layer_params(kind, 10 * seed)} for seed, kind in enumerate(KINDS, 1)]
BATCHES = [{"x": normal(ROWS, 4, WIDTH, seed=60 + step), "skew": torch.zeros(ROWS, 1, EXPERTS)} for step in range(2)]


def model(router, wrap=sl.block):
    """A loss function. ``batch["skew"]`` is added to logits, to send all tokens where a test wants them."""

    def block(kind):
        def run(params, x, skew):
            def route(logits, *rest):
                return router(logits + skew.expand(*x.shape[:2], -1).flatten(0, 1), *rest)

            heads = (x @ params["w"]).unflatten(-1, (2, 2)).transpose(1, 2)
            mixed = sl.nn.attention(heads, heads, heads).transpose(1, 2).flatten(2)
            y, routing = sl.nn.moe(params, mixed, sl.nn.MoEConfig(route, expert=kind))
            return x + y, routing.aux["z"] * x.shape[1]

        return wrap(run)

    blocks = [block(kind) for kind in KINDS]

    def loss_fn(params, batch):
        x, z = sl.nn.shard_sequence(batch["x"]), 0.0
        for run, one in zip(blocks, params, strict=True):
            x, more = run(one, x, batch["skew"])
            z = z + more
        return sl.nn.sum_sequence(x.square().sum() / batch["x"].numel() + 0.1 * z / batch["x"].shape[1])

    return loss_fn


TOP_2 = routers.top_k(2, renormalise="chosen")


def trained(mesh, *transforms, router=TOP_2, batches=BATCHES, run=sl.simulate, wrap=sl.block, params=PARAMS):
    chain, loss_fn = sl.chain(*transforms), model(router, wrap)
    results = run(
        lambda m: training.train(m, loss_fn, params, batches, chain, sl.optim.sgd(0.1)),
        mesh=mesh,
    )
    assert all(losses == results[0][0] and norms == results[0][1] for losses, norms, _ in results)
    return results[0]


def assert_trains_like_one_device(mesh, *transforms, **how):
    alone = trained({"data": 1}, sl.zero(0), **{**how, "run": sl.simulate})
    found = trained(mesh, *transforms, **how)
    assert found[0] == pytest.approx(alone[0], rel=1e-10) and found[1] == pytest.approx(alone[1], rel=1e-10)
    assert_close(found[2], alone[2], 1e-10)


BOTH = ("data", "expert")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("mesh", "axis"),
    [({"expert": 2}, "expert"), ({"data": 2, "expert": 2}, "data"), ({"expert": 4, "data": 2}, BOTH)],
)
def test_stages(mesh, axis, stage):
    assert_trains_like_one_device(
        mesh, sl.experts(), *([sl.zero(stage, axis=axis)] if axis != "expert" or stage else [])
    )


def skewed(*experts):
    """Batches whose tokens all go to these experts."""
    return [{**batch, "skew": batch["skew"].index_fill(2, torch.tensor(experts), 30.0)} for batch in BATCHES]


@pytest.mark.parametrize("transforms", [(), (sl.zero(3, axis=BOTH), sl.remat())], ids=["whole", "split"])
@pytest.mark.parametrize("experts", [(0, 1), (3, 2), (1, 2)])
def test_experts_and_ranks_without_tokens(experts, transforms):
    mesh = {"data": 2, "expert": 2}
    assert_trains_like_one_device(mesh, sl.experts(), *(transforms or (sl.zero(),)), batches=skewed(*experts))


def test_all_tokens_to_one_expert():
    assert_trains_like_one_device({"expert": 4}, sl.experts(), router=routers.switch(), batches=skewed(2))


DROPPING = {
    "position": routers.switch(routers.Capacity(1.0, minimum=1)),
    "probability": routers.top_k(2, renormalise="kept", capacity=routers.Capacity(0.6, 1, "probability")),
    "gshard": routers.gshard(routers.Capacity(1.0, 1, "choice"), second="best"),
    "expert choice": routers.expert_choice(1.5),
}


@pytest.mark.parametrize("router", DROPPING)
def test_a_capacity_is_of_a_ranks_own_tokens(router):
    """So the training is that of whole experts on as many ranks."""
    wanted = trained({"data": 4}, sl.zero(0), router=DROPPING[router])
    found = trained({"data": 2, "expert": 2}, sl.experts(), sl.zero(2, axis=BOTH), router=DROPPING[router])
    assert found[:2] == (pytest.approx(wanted[0], rel=1e-10), pytest.approx(wanted[1], rel=1e-10))
    assert_close(found[2], wanted[2], 1e-10)


COMPOSED = {
    "two hops": ({"node": 2, "local": 2}, (sl.experts(("node", "local")), sl.zero(1, axis=("node", "local")))),
    "two hops, of which one is none": ({"node": 1, "local": 2}, (sl.experts(("node", "local")),)),
    "one rank": ({"expert": 1, "data": 2}, (sl.experts(), sl.zero(2))),
    "the batch's own axis": ({"data": 2}, (sl.experts("data"), sl.zero(3))),
    "hybrid": ({"node": 2, "expert": 2}, (sl.experts(), sl.zero(3, axis="expert", replicate="node"))),
    "recomputed": ({"data": 2, "expert": 2}, (sl.experts(), sl.zero(3), sl.remat())),
    "recomputed, selectively": ({"expert": 2}, (sl.experts(), sl.zero(3, axis="expert"), sl.remat("dots"))),
    "inputs on the host": ({"expert": 2}, (sl.experts(), sl.zero(2, axis="expert"), sl.remat(store="host"))),
    "accumulated": ({"expert": 2}, (sl.experts(), sl.zero(2, axis="expert"), sl.accumulate(2, sync="each"))),
    "offloaded": ({"data": 2, "expert": 2}, (sl.experts(), sl.zero(2, axis=BOTH), sl.offload())),
    "sequences in parts": (
        {"seq": 2, "expert": 2},
        (sl.experts(), sl.sequence("seq"), sl.zero(3, axis=("seq", "expert"))),
    ),
    "sliced around them": (
        {"model": 2, "expert": 2},
        (sl.experts(), sl.tensor_slicing({"*/shared/up*": "column", "*/shared/down": "row"})),
    ),
}


@pytest.mark.parametrize("case", COMPOSED)
def test_beside_other_transforms(case):
    mesh, transforms = COMPOSED[case]
    assert_trains_like_one_device(mesh, *transforms)


SLICES = sl.tensor_slicing(
    {
        "*/experts/gate": sl.column(experts=True),
        "*/experts/up*": sl.column(experts=True),
        "*/experts/down*": sl.row(experts=True),
        "*/shared/up*": "column",
        "*/shared/down*": "row",
    }
)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("mesh", [{"model": 2, "data": 1}, {"model": 2, "data": 2}])
def test_slices_of_whole_experts(mesh, stage):
    assert_trains_like_one_device(mesh, SLICES, sl.zero(stage))


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("mesh", [{"expert": 2, "model": 2, "data": 1}, {"data": 2, "model": 2, "expert": 2}])
def test_slices_of_experts_that_are_dealt_out(mesh, stage):
    assert_trains_like_one_device(mesh, sl.experts(), SLICES, sl.zero(stage, axis=BOTH), sl.remat())
