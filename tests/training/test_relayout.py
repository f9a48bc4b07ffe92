"""Experts that change ranks between steps: training goes on to the bit, whatever else splits the state."""

import pytest
import torch
from helpers.measure import count_payload
from helpers.models import share
from helpers.trees import assert_close, assert_same

import shardlib as sl
from shardlib.errors import DonatedStateError, IllegalComposition, RankMismatch, TreeError
from shardlib.execute.batches import batch_index
from shardlib.nn import routers

WIDTH, HIDDEN, EXPERTS, ROWS = 4, 6, 4, 24
BOTH = ("data", "expert")
SEATS = {"0/moe": [2, 0, 3, 1], "1": [3, 1, 2, 0]}
BACK = {"0/moe": [1, 0, 3, 2]}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 2


def layer(seed, biases, hidden=HIDDEN):
    names = {"gate": (hidden, WIDTH), "up": (hidden, WIDTH), "down": (WIDTH, hidden)}
    if biases:
        names = {"up": (hidden, WIDTH), "up_bias": (hidden,), "down": (WIDTH, hidden), "down_bias": (WIDTH,)}
    return {
        "router": {"weight": normal(EXPERTS, WIDTH, seed=seed), "seats": torch.arange(EXPERTS)},
        "experts": {name: normal(EXPERTS, *shape, seed=seed + n) for n, (name, shape) in enumerate(names.items(), 1)},
    }


PARAMS = [{"moe": layer(10, False)}, layer(20, True)]
BATCHES = [{"x": normal(ROWS, 2, WIDTH, seed=60 + step)} for step in range(4)]


def loss_fn(params, batch):
    """The second layer drops assignments."""
    y, first = sl.nn.moe(params[0]["moe"], batch["x"], sl.nn.MoEConfig(routers.top_k(2)))
    dropping = routers.top_k(2, capacity=routers.Capacity(0.8, minimum=1))
    z, second = sl.nn.moe(params[1], batch["x"] + y, sl.nn.MoEConfig(dropping, "gelu"))
    loss = (y + z).square().mean() + 0.1 * first.aux["load"] + 0.1 * second.aux["z"]
    return loss, {"counts": first.counts}


def trained(mesh, transforms, tx, relayouts, params=PARAMS):
    """Losses, counts, norms, and whole parameters with the experts in their own rows; before step n the seats are changed to
    ``relayouts[n]``."""
    state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, sl.chain(*transforms)), tx)
    plan, seen = state.params.plan, []
    for n, batch in enumerate(BATCHES):
        if n in relayouts:
            state = sl.relayout(state, relayouts[n])
        state, metrics = step(state, share(batch, batch_index(plan, mesh), plan.batch_ranks))
        seen.append((metrics["loss"].item(), metrics["grad_norm"].item(), metrics["aux"]["counts"].tolist()))
    state = sl.relayout(state)
    return seen, sl.unshard(state.params)


def assert_goes_on(mesh, transforms, tx=None, run=sl.simulate, params=PARAMS):
    tx = tx or sl.optim.adamw(1e-2)
    found = run(
        lambda m: (trained(m, transforms, tx, {1: SEATS, 3: BACK}, params), trained(m, transforms, tx, {}, params)),
        mesh=mesh,
    )
    for (moved, moved_params), (stayed, params) in found:
        assert [(loss, counts) for loss, _, counts in moved] == [(loss, counts) for loss, _, counts in stayed]
        assert [norm for _, norm, _ in moved] == pytest.approx([norm for _, norm, _ in stayed], rel=1e-6)
        assert_close(moved_params, params, 0)


STAGES = [
    (stage, mesh)
    for stage in (0, 1, 2, 3)
    for mesh in ({"expert": 2}, {"data": 2, "expert": 2}, {"expert": 4, "data": 2})
]


@pytest.mark.parametrize(("stage", "mesh"), STAGES)
def test_stages(stage, mesh):
    zero = sl.zero(stage, axis=BOTH if "data" in mesh else "expert")
    assert_goes_on(mesh, (sl.experts(), zero))


SLICES = sl.tensor_slicing(
    {
        "*/experts/gate": sl.column(experts=True),
        "*/experts/up*": sl.column(experts=True),
        "*/experts/down*": sl.row(experts=True),
    }
)
COMPOSED = {
    "two hops": ({"node": 2, "local": 2}, (sl.experts(("node", "local")), sl.zero(1, axis=("node", "local")))),
    "the batch's own axis": ({"data": 4}, (sl.experts("data"), sl.zero(3))),
    "whole experts, split by rows": ({"data": 4}, (sl.zero(3),)),
    "whole experts, split within rows": ({"data": 8}, (sl.zero(3),)),
    "split within rows": ({"expert": 2, "data": 4}, (sl.experts(), sl.zero(2, axis=BOTH))),
    "padded": ({"data": 3, "expert": 2}, (sl.experts(), sl.zero(3, axis="data"))),
    "hybrid": ({"node": 2, "expert": 2}, (sl.experts(), sl.zero(3, axis="expert", replicate="node"))),
    "slices": ({"model": 2, "expert": 2, "data": 2}, (sl.experts(), SLICES, sl.zero(3, axis=BOTH))),
    "masters": ({"data": 2, "expert": 2}, (sl.experts(), sl.zero(2, axis=BOTH), sl.precision("bf16"))),
    "gradients that wait": ({"data": 2, "expert": 2}, (sl.experts(), sl.zero(2, axis=BOTH), sl.offload(delay=True))),
    "recomputed": ({"data": 2, "expert": 2}, (sl.experts(), sl.zero(3, axis=BOTH), sl.remat())),
}


@pytest.mark.parametrize("case", COMPOSED)
def test_beside_other_transforms(case):
    mesh, transforms = COMPOSED[case]
    assert_goes_on(mesh, transforms)


def test_compressed_exchanges_keep_their_residuals():
    """What a rank's gradient of an expert left out goes with the expert. A block of integers has one expert's elements."""
    assert_goes_on({"data": 2, "expert": 2}, (sl.experts(), sl.zero(1, axis=BOTH), sl.quantize(gradients="int8")))


def test_in_real_processes(pool):
    assert_goes_on({"data": 2, "expert": 2}, (sl.experts(), sl.zero(3, axis=BOTH)), run=pool.run)


def in_blocks(kind, last):
    def run(params, carry, batch):
        y, _ = sl.nn.moe(params, batch["x"] if carry is None else carry, sl.nn.MoEConfig(routers.top_k(2), kind))
        return y.square().mean() if last else y

    return run


@pytest.mark.parametrize("stage", [0, 2])
def test_stages_of_a_pipeline(stage):
    """Each stage has a layer; ranks of both are given the seats of both."""
    loss_fn = sl.sequential([in_blocks("swiglu", False), in_blocks("gelu", True)])
    params = [layer(10, False), layer(20, True)]

    def run(mesh, relayouts):
        chain = sl.chain(sl.experts(), sl.zero(stage, axis="expert"), sl.pipeline(microbatches=2, axis="pipe"))
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, chain), sl.optim.adamw(1e-2))
        for n, batch in enumerate(BATCHES):
            state = sl.relayout(state, relayouts[n]) if n in relayouts else state
            state, _ = step(state, share(batch, mesh.coords["expert"], 2))
        return sl.unshard(sl.relayout(state).params)

    seats = {1: {"0": [2, 0, 3, 1], "1": [3, 1, 2, 0]}, 2: {"1": [0, 1, 3, 2]}}
    for moved, stayed in sl.simulate(lambda m: (run(m, seats), run(m, {})), mesh={"pipe": 2, "expert": 2}):
        assert_close(moved, stayed, 0)


def start(mesh, transforms, tx=None, params=PARAMS, **options):
    return sl.make_train_step(
        loss_fn, sl.shard(params, mesh, sl.chain(*transforms)), tx or sl.optim.adamw(1e-2), **options
    )


def mine(state, batch):
    plan = state.params.plan
    return share(batch, batch_index(plan, state.params.mesh), plan.batch_ranks)


PAYLOADS = {
    "one axis": ({"expert": 2}, (sl.experts(), sl.zero(1, axis="expert"))),
    "two axes": ({"expert": 2, "data": 4}, (sl.experts(), sl.zero(2, axis=BOTH))),
    "residuals": ({"expert": 2, "data": 2}, (sl.experts(), sl.zero(1, axis=BOTH), sl.quantize(gradients="int8"))),
    "masters": ({"data": 2, "expert": 2}, (sl.experts(), sl.zero(3, axis=BOTH), sl.precision("bf16"))),
}


@pytest.mark.parametrize("case", PAYLOADS)
def test_the_payload_is_what_leaves_a_rank(case):
    mesh, transforms = PAYLOADS[case]

    def run(mesh):
        state, _ = start(mesh, transforms)
        found = []
        for seats in (SEATS, BACK, BACK):
            predicted, sent = sl.checkpoint.relayout_payload(state, seats), count_payload(mesh)
            state = sl.relayout(state, seats)
            found.append((predicted, sent()))
        return found

    for first, second, third in sl.simulate(run, mesh=mesh):
        assert first[0] == first[1] and any(first[0].values())
        assert second[0] == second[1] and not any(third[0].values()) and not any(third[1].values())


def test_the_payload_is_the_moved_experts():
    """Two experts of a rank's two go to the other rank: three matrices, and two moments of each, in fp32."""

    def run(mesh):
        state, _ = start(mesh, (sl.experts(),))
        return sl.checkpoint.relayout_payload(state, {"0/moe": [2, 3, 0, 1]})

    assert sl.simulate(run, mesh={"expert": 2}) == [{"expert": 2 * 3 * 3 * WIDTH * HIDDEN * 4}] * 2


def test_counts_move_experts_to_equal_loads():
    def run(mesh):
        state, _ = start(mesh, (sl.experts(), sl.zero(2, axis="expert")))
        state = sl.relayout(state, counts={"0/moe": torch.tensor([5, 4, 1, 0]), "1": [0.5, 0.0, 0.5, 0.0]})
        return sl.unshard(state.params)

    for params in sl.simulate(run, mesh={"expert": 2}):
        assert params[0]["moe"]["router"]["seats"].tolist() == [0, 3, 2, 1]
        assert params[0]["moe"]["experts"]["up"].equal(PARAMS[0]["moe"]["experts"]["up"][[0, 3, 2, 1]])
        first, second = sorted(params[1]["router"]["seats"][[0, 2]].tolist())
        assert first < 2 <= second


@pytest.mark.parametrize("mesh", [{"data": 1}, {"expert": 4}, {"data": 2, "expert": 2}])
def test_a_checkpoint_with_seats_goes_on_anywhere(mesh, tmp_path):
    def save(mesh):
        state, step = start(mesh, (sl.experts(), sl.zero(2, axis=BOTH)))
        state, _ = step(state, mine(state, BATCHES[0]))
        sl.checkpoint.save(tmp_path / "stayed", state)
        sl.checkpoint.save(tmp_path / "moved", sl.relayout(state, SEATS))

    def goes_on(mesh):
        found = []
        for name in ("stayed", "moved"):
            zero = sl.zero(3, axis=BOTH if "data" in mesh.shape else "expert")
            state, step = start(mesh, (sl.experts(), zero) if "expert" in mesh.shape else (sl.zero(0),))
            state = sl.checkpoint.restore(tmp_path / name, state)
            state, metrics = step(state, mine(state, BATCHES[1]))
            found.append((metrics["loss"].item(), sl.unshard(sl.relayout(state).params)))
        return found

    sl.simulate(save, mesh={"data": 2, "expert": 2})
    for (loss, params), (same, moved) in sl.simulate(goes_on, mesh=mesh):
        assert loss == same
        assert_close(moved, params, 0)


def test_averages_go_along():
    average = sl.optim.ema(0.5)

    def run(mesh, seats):
        state, step = start(mesh, (sl.experts(), sl.zero(2, axis=BOTH)))
        kept = average.init(state.params)
        for n, batch in enumerate(BATCHES):
            if n == 2:
                state = sl.relayout(state, seats, also={"ema": kept})
            state, _ = step(state, mine(state, batch))
            _, kept = average.update(state.params, kept)
        state = sl.relayout(state, also={"ema": kept})
        return sl.unshard(sl.replace_params(state, average.update(state.params, kept)[0]).params)

    for moved, stayed in sl.simulate(lambda m: (run(m, SEATS), run(m, {})), mesh={"data": 2, "expert": 2}):
        assert_close(moved, stayed, 0)


def test_the_old_state_stays_or_is_donated():
    def run(mesh):
        state, step = start(mesh, (sl.experts(), sl.zero(1, axis="expert")))
        before = sl.unshard(state.params)
        other = sl.relayout(state, SEATS, donate=False)
        assert_same(sl.unshard(state.params), before)
        state = sl.relayout(state, SEATS)
        assert_same(sl.unshard(state.params), sl.unshard(other.params))
        last = sl.relayout(state, BACK)
        with pytest.raises(DonatedStateError, match="relayout has taken over its memory"):
            step(state, mine(last, BATCHES[0]))

    sl.simulate(run, mesh={"expert": 2})


def asking(*args, **options):
    return lambda state: sl.relayout(state, *args, **options)


REFUSED = {
    "no permutation": (
        ValueError,
        r"'1': seats \[0, 1, 2, 2\] are no permutation",
        asking({"1": [0, 1, 2, 2]}),
    ),
    "another number": (
        ValueError,
        r"'1': counts have shape \(3,\), and the layer has 4",
        asking(counts={"1": [1, 2, 3]}),
    ),
    "both": (ValueError, "not both", asking(SEATS, counts={})),
    "no such layer": (TreeError, "'2'; there are '0/moe', '1'", asking({"2": [0, 1, 2, 3]})),
    "negative counts": (ValueError, "0 or more", asking(counts={"1": [1, 2, 3, -4]})),
    "ranks that differ": (
        RankMismatch,
        "seats differ",
        lambda state: sl.relayout(state, {"1": [0, 1, 2, 3] if state.params.mesh.rank else [1, 0, 2, 3]}),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    error, message, call = REFUSED[case]

    def run(mesh):
        state, step = start(mesh, (sl.experts(),))
        with pytest.raises(error, match=message):
            call(state)
        step(state, mine(state, BATCHES[0]))  # the state is as it was

    sl.simulate(run, mesh={"expert": 2})


UNMOVABLE = {
    "in few bits": (sl.optim.adamw8bit(1e-2), 1024, "mu/.*experts/up"),
    "factors": (sl.optim.adafactor(1e-2, min_dim_size_to_factor=2), HIDDEN, "factors/0/moe/experts/gate"),
}


@pytest.mark.parametrize("case", UNMOVABLE)
def test_states_that_do_not_move_by_rows(case):
    tx, hidden, named = UNMOVABLE[case]
    params = [{"moe": layer(10, False, hidden)}, layer(20, True)]

    def run(mesh):
        state, step = start(mesh, (sl.experts(),), tx, params)
        with pytest.raises(IllegalComposition, match=named):
            sl.relayout(state, SEATS)
        step(state, mine(state, BATCHES[0]))

    sl.simulate(run, mesh={"expert": 2})


def test_parameters_without_seats():
    state, _ = sl.make_train_step(lambda params, x: params["w"].sum(), {"w": torch.ones(2)}, sl.optim.sgd(0.1))
    with pytest.raises(TreeError, match=r"none has. Give each layer params\[\"router\"\]"):
        sl.relayout(state)
