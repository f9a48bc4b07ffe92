"""Hot experts on two ranks at once: training is the same to the bit, and what it costs is known."""

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
from shardlib.collectives.primitives import all_gather_object
from shardlib.collectives.tokens.fetch import TokenFetch
from shardlib.errors import IllegalComposition
from shardlib.execute.batches import batch_index
from shardlib.nn import routers
from shardlib.nn.moe.placement import ExpertPlacement
from shardlib.tree import tree_map

WIDTH, HIDDEN, EXPERTS, ROWS = 4, 6, 4, 24
NONE = [-1] * EXPERTS
BOTH = ("data", "expert")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 2


def layer(seed, biases):
    names = {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    if biases:
        names = {"up": (HIDDEN, WIDTH), "up_bias": (HIDDEN,), "down": (WIDTH, HIDDEN), "down_bias": (WIDTH,)}
    places = {"seats": torch.arange(EXPERTS), "replicas": torch.tensor(NONE)}
    return {
        "router": {"weight": normal(EXPERTS, WIDTH, seed=seed), **places},
        "experts": {name: normal(EXPERTS, *shape, seed=seed + n) for n, (name, shape) in enumerate(names.items(), 1)},
    }


PARAMS = [{"w": normal(WIDTH, WIDTH, seed=50), **layer(10 * n, n == 2)} for n in (1, 2)]
BATCHES = [{"x": normal(ROWS, 2, WIDTH, seed=60 + step)} for step in range(4)]
# Before a step: seats and replicas of layers.
REPLICAS = {
    1: {"replicas": {"0": [1, -1, 0, -1], "1": [-1, 0, -1, 1]}},
    2: {"seats": {"0": [2, 0, 3, 1]}, "replicas": {"1": [0, 1, -1, -1]}},
    3: {"replicas": {"0": NONE}},
}


@sl.block
def first(params, x):
    heads = (x @ params["w"]).unflatten(-1, (2, 2)).transpose(1, 2)
    mixed = sl.nn.attention(heads, heads, heads).transpose(1, 2).flatten(2)
    return sl.nn.moe(params, mixed, sl.nn.MoEConfig(routers.top_k(2)))[0]


@sl.block
def second(params, x):
    """Drops assignments."""
    router = routers.top_k(2, capacity=routers.Capacity(0.8, minimum=1))
    y, routing = sl.nn.moe(params, x @ params["w"], sl.nn.MoEConfig(router, "gelu"))
    return y, routing.aux["z"]


def loss_fn(params, batch):
    x = sl.nn.shard_sequence(batch["x"])
    x = x + first(params[0], x)
    y, z = second(params[1], x)
    return sl.nn.sum_sequence((x + y).square().sum() / batch["x"].numel() + z * x.shape[1] / batch["x"].shape[1])


def trained(mesh, transforms, relayouts, loss_fn=loss_fn, params=PARAMS):
    state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, sl.chain(*transforms)), sl.optim.adamw(1e-2))
    plan, losses = state.params.plan, []
    for n, batch in enumerate(BATCHES):
        if n in relayouts:
            state = sl.relayout(state, **relayouts[n])
        state, metrics = step(state, share(batch, batch_index(plan, mesh), plan.batch_ranks))
        losses.append(metrics["loss"].item())
    return losses, sl.unshard(sl.relayout(state).params)


def assert_goes_on(mesh, transforms, run=sl.simulate, **how):
    found = run(
        lambda m: (trained(m, transforms, REPLICAS, **how), trained(m, transforms, {}, **how)),
        mesh=mesh,
    )
    for (losses, params), (alone, wanted) in found:
        assert losses == alone
        assert_close(params, wanted, 0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", [{"expert": 2}, {"data": 2, "expert": 2}, {"expert": 4, "data": 2}])
def test_stages(mesh, stage):
    zero = sl.zero(stage, axis=BOTH if "data" in mesh else "expert")
    assert_goes_on(mesh, (sl.experts(spare=1), zero))


SLICES = sl.tensor_slicing(
    {
        "*/experts/gate": sl.column(experts=True),
        "*/experts/up*": sl.column(experts=True),
        "*/experts/down*": sl.row(experts=True),
    }
)
SPLIT = sl.zero(2, axis=BOTH)
TWO = {"data": 2, "expert": 2}
COMPOSED = {
    "two hops": ({"node": 2, "local": 2}, (sl.experts(("node", "local"), spare=1), sl.zero(3, axis=("node", "local")))),
    "more slots than experts": ({"expert": 4}, (sl.experts(spare=2), sl.zero(1, axis="expert"))),
    "slices": ({"model": 2, **TWO}, (sl.experts(spare=1), SLICES, sl.zero(3, axis=BOTH), sl.remat())),
    "encoded": (TWO, (sl.experts(spare=1, codec="int8", back_codec="fp8"), SPLIT)),
    "masters": (TWO, (sl.experts(spare=1), SPLIT, sl.precision("bf16"))),
    "recomputed": (TWO, (sl.experts(spare=1), sl.zero(3, axis=BOTH), sl.remat())),
    "accumulated": (TWO, (sl.experts(spare=1), SPLIT, sl.accumulate(2, sync="each"))),
    "compressed": (TWO, (sl.experts(spare=1), sl.zero(1, axis=BOTH), sl.quantize(gradients="int8"))),
    "offloaded": (TWO, (sl.experts(spare=1), SPLIT, sl.offload())),
    "sequences in parts": ({"seq": 2, "expert": 2}, (sl.experts(spare=1), sl.sequence("seq"), sl.zero(axis="expert"))),
}


@pytest.mark.parametrize("case", COMPOSED)
def test_beside_other_transforms(case):
    mesh, transforms = COMPOSED[case]
    assert_goes_on(mesh, transforms)


def test_in_real_processes(pool):
    assert_goes_on(TWO, (sl.experts(spare=1), sl.zero(3, axis=BOTH)), run=pool.run)


def in_blocks():
    def start(params, carry, batch):
        return batch["x"] + first(params, batch["x"])

    def end(params, x, batch):
        y, z = second(params, x)
        return (x + y).square().mean() + z

    return sl.sequential([start, end])


@pytest.mark.parametrize("stage", [0, 3])
def test_stages_of_a_pipeline(stage):
    chain = sl.experts(spare=1), sl.zero(stage, axis="expert"), sl.pipeline(microbatches=2, axis="pipe")
    assert_goes_on({"pipe": 2, "expert": 2}, chain, loss_fn=in_blocks())


DOUBLE = [tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, one) for one in PARAMS]


@st.composite
def cases(draw):
    sizes = draw(
        st.sampled_from([{"expert": 2}, {"expert": 4}, {"data": 2, "expert": 2}, {"node": 2, "local": 2, "data": 2}])
    )
    axes = tuple(axis for axis in sizes if axis != "data")
    ranks, spare = 4 if len(axes) == 2 or sizes.get("expert") == 4 else 2, draw(st.integers(1, 2))
    slots = st.lists(st.integers(0, ranks * spare - 1), max_size=EXPERTS, unique=True)
    params = []
    for one in DOUBLE:
        copies = draw(slots)
        copies = draw(st.permutations(copies + [-1] * (EXPERTS - len(copies))))
        params.append({**one, "router": one["router"] | {"replicas": torch.tensor(copies)}})
    chain = [sl.experts(axes, spare=spare), sl.zero(draw(st.integers(0, 3)), axis=tuple(sizes))]
    return sizes, [*chain, *[sl.remat()] * draw(st.booleans())], params


def undropped(params, batch):
    x = batch["x"] + first(params[0], batch["x"])
    y, routing = sl.nn.moe(params[1], x @ params[1]["w"], sl.nn.MoEConfig(routers.switch(), "gelu"))
    return (x + y).square().mean() + routing.aux["z"]


@settings(max_examples=60 if NIGHTLY else 6)
@given(cases())
def test_any_replicas_train_like_one_device(case):
    mesh, transforms, params = case
    batches = [{"x": batch["x"].double()} for batch in BATCHES[:2]]

    def run(mesh, *transforms):
        return training.simulate(mesh, undropped, params, batches, sl.chain(*transforms), sl.optim.sgd(0.1))

    alone, found = run({"data": 1}, sl.zero(0)), run(mesh, *transforms)
    assert found[0] == pytest.approx(alone[0], rel=1e-10) and found[1] == pytest.approx(alone[1], rel=1e-10)
    assert_close(found[2], alone[2], 1e-10)


def rows_of(mesh, replicas):
    """The rows that this rank's experts compute, in a step in which every token goes to expert 0."""
    seen = []

    def expert(params, rows, product):
        seen.append(len(rows))
        return product(product(rows, params["up"]).relu(), params["down"])

    def run(params, batch):
        y, _ = sl.nn.moe(params, batch, sl.nn.MoEConfig(lambda *_: one_for_all(len(batch)), expert))
        return y.square().mean()

    params = {**PARAMS[0], "router": PARAMS[0]["router"] | {"replicas": torch.tensor(replicas)}}
    state, step = sl.make_train_step(run, sl.shard(params, mesh, sl.experts(spare=1)), sl.optim.sgd(0.1))
    step(state, normal(6, WIDTH, seed=mesh.rank))
    return sum(seen)


def one_for_all(tokens):
    return routers.Routing.of(torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1), EXPERTS)


def test_a_hot_experts_rows_are_computed_by_two_ranks():
    assert sl.simulate(rows_of, NONE, mesh={"expert": 4}) == [24, 0, 0, 0]
    assert sl.simulate(rows_of, [2, -1, -1, -1], mesh={"expert": 4}) == [12, 0, 12, 0]


def sent_in_a_step(mesh, axes, spare, seats, replicas):
    """What a rank sends in a step for one layer: counted outside of the library, and by the rows of all ranks."""
    params = {**PARAMS[0], "router": PARAMS[0]["router"] | {"seats": seats, "replicas": replicas}}

    def one_layer(params, batch):
        y, routing = sl.nn.moe(params, batch["x"] @ params["w"], sl.nn.MoEConfig(routers.top_k(2)))
        return y.square().mean(), routing.counts

    chain = sl.experts(axes, spare=spare)
    state, step = sl.make_train_step(one_layer, sl.shard(params, mesh, chain), sl.optim.sgd(0.1))
    sent, exchange = count_payload(mesh), state.params.plan.step.tokens
    _, metrics = step(state, share(BATCHES[0], mesh.rank, mesh.size))
    measured, bare = sent(), sl.make_plan(params, mesh, chain).payload()
    everyone = torch.stack(all_gather_object(mesh, list(axes), metrics["aux"]))
    slots = ExpertPlacement(tuple(seats.tolist()), tuple(replicas.tolist()), mesh.size, spare)
    counts = torch.zeros(mesh.size, slots.number, dtype=torch.int64)
    for rank, row in enumerate(everyone):
        counts[rank, slots.of_rows(rank)] = row
    tokens = exchange.payload(mesh.shape, mesh.coords, counts, WIDTH, torch.float32)
    weights = TokenFetch(axes, slots.owners).payload(mesh.shape, mesh.coords, 3 * WIDTH * HIDDEN * 4)
    predicted = {
        axis: bare[axis] + tokens.forward[axis] + tokens.backward[axis] + sum(way[axis] for way in weights)
        for axis in axes
    }
    return measured, predicted


@pytest.mark.parametrize(
    ("mesh", "spare", "replicas"),
    [
        ({"expert": 2}, 2, [2, -1, 3, 0]),
        ({"expert": 4}, 1, [3, 2, -1, 0]),
        ({"node": 2, "local": 2}, 1, [3, 2, 1, 0]),
        ({"node": 2, "local": 2}, 2, [7, 1, -1, 6]),
    ],
)
def test_the_payload_of_a_step_is_known(mesh, spare, replicas):
    seats = torch.tensor([2, 0, 3, 1])
    for measured, predicted in sl.simulate(
        sent_in_a_step, tuple(mesh), spare, seats, torch.tensor(replicas), mesh=mesh
    ):
        assert measured == predicted


@pytest.mark.parametrize(("mesh", "axis"), [({"expert": 2}, "expert"), ({"node": 2, "local": 2}, ("node", "local"))])
def test_the_plan_has_the_fetched_weights(mesh, axis):
    """Along the first axis, on which the halves of the ranks lie, a rank sends the weights of an expert of each layer, and
    their gradients; and it counts rows by slot. The number of tokens is one that slots, and experts, have equal parts of."""
    batch = {"x": torch.zeros(30, 2, WIDTH)}
    twice, once = (
        sl.make_plan(PARAMS, sl.abstract_mesh(**mesh), sl.experts(axis, spare=spare), loss_fn=undropped, batch=batch)
        for spare in (1, 0)
    )
    weights = sum(leaf[0].numel() for one in PARAMS for leaf in one["experts"].values()) * 4
    ranks = 2 ** len(mesh)
    counted = len(PARAMS) * (2 * EXPERTS + ranks - EXPERTS) * 8 // 2
    more = {name: twice.payload()[name] - once.payload()[name] for name in mesh}
    assert more == dict.fromkeys(mesh, counted) | {next(iter(mesh)): counted + 2 * weights}
    assert twice.live_bytes - once.live_bytes >= weights
    assert "1 spare slot on a rank" in str(twice) and "as if every spare slot had a copy" in str(twice)


def test_replicas_move_nothing_between_steps():
    def run(mesh):
        chain = sl.chain(sl.experts(spare=1), sl.zero(3, axis="expert"))
        state, _ = sl.make_train_step(loss_fn, sl.shard(PARAMS, mesh, chain), sl.optim.adafactor(1e-2))
        copies = {"replicas": {"0": [1, 0, -1, -1]}}
        predicted, sent = sl.checkpoint.relayout_payload(state, **copies), count_payload(mesh)
        state = sl.relayout(state, **copies)
        return predicted, sent(), sl.unshard(state.params)[0]["router"]["replicas"].tolist()

    assert sl.simulate(run, mesh={"expert": 2}) == [({"expert": 0}, {"expert": 0}, [1, 0, -1, -1])] * 2


def test_counts_choose_replicas_for_the_hottest():
    def run(mesh):
        state, _ = sl.make_train_step(
            loss_fn, sl.shard(PARAMS, mesh, sl.chain(sl.experts(spare=1))), sl.optim.adamw(1e-2)
        )
        state = sl.relayout(state, counts={"0": [9, 1, 1, 1], "1": [3, 3, 3, 3]})
        return [one["router"]["replicas"].tolist() for one in sl.unshard(state.params)]

    for first, second in sl.simulate(run, mesh={"expert": 4}):
        assert first[0] >= 0 and second == NONE


@pytest.mark.parametrize("mesh", [{"data": 1}, {"expert": 2}, {"expert": 4}])
def test_a_checkpoint_with_replicas_goes_on_anywhere(mesh, tmp_path):
    def start(mesh, *transforms):
        return sl.make_train_step(loss_fn, sl.shard(PARAMS, mesh, sl.chain(*transforms)), sl.optim.adamw(1e-2))

    def save(mesh):
        state, _ = start(mesh, sl.experts(spare=1), sl.zero(2, axis="expert"))
        sl.checkpoint.save(tmp_path / "plain", state)
        sl.checkpoint.save(tmp_path / "twice", sl.relayout(state, replicas={"0": [3, 2, 1, 0]}))

    def goes_on(mesh):
        found = []
        for name in ("plain", "twice"):
            state, step = start(
                mesh,
                *([sl.experts(spare=1)] if "expert" in mesh.shape else []),
                sl.zero(1, axis="data") if "data" in mesh.shape else sl.zero(1, axis="expert"),
            )
            state = sl.checkpoint.restore(tmp_path / name, state)
            state, metrics = step(state, share(BATCHES[0], mesh.rank, mesh.size))
            found.append((metrics["loss"].item(), sl.unshard(sl.relayout(state).params)))
        return found

    sl.simulate(save, mesh={"expert": 4})
    for (loss, params), (same, twice) in sl.simulate(goes_on, mesh=mesh):
        assert loss == same
        assert_close(twice, params, 0)


REFUSED = {
    "no such slot": (
        {"replicas": {"1": [-1, 2, -1, -1]}},
        r"'1': replicas \[-1, 2, -1, -1\] need other slots: 2 ranks have 1",
    ),
    "one slot twice": ({"replicas": {"0": [0, 0, -1, -1]}}, "a slot has one copy"),
    "counts too": ({"replicas": {"0": NONE}, "counts": {"0": [1, 1, 1, 1]}}, "not both"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    asked, message = REFUSED[case]

    def run(mesh):
        state, _ = sl.make_train_step(loss_fn, sl.shard(PARAMS, mesh, sl.experts(spare=1)), sl.optim.adamw(1e-2))
        with pytest.raises(ValueError, match=message):
            sl.relayout(state, **asked)

    sl.simulate(run, mesh={"expert": 2})


def test_layers_without_slots_have_no_replicas():
    def run(mesh):
        state, _ = sl.make_train_step(loss_fn, sl.shard(PARAMS, mesh, sl.experts()), sl.optim.adamw(1e-2))
        with pytest.raises(ValueError, match=r"need spare slots: 2 ranks have 0 each, .* see sl.experts\(spare=\)"):
            sl.relayout(state, replicas={"0": [0, -1, -1, -1]})

    sl.simulate(run, mesh={"expert": 2})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sl.experts(spare=-1), "use a number of slots"),
        (lambda: sl.experts(spare=1, padded=True), "leave one of the two out"),
        (
            lambda: sl.make_plan(
                sl.nn.init_moe(sl.Key(0), sl.nn.MoEConfig(routers.switch()), experts=2, width=2, hidden=2),
                sl.abstract_mesh(expert=2),
                sl.experts(spare=1),
            ),
            r"no layer has replicas.*init_moe\(seats=True, replicas=True\)",
        ),
    ],
)
def test_slots_that_are_refused(make, message):
    with pytest.raises(IllegalComposition, match=message):
        make()
