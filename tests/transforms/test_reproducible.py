"""`reproducible`: the same bits of state and losses on every mesh."""

import functools
from dataclasses import replace

import optree
import pytest
import torch
from helpers.bits import digest, whole
from helpers.measure import count_payload
from helpers.models import TINY, share, token_batches

import shardlib as sl
from shardlib.errors import IllegalComposition
from shardlib.execute.batches import batch_index
from shardlib.models import gpt

TOTAL, ROWS, STEPS = 8, 24, 3
CONFIG = replace(TINY, dropout=0.2, layers=3)


def adamw():
    return sl.optim.chain(sl.optim.clip_by_global_norm(0.1), sl.optim.adamw(1e-2, weight_decay=0.1))


def lamb():
    return sl.optim.chain(sl.optim.clip_by_global_norm(0.1), sl.optim.lamb(1e-2, weight_decay=0.1))


def adafactor():
    return sl.optim.adafactor(1e-2, min_dim_size_to_factor=4)


def muon():
    matrices = sl.optim.masked(sl.optim.muon(1e-2), "[1-9]/attn/*/weight")
    return sl.optim.chain(sl.optim.clip_by_block_norm(0.3), matrices)


def noisy():
    return sl.optim.stochastic_rounding(sl.optim.chain(sl.optim.skip_nonfinite(sl.optim.lion(1e-2), 3)))


def trained(mesh, transform, make_optimizer, config=CONFIG, steps=STEPS):
    """The SHA-256 of the losses and of the state after some steps."""
    params = sl.shard(gpt.to_blocks(gpt.init(config)), mesh, transform)
    state, step = sl.make_train_step(gpt.make_sequential(config), params, make_optimizer(), rng=7)
    plan, losses = params.plan, []
    for batch in token_batches(steps, ROWS, config):
        state, metrics = step(state, share(batch, batch_index(plan, params.mesh), plan.batch_ranks))
        losses.append((metrics["loss"], metrics["grad_norm"]))
    return digest((losses, whole(state)))


def digest_on(mesh, transform, make_optimizer=adamw, **options):
    found = sl.simulate(lambda m: trained(m, transform, make_optimizer, **options), mesh=mesh)
    assert len(set(found)) == 1, "ranks differ"
    return found[0]


@functools.cache
def one_device(make_optimizer=adamw, total=TOTAL, extra=(), **options):
    return digest_on({"data": 1}, sl.chain(*extra, sl.reproducible(total)), make_optimizer, **options)


def on(data=1, node=1, pipe=1, stage=0, schedule="1f1b", total=TOTAL):
    """``(mesh, transforms)``, without `reproducible`."""
    mesh = {name: size for name, size in (("node", node), ("pipe", pipe), ("data", data)) if size > 1 or name == "data"}
    transforms = [sl.zero(stage, replicate="node" if node > 1 else None)]
    if pipe > 1:
        transforms.append(sl.pipeline(schedule, microbatches=total // (node * data)))
    return mesh, transforms


MESHES = [
    *({"data": data, "stage": stage} for data in (1, 2, 4, 8) for stage in range(4)),
    *({"node": 2, "data": data, "stage": stage} for data in (2, 4) for stage in range(4)),
    *({"pipe": 2, "data": data, "stage": stage} for data in (1, 2) for stage in range(4)),
    {"pipe": 3, "data": 2, "stage": 2, "schedule": "gpipe"},
    {"pipe": 2, "data": 2, "stage": 3, "schedule": "interleaved-1f1b"},
    {"pipe": 3, "data": 2, "stage": 2, "schedule": "zb-h1"},
    {"pipe": 2, "data": 2, "stage": 3, "schedule": "zb-h1"},
    {"pipe": 2, "data": 1, "stage": 0, "schedule": "zb-v"},
    {"pipe": 2, "node": 2, "data": 2, "stage": 1},
]


@pytest.mark.parametrize("where", MESHES, ids=str)
def test_the_bits_of_one_device(where):
    mesh, transforms = on(**where)
    assert digest_on(mesh, sl.chain(*transforms, sl.reproducible(TOTAL))) == one_device()


@pytest.mark.parametrize("where", [{"data": 2}, {"data": 4, "stage": 2}, {"node": 2, "data": 4}], ids=str)
def test_the_bits_differ_without(where):
    mesh, transforms = on(**where)
    transforms.append(sl.accumulate(TOTAL // (mesh["data"] * mesh.get("node", 1))))
    plain = digest_on(mesh, sl.chain(*transforms))
    # (On axes of two ranks with two micro-batches each, every sum is a tree.)
    assert plain not in (digest_on({"data": 1}, sl.accumulate(TOTAL)), one_device())


PRECISION = (sl.precision("bf16", keep="*/ln*/*"),)
SOME = [{"data": 2, "stage": 0}, {"data": 4, "stage": 3}, {"node": 2, "data": 2, "stage": 2}, {"pipe": 2, "data": 2}]


@pytest.mark.parametrize("where", SOME, ids=str)
@pytest.mark.parametrize("make_optimizer", [lamb, adafactor, muon, noisy])
def test_optimizers_that_sum_over_leaves(make_optimizer, where):
    mesh, transforms = on(**where)
    assert digest_on(mesh, sl.chain(*transforms, sl.reproducible(TOTAL)), make_optimizer) == one_device(make_optimizer)


@pytest.mark.parametrize("where", SOME, ids=str)
def test_half_precision_and_recomputed_blocks(where):
    mesh, transforms = on(**where)
    transforms += [*PRECISION, sl.remat("full")]
    assert digest_on(mesh, sl.chain(*transforms, sl.reproducible(TOTAL))) == one_device(extra=PRECISION)


@pytest.mark.parametrize("extra", [(), PRECISION], ids=["fp32", "bf16"])
@pytest.mark.parametrize("where", SOME[:3], ids=str)
def test_tied_leaves_used_by_two_units(where, extra):
    mesh, transforms = on(**where)
    tied = replace(CONFIG, tie=True)
    assert digest_on(mesh, sl.chain(*transforms, *extra, sl.reproducible(TOTAL)), config=tied) == one_device(
        extra=extra, config=tied
    )


DIVISORS = [
    *(
        {"data": data, "stage": stage}
        for data, stage in ((2, 0), (3, 2), (4, 0), (4, 1), (4, 2), (4, 3), (6, 1), (12, 3))
    ),
    # A rank of node and data=2 has 3 micro-batches, of data=3 one; both send two nodes of the tree over node.
    *({"node": 2, "data": 2, "stage": stage} for stage in range(4)),
    *({"node": 4, "data": 3, "stage": stage} for stage in (0, 2, 3)),
    {"node": 3, "data": 2, "stage": 3},
    {"pipe": 2, "data": 2, "stage": 2},
    {"pipe": 2, "node": 2, "data": 2, "stage": 0, "schedule": "gpipe"},
]


@pytest.mark.parametrize("where", DIVISORS, ids=str)
def test_any_number_of_ranks_that_divides_the_micro_batches(where):
    mesh, transforms = on(**where, total=12)
    assert digest_on(mesh, sl.chain(*transforms, sl.reproducible(12))) == one_device(total=12)


@pytest.mark.parametrize("where", [{"data": 4, "stage": 3}, {"node": 4, "data": 3, "stage": 1}], ids=str)
def test_half_precision_on_any_number_of_ranks(where):
    mesh, transforms = on(**where, total=12)
    transforms += PRECISION
    assert digest_on(mesh, sl.chain(*transforms, sl.reproducible(12)), lamb) == one_device(lamb, 12, PRECISION)


def test_a_run_that_loses_and_gains_ranks_has_the_bits_of_one_device(tmp_path):
    def run(mesh, transform, steps, folder):
        params = sl.shard(gpt.to_blocks(gpt.init(CONFIG)), mesh, transform)
        state, step = sl.make_train_step(gpt.make_sequential(CONFIG), params, adamw(), rng=7)
        if steps.start:
            state = sl.checkpoint.restore(folder, state)
        for batch in token_batches(steps.stop, ROWS)[steps.start :]:
            state, _ = step(state, share(batch, batch_index(params.plan, params.mesh), params.plan.batch_ranks))
        sl.checkpoint.save(folder, state)
        return digest(whole(state))

    wanted = sl.simulate(run, sl.chain(sl.zero(), sl.reproducible(12)), range(4), tmp_path / "one", mesh={"data": 1})
    for start, where in enumerate(
        ({"data": 4, "stage": 2}, {"data": 3, "stage": 3}, {"data": 2}, {"node": 2, "data": 3})
    ):
        mesh, transforms = on(**where, total=12)
        found = sl.simulate(
            run, sl.chain(*transforms, sl.reproducible(12)), range(start, start + 1), tmp_path, mesh=mesh
        )
    assert set(found) == set(wanted)


@pytest.mark.parametrize(("stage", "total"), [(0, TOTAL), (2, TOTAL), (3, TOTAL), (0, 12), (3, 12)])
def test_real_processes_give_the_bits_of_one_device(pool, stage, total):
    transform = sl.chain(sl.zero(stage, replicate="node"), sl.reproducible(total))
    found = pool.run(trained, transform, adamw, mesh={"node": 2, "data": 2})
    assert set(found) == {one_device(total=total)}


class Reporting(torch.autograd.Function):
    """The product of a weight and rows, which keeps the gradient that it gives the weight."""

    @staticmethod
    def forward(ctx, w, x, kept):
        ctx.x, ctx.kept = x, kept
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        ctx.kept.append(ctx.x.mT @ grad)
        return ctx.kept[-1], None, None


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_a_user_holds_are_not_added_to(ranks):
    def run(mesh):
        kept = []
        params = sl.shard({"w": torch.ones(3, 3)}, mesh, sl.chain(sl.zero(), sl.reproducible(2 * ranks)))
        state, step = sl.make_train_step(lambda p, x: Reporting.apply(p["w"], x, kept).sum(), params, sl.optim.sgd(0.1))
        step(state, torch.ones(2, 3))
        return [grad.tolist() for grad in kept]

    (first, second), *_ = sl.simulate(run, mesh={"data": ranks})
    assert first == second


def weighted(params, batch, rng):
    """Losses whose weights differ, with means in aux: their sums round."""
    x = sl.dropout(batch["x"] @ params["w"], 0.3, rng)
    return sl.Mean((x.square().sum(1) * batch["weight"]).sum(), batch["weight"].sum()), {
        "mean": sl.Mean(x.sum(), batch["weight"].sum() / 3)
    }


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rows_of_any_width(ranks):
    """Of 7 numbers, so that those of most micro-batches begin at no multiple of 16 bytes of the batch."""
    x = torch.randn(16, 7, generator=torch.Generator().manual_seed(0))

    def run(mesh):
        params = sl.shard({"w": torch.ones(5, 7)}, mesh, sl.chain(sl.zero(), sl.reproducible(8)))
        state, step = sl.make_train_step(
            lambda p, x: (x @ p["w"].t()).tanh().square().mean(), params, sl.optim.sgd(1.0)
        )
        for _ in range(3):
            state, metrics = step(state, x.chunk(mesh.size)[mesh.rank].clone())
        return digest((metrics["loss"], whole(state)))

    assert {*sl.simulate(run, mesh={"data": ranks})} == {*sl.simulate(run, mesh={"data": 1})}


@pytest.mark.parametrize("where", SOME[:3], ids=str)
def test_weighted_losses_and_aux(where):
    def run(mesh):
        params = sl.shard({"w": torch.ones(5, 3)}, mesh, sl.chain(*transforms, sl.reproducible(TOTAL)))
        state, step = sl.make_train_step(weighted, params, sl.optim.sgd(0.1, momentum=0.9))
        found = []
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            batch = {"x": torch.randn(ROWS, 5, generator=generator), "weight": torch.rand(ROWS, generator=generator)}
            state, metrics = step(state, share(batch, batch_index(params.plan, params.mesh), params.plan.batch_ranks))
            found.append((metrics["loss"], metrics["aux"]["mean"], metrics["grad_norm"]))
        return digest((found, whole(state)))

    transforms = [sl.zero()]
    wanted = sl.simulate(run, mesh={"data": 1})
    mesh, transforms = on(**where)
    assert set(sl.simulate(run, mesh=mesh)) == set(wanted)


@pytest.mark.parametrize(
    ("where", "total"),
    [*((where, TOTAL) for where in SOME), *((DIVISORS[index], 12) for index in (2, 4, 5, 8, 11, 13))],
    ids=str,
)
def test_bytes_sent_are_the_plans(where, total):
    config = replace(CONFIG, dropout=0.0)

    def run(mesh):
        params = sl.shard(gpt.to_blocks(gpt.init(config)), mesh, transform)
        mesh, plan = params.mesh, params.plan
        mine = share(token_batches(1, ROWS)[0], batch_index(plan, mesh), plan.batch_ranks)
        loss_fn = gpt.make_sequential(config)
        state, step = sl.make_train_step(loss_fn, params, adamw())
        state, _ = step(state, mine)
        sent = count_payload(mesh, scalars=1000)
        step(state, mine)
        return sent(), mesh.coords, mine

    mesh, transforms = on(**where, total=total)
    transform = sl.chain(*transforms, sl.reproducible(total))
    ranks = sl.simulate(run, mesh=mesh)
    params, loss_fn = gpt.to_blocks(gpt.init(config)), gpt.make_sequential(config)
    plan = sl.make_plan(
        params, sl.abstract_mesh(**mesh), transform, loss_fn=loss_fn, batch=ranks[0][2], optimizer=adamw()
    )
    for sent, coords, _ in ranks:
        assert sent == plan.at(coords).payload()


def test_partial_sums_are_planned():
    params, mesh = {"w": torch.ones(64, 64)}, sl.abstract_mesh(data=2)
    held = [
        sl.make_plan(params, mesh, sl.chain(sl.zero(2), sl.reproducible(total))).bytes("grad")
        for total in (2, 4, 8, 16)
    ]
    assert held == [64 * 64 * 2, 64 * 64 * 4, 64 * 64 * 8, 64 * 64 * 12]


def test_several_nodes_of_the_tree_are_planned():
    """Of 12 micro-batches 4 ranks have 3 each, which are two nodes: twice the bytes of a gradient, and as many held."""
    w, mesh = torch.ones(64, 64), sl.abstract_mesh(data=4)
    one, two = (sl.make_plan({"w": w}, mesh, sl.chain(sl.zero(2), sl.reproducible(total))) for total in (8, 12))
    (scatter,), (twice,) = (plan.routes[plan.buckets[0].name].reductions for plan in (one, two))
    assert (scatter.payload, twice.payload) == (w.nbytes * 3 // 4, w.nbytes * 3 // 4 * 2)
    assert two.bytes("grad") == 2 * w.nbytes
    assert "3 of 12 micro-batches are up to 2 nodes of it, so over axis 'data' a rank sends 2 sums" in str(two)
    hybrid = sl.make_plan(
        {"w": w}, sl.abstract_mesh(node=4, data=3), sl.chain(sl.zero(1, replicate="node"), sl.reproducible(12))
    )
    scatter, total = hybrid.routes[hybrid.buckets[0].name].reductions
    row = -(-w.numel() // 3) * 4
    assert (scatter.payload, total.payload) == (row * 2, -(-row // 16) * 4 * 3 * (2 + 1))
    assert "over axis 'node'" in str(hybrid) and "over axis 'data' a rank sends" not in str(hybrid)


def of_many_uses(params, x, batch=None):
    """A block that uses its weight in products of every kind, so that many gradients of it are added."""
    w, b = params["w"], params["b"]
    y = torch.tanh(x @ w)
    y = torch.tanh(y @ w.T)
    y = torch.tanh(torch.nn.functional.linear(y, w, b))
    y = torch.tanh((w @ y.T).T)
    return x + torch.bmm(y[None], w[None])[0]


@pytest.mark.parametrize("remat", [(), (sl.remat("full"),)], ids=["saved", "recomputed"])
@pytest.mark.parametrize(("stage", "schedule"), [(0, "zb-h1"), (2, "zb-v"), (3, "zb-h1")])
def test_halves_of_backward_add_the_gradients_of_a_weight_in_its_order(stage, schedule, remat):
    def run(mesh, *transforms):
        generator = torch.Generator().manual_seed(0)
        params = [{"w": torch.randn(6, 6, generator=generator) / 3, "b": torch.ones(6)} for _ in range(4)]
        blocks = [lambda p, carry, x: of_many_uses(p, x), *[of_many_uses] * 2]
        loss_fn = sl.sequential([*blocks, lambda p, carry, x: of_many_uses(p, carry).square().mean()])
        params = sl.shard(params, mesh, sl.chain(*transforms, sl.reproducible(TOTAL)))
        state, step = sl.make_train_step(loss_fn, params, adamw())
        x = torch.randn(ROWS, 6, generator=generator)
        state, metrics = step(state, share(x, batch_index(params.plan, params.mesh), params.plan.batch_ranks))
        return digest((metrics["loss"], whole(state)))

    mesh, transforms = on(pipe=2, data=2, stage=stage, schedule=schedule)
    found = sl.simulate(run, *transforms, *remat, mesh=mesh)
    assert set(found) == set(sl.simulate(run, mesh={"data": 1}))


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_without_dimensions(stage):
    def run(mesh):
        params = sl.shard(
            {"w": torch.ones(3), "scale": torch.tensor(2.0)}, mesh, sl.chain(sl.zero(stage), sl.reproducible(4))
        )
        state, step = sl.make_train_step(
            lambda p, x: (p["scale"] * p["w"] * x).square().mean(), params, sl.optim.sgd(0.1)
        )
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        state, metrics = step(state, share(x, batch_index(params.plan, params.mesh), params.plan.batch_ranks))
        return digest((metrics["loss"], whole(state)))

    assert set(sl.simulate(run, mesh={"data": 2})) == set(sl.simulate(run, mesh={"data": 1}))


# --- refusals -----------------------------------------------------------------------------------------------------


REFUSED = {
    "ranks": ({"data": 3}, [sl.zero()], r"3 ranks divide the batch.*Use 1, 2, 4 or 8 ranks, or reproducible\(9\)"),
    "slices": ({"data": 2, "model": 2}, [sl.zero(), sl.tensor_slicing({"0/w": "column"}, axis="model")], "fewer elements"),
    "sequence": ({"data": 2, "seq": 2}, [sl.zero(), sl.sequence("seq", "ring")], "parts of sequences"),
    "codec": ({"data": 2}, [sl.zero(), sl.onebit("data")], r"axis 'data': what is rounded .* depends on the ranks"),
    "gathered": ({"data": 2}, [sl.zero(3), sl.quantize("int8")], r"axis 'data': what is rounded"),
    "narrow": ({"data": 2}, [sl.zero(), sl.precision("bf16", "bf16")], r"leave precision\(reduce_dtype=\) at 'fp32'"),
    "each": ({"data": 2}, [sl.zero(2), sl.accumulate(4, sync="each")], "sync='each' sums each micro-batch over ranks first"),
    "count": ({"data": 2}, [sl.zero(2), sl.accumulate(2)], "each of 2 ranks 4 micro-batches.*asks for 2: use microbatches=4"),
    "two zeros": ({"a": 2, "b": 2}, [sl.zero(1, "a"), sl.zero(1, "b")], r"use zero\(stage, axis='b', replicate='a'\)"),
    "two zeros of other stages": (
        {"a": 2, "b": 2},
        [sl.zero(1, "a"), sl.zero(3, "b")],
        r"use zero\(stage, axis='b', replicate='a'\)",
    ),
    "order": ({"data": 2, "node": 2}, [sl.zero(1, "data", "node")], "name the axes of the mesh in the order node, data"),
    "inner": ({"node": 2, "data": 3}, [sl.zero(0, replicate="node")], r"6 ranks divide"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_remedy(name):
    mesh, transforms, message = REFUSED[name]
    params = [{"w": torch.ones(8, 8)} for _ in range(4)]
    with pytest.raises(IllegalComposition, match=f"(?s)reproducible.*{message}"):
        sl.make_plan(params, sl.abstract_mesh(**mesh), sl.chain(*transforms, sl.reproducible(TOTAL)))


def test_leaves_tied_across_stages_are_refused():
    params = gpt.to_blocks(gpt.init(replace(CONFIG, tie=True)))
    with pytest.raises(IllegalComposition, match=r"0/tokens is used in stages 0, 1.*parameters of their own"):
        sl.make_plan(
            params, sl.abstract_mesh(pipe=2, data=1), sl.chain(sl.zero(), sl.pipeline("1f1b", 8), sl.reproducible(8))
        )


def test_an_optimizer_that_owns_an_axis_is_refused():
    transform = sl.chain(sl.zero(0), sl.reproducible(TOTAL))
    with pytest.raises(IllegalComposition, match="already sends them over it in full precision, added in one order"):
        sl.make_plan(
            {"w": torch.ones(8)}, sl.abstract_mesh(data=2), transform, optimizer=sl.optim.onebit_adam(1e-3, 10)
        )


def steps(loss_fn, tx, params=None, **options):
    params = {"w": torch.ones(4, 4)} if params is None else params
    params = sl.shard(params, sl.make_mesh(data=1), sl.chain(sl.zero(), sl.reproducible(2)))
    state, step = sl.make_train_step(loss_fn, params, tx, **options)
    return step(state, torch.ones(2, 4))


def quadratic(params, batch):
    return (batch @ params["w"]).square().mean()


def test_buffers_and_moments_in_blocks_are_refused():
    with pytest.raises(IllegalComposition, match=r"with buffers=. Use layers without them"):
        steps(lambda params, buffers, batch: (quadratic(params, batch), buffers), sl.optim.sgd(0.1), buffers={})
    with pytest.raises(IllegalComposition, match="whose state is in CodedMoment tensors"):
        steps(lambda params, batch: params["w"].square().sum(), sl.optim.adamw8bit(0.1), {"w": torch.ones(5000)})
    steps(quadratic, sl.optim.adamw8bit(0.1))  # few elements, so not coded


def test_sums_of_ones_own_state_their_terms():
    def by(largest):
        def update(updates, state, params, *, shards):
            return optree.tree_map(lambda u: -u / float(shards.sum(largest, updates)), updates), state

        return sl.optim.GradientTransformation(lambda params, shards: (), update, sl.optim.Locality.GLOBAL)

    with pytest.raises(IllegalComposition, match=r"pass sl\.optim\.SumOf\(terms\)"):
        steps(quadratic, by(lambda x: x.abs().sum()))
    steps(quadratic, by(sl.optim.SumOf(lambda x: x.abs().double())))


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "8"])
def test_the_number_of_micro_batches_is_checked(count):
    with pytest.raises(IllegalComposition, match="use an integer of at least 1"):
        sl.reproducible(count)
