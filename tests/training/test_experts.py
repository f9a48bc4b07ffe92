"""Layers of experts that are dealt out over a mesh axis: the training of one device on the joined batch, leaf by leaf."""

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from helpers import training
from helpers.measure import count_payload
from helpers.models import share
from helpers.profile import NIGHTLY
from helpers.trees import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib as sl
from shardlib.collectives.codecs import packing_of
from shardlib.collectives.primitives import all_gather_object
from shardlib.errors import HandleError, IllegalComposition, RankMismatch, ShardlibError
from shardlib.nn import routers
from shardlib.tree import tree_map

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


def model(router, wrap=sl.block, expert=lambda kind: kind):
    """A loss function. ``batch["skew"]`` is added to logits, to send all tokens where a test wants them."""

    def block(kind):
        def run(params, x, skew):
            def route(logits, *rest):
                return router(logits + skew.expand(*x.shape[:2], -1).flatten(0, 1), *rest)

            heads = (x @ params["w"]).unflatten(-1, (2, 2)).transpose(1, 2)
            mixed = sl.nn.attention(heads, heads, heads).transpose(1, 2).flatten(2)
            y, routing = sl.nn.moe(params, mixed, sl.nn.MoEConfig(route, expert=expert(kind)))
            return x + y, routing.aux["z"] * x.shape[1]

        return wrap(run)

    def loss_fn(params, batch):
        x, z = sl.nn.shard_sequence(batch["x"]), 0.0
        for run, one in zip(loss_fn.blocks, params, strict=True):
            x, more = run(one, x, batch["skew"])
            z = z + more
        return sl.nn.sum_sequence(x.square().sum() / batch["x"].numel() + 0.1 * z / batch["x"].shape[1])

    loss_fn.blocks = [block(kind) for kind in KINDS]
    return loss_fn


TOP_2 = routers.top_k(2, renormalise="chosen")


def trained(mesh, *transforms, router=TOP_2, batches=BATCHES, run=sl.simulate, params=PARAMS, tx=None, **how):
    chain, loss_fn = sl.chain(*transforms), model(router, **how)
    results = run(
        lambda m: training.train(m, loss_fn, params, batches, chain, tx or sl.optim.sgd(0.1)),
        mesh=mesh,
    )
    assert all(losses == results[0][0] and norms == results[0][1] for losses, norms, _ in results)
    return results[0]


def assert_trains_like_one_device(mesh, *transforms, both=(), **how):
    """With transforms that one device has in common with the mesh in ``both``."""
    alone = trained({"data": 1}, sl.zero(0), *both, **{**how, "run": sl.simulate})
    found = trained(mesh, *transforms, *both, **how)
    assert found[0] == pytest.approx(alone[0], rel=1e-10) and found[1] == pytest.approx(alone[1], rel=1e-10)
    assert_close(found[2], alone[2], 1e-10)


BOTH = ("data", "expert")
TX = sl.optim.sgd(0.1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("mesh", "axis"),
    [({"expert": 2}, "expert"), ({"data": 2, "expert": 2}, "data"), ({"expert": 4, "data": 2}, BOTH)],
)
def test_stages(mesh, axis, stage):
    assert_trains_like_one_device(
        mesh, sl.experts(), *([sl.zero(stage, axis=axis)] if axis != "expert" or stage else [])
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", [{"expert": 2}, {"data": 2, "expert": 2}])
def test_clipping_by_the_norm_of_all_experts(mesh, stage):
    """The first norm is above 2, so that a norm that misses experts would clip less."""
    tx = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.sgd(0.1))
    assert trained({"data": 1}, sl.zero(0), tx=tx)[1][0] > 2
    axes = tuple(mesh)
    assert_trains_like_one_device(mesh, sl.experts(), sl.zero(stage, axis=axes), tx=tx)


@pytest.mark.parametrize(
    "axes", [{"expert": 2}, pytest.param({"expert": 2, "data": 2}, marks=pytest.mark.nightly)], ids=len
)
def test_compiled_blocks(pool, axes):
    """Graphs end before an exchange, and others begin after it. Over axis "data" experts are gathered."""

    def train(mesh, chain, compiled):
        def layer(params, x):
            return sl.nn.moe(params, x @ params["w"], sl.nn.MoEConfig(routers.switch()))[0]

        block = sl.block(torch.compile(layer, backend="eager") if compiled else layer)
        batch = [one["x"] for one in BATCHES[:1]]
        return training.train(
            mesh, lambda params, x: block(params, x).square().mean(), PARAMS[0], batch, chain, sl.optim.sgd(0.1)
        )

    ((losses, norms, params),) = sl.simulate(train, sl.zero(0), False, mesh={"data": 1})
    for found in pool.run(train, sl.chain(sl.experts(), sl.zero(3, axis=tuple(axes))), True, mesh=axes):
        assert found[0] == pytest.approx(losses, rel=1e-10) and found[1] == pytest.approx(norms, rel=1e-10)
        assert_close(found[2], params, 1e-10)


def skewed(*experts):
    """Batches whose tokens all go to these experts."""
    return [
        {**batch, "skew": batch["skew"].index_fill(2, torch.tensor(experts, dtype=torch.int64), 30.0)}
        for batch in BATCHES
    ]


@pytest.mark.parametrize("transforms", [(), (sl.zero(3, axis=BOTH), sl.remat())], ids=["whole", "split"])
@pytest.mark.parametrize("experts", [(0, 1), (3, 2), (1, 2)])
def test_experts_and_ranks_without_tokens(experts, transforms):
    mesh = {"data": 2, "expert": 2}
    assert_trains_like_one_device(mesh, sl.experts(), *(transforms or (sl.zero(),)), batches=skewed(*experts))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_whose_tokens_need_no_gradient_takes_part_in_backward(stage):
    still = [{**batch, "still": (torch.arange(ROWS) < ROWS // 2)[:, None, None]} for batch in BATCHES]

    def loss_fn(params, batch):
        x = batch["x"] @ params["w"]
        still = batch["still"]  # of all rows on one rank, of none on the other
        x = x.detach() if still.all() else torch.where(still, x.detach(), x)
        return sl.nn.moe(params, x, sl.nn.MoEConfig(TOP_2))[0].square().mean()

    def run(mesh, *transforms):
        return training.train(mesh, loss_fn, PARAMS[0], still, sl.chain(*transforms), sl.optim.sgd(0.1))

    (alone,) = sl.simulate(run, mesh={"data": 1})
    split = [sl.zero(stage, axis="expert")] if stage else []
    for found in sl.simulate(run, sl.experts(), *split, mesh={"expert": 2}):
        assert found[0] == pytest.approx(alone[0], rel=1e-10)
        assert_close(found[2], alone[2], 1e-10)


def test_all_tokens_to_one_expert():
    assert_trains_like_one_device({"expert": 4}, sl.experts(), router=routers.switch(), batches=skewed(2))


DROPPING = {
    "position": routers.switch(routers.Capacity(1.0, minimum=1)),
    "probability": routers.top_k(2, renormalise="kept", capacity=routers.Capacity(0.6, 1, "probability")),
    "gshard": routers.gshard(routers.Capacity(1.0, 1, "choice"), second="best"),
    "expert choice": routers.expert_choice(1.5),
}


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("router", DROPPING)
def test_a_capacity_is_of_a_ranks_own_tokens(router, padded):
    """So the training is that of whole experts on as many ranks."""
    wanted = trained({"data": 4}, sl.zero(0), router=DROPPING[router])
    experts = sl.experts(padded=padded)
    found = trained({"data": 2, "expert": 2}, experts, sl.zero(2, axis=BOTH), router=DROPPING[router])
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


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("other", ["shared", "residual"])
def test_experts_beside_the_layer_gather_their_sequences(other, stage):
    """Those of "megatron" sequences, in which the layer's own rows have parts of tokens."""
    layer = layer_params("gelu", 30)
    params = {
        "w": normal(WIDTH, WIDTH),
        **{name: layer[name] for name in ("router", "experts")},
        other: layer["shared"],
    }
    if other == "residual":
        params["residual"] |= {"mix": {"weight": normal(2, WIDTH, seed=3), "bias": normal(2, seed=4)}}

    def loss_fn(params, batch):
        x = sl.nn.shard_sequence(batch["x"]) @ params["w"]
        y, _ = sl.nn.moe(params, x, sl.nn.MoEConfig(TOP_2, expert="gelu"))
        return sl.nn.sum_sequence(y.square().sum() / batch["x"].numel())

    slices = sl.tensor_slicing({f"{other}/up*": "column", f"{other}/down*": "row"})
    chain = sl.chain(sl.experts(), sl.sequence("model", "megatron"), slices, sl.zero(stage, axis=BOTH))
    alone = training.simulate({"data": 1}, loss_fn, params, BATCHES, sl.zero(0), sl.optim.sgd(0.1))
    found = training.simulate({"model": 2, "expert": 2, "data": 2}, loss_fn, params, BATCHES, chain, sl.optim.sgd(0.1))
    assert found[0] == pytest.approx(alone[0], rel=1e-10) and found[1] == pytest.approx(alone[1], rel=1e-10)
    assert_close(found[2], alone[2], 1e-10)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("globs", ["*/experts/*", ["0/*", "1/experts/up*"]], ids=["all experts", "some leaves"])
def test_frozen_leaves(globs, stage):
    """Rows of frozen experts still have gradients."""
    mesh = {"data": 2, "expert": 2}
    assert_trains_like_one_device(mesh, sl.experts(), sl.zero(stage, axis=BOTH), both=[sl.freeze(globs)])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_layers_that_share_a_leaf_of_their_experts(stage):
    first, second = PARAMS
    tied = [first, {**second, "experts": {**second["experts"], "down": first["experts"]["down"]}}]
    mesh = {"data": 2, "expert": 2}
    assert_trains_like_one_device(mesh, sl.experts(), sl.zero(stage, axis=BOTH), params=tied)


def test_states_and_parameters_on_disk(tmp_path):
    disk = sl.offload("disk", params="disk", folder=tmp_path)
    assert_trains_like_one_device(
        {"expert": 2}, sl.experts(), sl.zero(3, axis="expert"), disk, tx=sl.optim.adamw(1e-2, eps=1e-3)
    )


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("mesh", [{"model": 2, "data": 1}, {"model": 2, "data": 2}])
def test_slices_of_whole_experts(mesh, stage):
    assert_trains_like_one_device(mesh, SLICES, sl.zero(stage))


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("mesh", [{"expert": 2, "model": 2, "data": 1}, {"data": 2, "model": 2, "expert": 2}])
def test_slices_of_experts_that_are_dealt_out(mesh, stage):
    assert_trains_like_one_device(mesh, sl.experts(), SLICES, sl.zero(stage, axis=BOTH), sl.remat())


SLICES = sl.tensor_slicing(
    {
        "*/experts/gate": sl.column(experts=True),
        "*/experts/up*": sl.column(experts=True),
        "*/experts/down*": sl.row(experts=True),
        "*/shared/up*": "column",
        "*/shared/down*": "row",
    }
)


ROUTERS = [TOP_2, routers.switch(), routers.top_k(3, score="sigmoid"), routers.gshard(second="best")]


@st.composite
def cases(draw):
    """A mesh of at most eight ranks, and what goes with it."""
    sizes = {axis: draw(st.sampled_from([1, 2])) for axis in ("data", "model", "seq")}
    sizes["expert"] = draw(st.sampled_from([n for n in (1, 2, 4) if n * math.prod(sizes.values()) <= 8]))
    if sizes["expert"] == 4 and draw(st.booleans()):
        sizes |= {"expert": 2, "local": 2}
    axes = ("expert", "local") if "local" in sizes else ("expert",)
    batch = ["data", *axes]
    split = draw(st.lists(st.sampled_from([*batch, "seq"]), unique=True, max_size=3))
    parts = [sl.experts(axes), *([SLICES] if sizes["model"] == 2 else [])]
    parts += [sl.sequence("seq", draw(st.sampled_from(["ulysses", "ring"])))] if sizes["seq"] == 2 else []
    parts += [sl.zero(draw(st.integers(0, 3)), axis=tuple(split))] if split else []
    parts += [sl.zero(0, axis="data")] if sizes["data"] == 2 and "data" not in split else []
    parts += [sl.remat(draw(st.sampled_from(["full", "dots"])))] * draw(st.booleans())
    parts += [sl.accumulate(2)] * (draw(st.booleans()) and ROWS // math.prod(sizes[axis] for axis in batch) > 1)
    mesh = {
        axis: size for axis, size in draw(st.permutations(list(sizes.items()))) if size > 1 or axis in (*split, *axes)
    }
    lopsided = draw(st.sampled_from([(), (0,), (3,), (1, 2)]))
    return mesh, draw(st.permutations(parts)), draw(st.sampled_from(ROUTERS)), lopsided


@settings(max_examples=100 if NIGHTLY else 6)
@given(cases())
def test_any_legal_chain(case):
    """Routers, meshes, stages, slices and sequence parts, drawn together and in any order."""
    mesh, transforms, router, experts = case
    assert_trains_like_one_device(mesh, *transforms, router=router, batches=skewed(*experts))


def in_blocks(router=TOP_2):
    """The same training as a list of blocks, whose carry holds the losses."""
    loss_fn = model(router)

    def block(index):
        def run(params, carry, batch):
            x, z = (batch["x"], torch.zeros((), dtype=torch.float64)) if carry is None else carry
            more, aux = loss_fn.blocks[index](params, x, batch["skew"])
            return more, z + aux

        return run

    def last(params, carry, batch):
        x, z = carry
        return (x * params["scale"]).square().mean() + 0.1 * z / x.shape[1]

    return sl.sequential([block(0), block(1), last]), [*PARAMS, {"scale": normal(WIDTH)}]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize(("stage", "sliced"), [(0, False), (3, False), (3, True)])
def test_pipelines(schedule, stage, sliced):
    """Ranks along the stages' axis have different experts, and those along the experts' axis the same schedule."""
    loss_fn, params = in_blocks()
    chain = sl.experts(), sl.zero(stage, axis="expert"), sl.pipeline(schedule, microbatches=2), *[SLICES] * sliced

    def run(mesh, *transforms):
        return training.simulate(mesh, loss_fn, params, BATCHES, sl.chain(*transforms), sl.optim.sgd(0.1))

    alone, found = run({"data": 1}, sl.zero(0)), run({"pipe": 2, "expert": 2, "model": 1 + sliced}, *chain)
    assert found[0] == pytest.approx(alone[0], rel=1e-10) and found[1] == pytest.approx(alone[1], rel=1e-10)
    assert_close(found[2], alone[2], 1e-10)


@pytest.mark.parametrize("mesh", [{"expert": 4}, {"data": 2, "expert": 2}, {"expert": 2, "model": 2}], ids=str)
def test_real_processes(pool, mesh):
    """All tokens go to one rank's experts in the first step."""
    batches = [skewed(2, 3)[0], BATCHES[1]]
    transforms = [sl.zero(3, axis=("expert", *mesh.keys() & {"data"})), *([SLICES] if "model" in mesh else [])]
    assert_trains_like_one_device(mesh, sl.experts(), *transforms, batches=batches, run=pool.run)


def test_two_hops_between_real_processes(pool):
    mesh = {"node": 2, "local": 2}
    chain = sl.experts(("node", "local")), sl.zero(2, axis=("node", "local")), sl.remat()
    assert_trains_like_one_device(mesh, *chain, batches=skewed(1, 3), run=pool.run)


def test_checkpoints_move_between_numbers_of_ranks(tmp_path):
    loss_fn, tx = model(TOP_2), sl.optim.adamw(1e-2)

    def fresh(mesh, chain, params):
        return sl.make_train_step(loss_fn, sl.shard(params, mesh, chain), tx)

    def begun(mesh, chain):
        state, step = fresh(mesh, chain, PARAMS)
        state, _ = step(state, share(BATCHES[0], mesh.rank, mesh.size))
        sl.checkpoint.save(tmp_path / "saved", state)

    def ended(mesh, chain):
        state, step = fresh(mesh, chain, tree_map(torch.zeros_like, PARAMS))
        state = sl.checkpoint.restore(tmp_path / "saved", state)
        state, metrics = step(state, share(BATCHES[1], mesh.rank, mesh.size))
        return sl.unshard(state.params), metrics["grad_norm"].item()

    def both(mesh, chain):
        state, step = fresh(mesh, chain, PARAMS)
        for batch in BATCHES:
            state, metrics = step(state, batch)
        return sl.unshard(state.params), metrics["grad_norm"].item()

    wanted, norm = sl.simulate(both, sl.zero(0), mesh={"data": 1})[0]
    sl.simulate(begun, sl.chain(sl.experts(), sl.zero(2, axis=BOTH)), mesh={"data": 2, "expert": 2})
    for mesh, chain in (
        ({"expert": 2}, sl.experts()),
        ({"expert": 4}, sl.chain(sl.experts(), sl.zero(3, axis="expert"))),
        ({"data": 2}, sl.zero(1)),
    ):
        for found, other in sl.simulate(ended, chain, mesh=mesh):
            assert other == pytest.approx(norm, rel=1e-10)
            assert_close(found, wanted, 1e-10)


def counted(router):
    """One layer, whose loss hands out how many rows each expert gets of this rank."""

    def loss_fn(params, batch):
        y, routing = sl.nn.moe(params, batch["x"] @ params["w"], sl.nn.MoEConfig(router))
        return y.square().mean(), {"counts": routing.counts}

    return loss_fn


def sent_in_a_step(mesh, chain, router):
    """What a rank sends along the experts' axis: counted outside of the library, and as the plan has it with the loss and
    without; and what it sends for the layer by the rows of all ranks."""
    loss_fn, batch = counted(router), share(BATCHES[0], mesh.rank, mesh.size)
    state, step = sl.make_train_step(loss_fn, sl.shard(PARAMS[0], mesh, chain), sl.optim.sgd(0.1))
    sent = count_payload(mesh)
    state, metrics = step(state, batch)
    planned, bare = (sl.make_plan(PARAMS[0], mesh, chain, **how) for how in ({"loss_fn": loss_fn, "batch": batch}, {}))
    measured, exchange = sent()["expert"], planned.step.tokens
    everyone = torch.stack(all_gather_object(mesh, ["expert"], metrics["aux"]["counts"]))
    slots = router.slots((batch["x"].shape[:2].numel(), router.k), EXPERTS) if exchange.padded else None
    layer = exchange.payload(mesh.shape, mesh.coords, everyone, WIDTH, torch.float64, slots=slots)
    tokens = ROWS * 4 // mesh.size
    most = exchange.bound(mesh.shape, tokens * router.k, EXPERTS, WIDTH, torch.float64, slots=slots)
    sums = bare.payload()["expert"]
    return measured - sums, planned.payload()["expert"] - sums, *(bytes_of(payload) for payload in (layer, most))


def bytes_of(payload):
    return payload.forward["expert"] + payload.backward["expert"]


@pytest.mark.parametrize("ways", [2, 4])
def test_payload_is_that_of_the_rows_that_there_are(ways):
    for measured, _, by_counts, most in sl.simulate(sent_in_a_step, sl.experts(), TOP_2, mesh={"expert": ways}):
        assert measured == by_counts <= most


@pytest.mark.parametrize("axes", [("expert",), ("node", "local")], ids=["direct", "two hops"])
def test_a_recomputed_layer_sends_its_rows_again_and_not_its_counts(axes):
    def run(mesh, *remat):
        block = sl.block(lambda params, x: sl.nn.moe(params, x @ params["w"], sl.nn.MoEConfig(TOP_2)))

        def loss_fn(params, batch):
            y, routing = block(params, batch["x"])
            return y.square().mean(), {"counts": routing.counts}

        sharded = sl.shard(PARAMS[0], mesh, sl.chain(sl.experts(axes), *remat))
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(0.1))
        batch, sent = share(BATCHES[0], mesh.rank, mesh.size), count_payload(mesh)
        counts = step(state, batch)[1]["aux"]["counts"]
        everyone = torch.stack(all_gather_object(mesh, axes, counts))
        rows = sharded.plan.step.tokens.payload(mesh.shape, mesh.coords, everyone, WIDTH, torch.float64).backward
        planned = sl.make_plan(PARAMS[0], mesh, sl.chain(sl.experts(axes), *remat), loss_fn=loss_fn, batch=batch)
        return sent(), rows, planned.payload()

    for (plain, rows, planned), (again, _, expected) in zip(
        *(sl.simulate(run, *remat, mesh=dict.fromkeys(axes, 2)) for remat in ([], [sl.remat()])), strict=True
    ):
        assert again == {axis: plain[axis] + rows[axis] for axis in axes}
        number = ROWS * 4 // 2 ** len(axes) * TOP_2.k // 2  # rows on each hop and way, taken to be equal
        assert expected == {axis: planned[axis] + 2 * number * WIDTH * 8 for axis in axes}


def test_payload_of_padded_rows_is_known_before():
    router = routers.switch(routers.Capacity(1.3, 1))
    for measured, planned, by_counts, most in sl.simulate(
        sent_in_a_step, sl.experts(padded=True), router, mesh={"expert": 4}
    ):
        assert measured == planned == by_counts == most


@pytest.mark.parametrize("axes", [("expert",), ("node", "local")], ids=["direct", "two hops"])
def test_padded_rows_of_other_numbers_of_tokens_are_named_with_their_slots(axes):
    def run(mesh):
        params = sl.shard(PARAMS[0], mesh, sl.experts(axes, padded=True))
        state, step = sl.make_train_step(counted(routers.switch(routers.Capacity(1.0, 1))), params, sl.optim.sgd(0.1))
        step(state, {"x": BATCHES[0]["x"][: 2 + 4 * (mesh.rank == 0)]})

    with pytest.raises(
        RankMismatch, match=r"tokens to experts, (6|2) for each expert \(padded=True: equally many on all ranks"
    ):
        sl.simulate(run, mesh=dict.fromkeys(axes, 2))


def test_the_plan_says_that_loads_are_taken_as_equal():
    params = tree_map(torch.Tensor.float, PARAMS)
    plan = sl.make_plan(params, sl.abstract_mesh(expert=4), sl.experts(codec="fp8"))
    assert "tokens travel direct over axis 'expert', to experts in fp8: counted as if every expert got as many" in str(
        plan
    )
    assert "at most 4 times a rank's own rows" in str(plan)
    assert "counted as if" not in str(sl.make_plan(PARAMS, sl.abstract_mesh(expert=4), sl.experts(padded=True)))


@dataclass(frozen=True)
class Wide:
    """A packing that rounds as another one, and takes float64: what is rounded is known but for its sums' last bits."""

    form: str
    wide: ClassVar[bool] = True

    def size(self, elements):
        return packing_of(self.form).size(elements)

    def pack(self, x):
        return packing_of(self.form).pack(x.float())

    def unpack(self, message, out):
        rows = torch.empty(out.shape)
        packing_of(self.form).unpack(message, rows)
        out.copy_(rows)


class Coded(torch.autograd.Function):
    """Rows as they arrive when one packing encodes them, and another their gradients."""

    @staticmethod
    def forward(ctx, rows, forwards, backwards):
        ctx.packings = forwards, backwards
        out = torch.empty_like(rows)
        forwards.unpack(forwards.pack(rows), out)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Coded.apply(grad, *reversed(ctx.packings)), None, None


def coded(kind, there, back):
    """An expert whose rows, and results, are encoded as if they travelled."""

    def expert(params, rows, product):
        compute = sl.nn.MoEConfig(TOP_2, expert=kind).compute
        if product is torch.nn.functional.linear:  # the shared expert, for which nothing travels
            return compute(params, rows, product)
        return Coded.apply(compute(params, Coded.apply(rows, there, back), product), back, there)

    return expert


@pytest.mark.parametrize(("there", "back"), [("int8", "fp8"), ("int4", "int8")])
@pytest.mark.parametrize("axes", [("expert",), ("node", "local")], ids=["direct", "two hops"])
def test_rows_are_encoded(there, back, axes):
    """Once on each way, by one device's own rounding of the same rows."""
    packings = {"there": Wide(there), "back": Wide(back)}
    wanted = trained({"data": 1}, sl.zero(0), expert=lambda kind: coded(kind, **packings))
    experts = sl.experts(axes, codec=packings["there"], back_codec=packings["back"])
    found = trained(dict.fromkeys(axes, 2), experts, sl.zero(0, axis=axes))
    assert found[0] == pytest.approx(wanted[0], rel=1e-10) and found[1] == pytest.approx(wanted[1], rel=1e-10)
    assert_close(found[2], wanted[2], 1e-10)


def test_names_of_packings():
    """A name stands for its packing."""
    params, batches = (tree_map(torch.Tensor.float, tree) for tree in (PARAMS, BATCHES))
    how = {"params": params, "batches": batches}
    by_name = trained({"expert": 2}, sl.experts(codec="fp8", back_codec="int8"), **how)
    packings = {"codec": packing_of("fp8"), "back_codec": packing_of("int8")}
    assert by_name[:2] == trained({"expert": 2}, sl.experts(**packings), **how)[:2]


def test_sixteen_bits():
    """Experts and tokens in bf16 compute what whole experts do for the same share of the batch.

    The gradient of a dealt-out expert is rounded once, and that of a whole one on both ranks: by 2⁻⁹ each.
    """
    params = tree_map(torch.Tensor.float, PARAMS)
    wanted = trained({"data": 2}, sl.zero(0), sl.precision("bf16"), params=params)
    found = trained({"expert": 2}, sl.experts(), sl.precision("bf16"), params=params)
    assert found[0][0] == wanted[0][0]
    assert found[0][1] == pytest.approx(wanted[0][1], rel=2**-8) and found[1] == pytest.approx(wanted[1], rel=2**-8)
    assert_close(found[2], wanted[2], 2**-7)  # the last place of a bf16


def test_evaluation():
    """Each rank evaluates its own share, by the experts of all ranks."""

    def run(mesh, chain):
        params = sl.shard(PARAMS, mesh, chain)
        evaluate, batch = sl.make_eval_step(model(TOP_2), params), skewed(1, 0)[0]
        return [
            float(evaluate(params, share(batch, rank, 4))) for rank in (range(4) if mesh.size == 1 else [mesh.rank])
        ]

    (alone,) = sl.simulate(run, sl.zero(0), mesh={"data": 1})
    parts = sl.simulate(run, sl.chain(sl.experts(), sl.zero(3, axis="expert")), mesh={"expert": 4})
    assert list(itertools.chain(*parts)) == pytest.approx(alone, rel=1e-10)


@pytest.mark.parametrize("rows", [(6, 2), (8, 0), (0, 8)])
def test_ranks_with_other_numbers_of_tokens(rows):
    """A rank without any takes part too. The loss is a mean over all tokens."""
    first = (0, *itertools.accumulate(rows))

    def loss_fn(params, batch):
        y, _ = sl.nn.moe(params, batch["x"] @ params["w"], sl.nn.MoEConfig(TOP_2))
        return sl.Mean(y.square().sum(), y.numel())

    def run(mesh, chain, whole):
        state, step = sl.make_train_step(loss_fn, sl.shard(PARAMS[0], mesh, chain), sl.optim.sgd(0.1))
        x = BATCHES[0]["x"]
        state, metrics = step(state, {"x": x if whole else x[first[mesh.rank] : first[mesh.rank + 1]]})
        return metrics["loss"].item(), metrics["grad_norm"].item(), sl.unshard(state.params)

    ((loss, norm, wanted),) = sl.simulate(run, sl.zero(0), True, mesh={"data": 1})
    for found in sl.simulate(run, sl.chain(sl.experts(), sl.zero(3, axis="expert")), False, mesh={"expert": 2}):
        assert found[:2] == pytest.approx((loss, norm), rel=1e-10)
        assert_close(found[2], wanted, 1e-10)


def test_a_rank_draws_its_own_experts():
    def drawn(mesh, chain):
        params = sl.shard(
            lambda: {"experts": {"w": sl.init.normal(sl.Key(3), (4, 6, 8))}, "b": torch.zeros(3)}, mesh, chain
        )
        return sl.unshard(params)

    (alone,) = sl.simulate(drawn, sl.zero(0), mesh={"data": 1})
    for found in sl.simulate(drawn, sl.chain(sl.experts(), sl.zero(3)), mesh={"data": 2, "expert": 2}):
        assert torch.equal(found["experts"]["w"], alone["experts"]["w"])


class Plain:
    def __init__(self, axis):
        self.axes = (axis,)


REFUSED = {
    "does not divide\n  - 0/experts/down: shape \\(4, 4, 6\\)[\\s\\S]*All divide over 1, 2, 4 ranks": (
        lambda: sl.experts("data"),
        {"data": 3},
    ),
    r"experts\(rules='\*/expert/\*'\): '\*/expert/\*' match no parameter; paths look like 0/experts/down": (
        lambda: sl.experts(rules="*/expert/*"),
        {"expert": 2},
    ),
    "name one axis of the mesh, or two that differ": (lambda: sl.experts(("a", "a")), {"a": 2}),
    "codec='int3'.: use a packing, or 'int8'": (lambda: sl.experts(codec="int3"), {"expert": 2}),
    "back_codec=8.: use a packing, or 'int8'": (lambda: sl.experts(back_codec=8), {"expert": 2}),
    r"experts\(axis=3\): name one axis of the mesh, or two": (lambda: sl.experts(3), {"expert": 2}),
    r"experts\(padded='no'\): use True or False": (lambda: sl.experts(padded="no"), {"expert": 2}),
    r"zero\(axis=None\): name one axis of the mesh, or several": (lambda: sl.zero(1, axis=None), {"data": 2}),
    r"zero\(replicate=\('b', 'c'\)\): name one axis": (lambda: sl.zero(2, "a", ("b", "c")), {"a": 2}),
    r"experts\(kind=.*Plain\) makes .*Plain object.*no shardlib.collectives.tokens.TokenExchange over": (
        lambda: sl.experts(kind=Plain),
        {"expert": 2},
    ),
    "uses axis 'expert', which .* does not have; use 'ep' instead: experts\\('ep'\\)": (
        lambda: sl.chain(sl.experts(), sl.zero()),
        {"data": 2, "ep": 2},
    ),
    "divides experts, and sequence.* cuts sequences": (
        lambda: sl.chain(sl.experts("seq"), sl.sequence("seq"), sl.zero(axis="seq")),
        {"seq": 2},
    ),
    "fp8.* holds no float64, which 7 parameters are .0/experts/down first.; .*, or leave back_codec= out": (
        lambda: sl.experts(back_codec="fp8"),
        {"expert": 2},
    ),
    "cannot give the same bits on every mesh": (lambda: sl.chain(sl.experts(), sl.reproducible(4)), {"expert": 2}),
    "both claim\n  - the spec of 0/experts/up: P\\('expert'\\) against P\\(None, 'expert'\\)": (
        lambda: sl.chain(sl.experts(), sl.tensor_slicing({"*/experts/up": sl.column(experts=True)}, axis="expert")),
        {"expert": 2},
    ),
}


def listed(*leaves):
    """Two experts in a list under a key "experts"."""
    return {"moe": {"experts": [{name: torch.zeros(shape) for name, shape in leaves}] * 2}}


def test_lists_of_experts_that_are_not_stacked_are_refused():
    mesh = sl.abstract_mesh(expert=2)
    with pytest.raises(
        IllegalComposition, match=r"leaves of its own:\n  - moe/experts\nStack each leaf of the experts in one"
    ):
        sl.make_plan(listed(("up", (6, 4)), ("up_bias", (6,))), mesh, sl.experts())
    layers = listed(("up", (2, 6, 4)), ("up_bias", (2, 6)))  # a list of layers, each of which has two experts
    plan = sl.make_plan(layers, mesh, sl.experts())
    assert all(placement.compute.spec == sl.P("expert") for placement in plan.placements)


def test_slices_of_experts_are_no_sequences():
    chain = SLICES, sl.sequence("model", "megatron"), sl.experts(), sl.zero(0)
    mesh = sl.abstract_mesh(model=2, expert=2, data=2)
    with pytest.raises(IllegalComposition, match=r"cuts sequences:\n  - 0/experts/down[\s\S]*Deal experts out"):
        sl.make_plan(PARAMS, mesh, sl.chain(*chain))


@pytest.mark.parametrize("words", REFUSED)
def test_refusals(words):
    make, mesh = REFUSED[words]
    with pytest.raises(ShardlibError, match=words):
        sl.make_plan(PARAMS, sl.abstract_mesh(**mesh), make())


def test_an_optimizer_that_owns_the_axis_is_refused():
    tx = sl.optim.onebit_adam(1e-3, 2, axis="expert")
    with pytest.raises(IllegalComposition, match=r"dealt out over it\. Deal experts out over"):
        sl.make_plan(PARAMS, sl.abstract_mesh(expert=2), sl.experts(), optimizer=tx)


def test_layers_that_do_not_fit_the_plan():
    def run(mesh, chain, router):
        state, step = sl.make_train_step(counted(router), sl.shard(PARAMS[0], mesh, chain), sl.optim.sgd(0.1))
        step(state, BATCHES[0])

    with pytest.raises(ValueError, match=r"deals out some leaves of a layer and not others"):
        sl.simulate(run, sl.experts(rules="experts/up"), TOP_2, mesh={"expert": 2})
    with pytest.raises(ValueError, match=r"this router has none. Give it a shardlib.nn.routers.Capacity"):
        sl.simulate(run, sl.experts(padded=True), TOP_2, mesh={"expert": 2})
    slices = sl.tensor_slicing({"experts/gate": "column", "experts/up": "column"})
    with pytest.raises(
        HandleError, match=r"is used as \(experts, out, in\) weight and sliced as one layer's; .*experts=True"
    ):
        sl.simulate(run, slices, TOP_2, mesh={"model": 2})


def all_of_them(params, batch):
    """A dense mixture: each token goes to every expert."""
    hidden = torch.einsum("bsw,ehw->bseh", batch["x"], params["experts"]["up"]).relu()
    return torch.einsum("bseh,ewh->bsw", hidden, params["experts"]["down"]).square().mean()


def as_a_weight(params, batch):
    """The rows of a leaf that is no layer of experts, which a rule happens to match."""
    return torch.nn.functional.linear(batch["x"], params["experts"]["w"]).square().mean()


def as_rows(params, batch):
    """A leaf as what a layer computes on."""
    return torch.nn.functional.linear(params["experts"]["w"], batch["x"][0]).square().mean()


def by_gradients(params, batch):
    """The norm of a gradient, of which each rank has a part."""
    y, _ = sl.nn.moe(params, batch["x"], sl.nn.MoEConfig(TOP_2))
    (grad,) = torch.autograd.grad(y.sum(), params["experts"]["up"], create_graph=True)
    return grad.square().sum()


def of_this_ranks_number(params, batch):
    x = batch["x"].flatten(0, 1)
    weights, experts = (x @ params["router"]["weight"].T).softmax(-1).topk(2)
    routing = routers.Routing.of(experts, weights, len(params["experts"]["up"]))
    return sl.nn.run_experts(params["experts"], x, routing, sl.nn.MoEConfig(TOP_2).compute).square().mean()


def of_this_ranks_experts(params, batch):
    """Every choice is among the experts of this rank's number."""
    x = batch["x"].flatten(0, 1)
    routing = routers.Routing.of(torch.zeros(len(x), 1, dtype=torch.int64), torch.ones(len(x), 1), 2)
    return sl.nn.run_experts(params["experts"], x, routing, sl.nn.MoEConfig(TOP_2).compute).square().mean()


ROWS_OF = {"experts": {"w": normal(EXPERTS, WIDTH)}}
MISUSED = [
    (all_of_them, PARAMS[0], sl.experts(), HandleError, "experts/up is used outside of a layer of experts"),
    (as_a_weight, ROWS_OF, sl.experts(), HandleError, "experts/w is .*Stack experts along dimension 0"),
    (as_rows, ROWS_OF, sl.experts(), HandleError, "experts/w is used outside"),
    (by_gradients, PARAMS[0], sl.experts(), HandleError, "experts/up is used outside"),
    (model(TOP_2), PARAMS[:1], sl.experts(rules="*"), HandleError, "0/w is used outside"),
    (counted(TOP_2), PARAMS[0], sl.experts(rules=["experts/*", "router/*"]), HandleError, "router/weight is used"),
    (of_this_ranks_number, PARAMS[0], sl.experts(), RuntimeError, "a choice is not among −1 … 1, of 2 experts"),
    (of_this_ranks_experts, PARAMS[0], sl.experts(), ValueError, "the leaves hold 2 of them, on each of 2 ranks"),
]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("loss_fn", "params", "dealt", "error", "words"),
    MISUSED,
    ids=["einsum", "weight", "input", "gradient", "all leaves", "router", "number", "own experts"],
)
def test_experts_that_are_dealt_out_are_for_layers_of_experts(loss_fn, params, dealt, error, words, stage):
    def run(mesh):
        sharded = sl.shard(params, mesh, sl.chain(dealt, sl.zero(stage, axis="expert")))
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(0.1))
        step(state, {name: x.chunk(2)[mesh.rank] for name, x in BATCHES[0].items()})

    with pytest.raises(error, match=words):
        sl.simulate(run, mesh={"expert": 2})


def test_an_experts_function_uses_its_leaves_as_it_likes():
    """On any number of ranks."""

    def expert(params, rows, product):
        return product(product(rows, 2 * params["up"]).relu(), params["down"] + params["down"].mean(-1, keepdim=True))

    def loss_fn(params, batch):
        y, _ = sl.block(lambda p, x: sl.nn.moe(p, x, sl.nn.MoEConfig(TOP_2, expert=expert)))(params, batch["x"])
        return y.square().sum() / batch["x"].numel()

    def run(mesh, *chain):
        return training.train(mesh, loss_fn, PARAMS[0], BATCHES, sl.chain(*chain), sl.optim.sgd(0.1))

    alone = sl.simulate(run, sl.zero(0), mesh={"data": 1})[0]
    for chain in ((sl.zero(0, axis="expert"),), (sl.zero(3, axis="expert"), sl.remat())):
        found = sl.simulate(run, sl.experts(), *chain, mesh={"expert": 2})[0]
        assert found[:2] == (pytest.approx(alone[0], rel=1e-10), pytest.approx(alone[1], rel=1e-10))
        assert_close(found[2], alone[2], 1e-10)
