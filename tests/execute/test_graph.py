"""A step as one graph: equal to the step without, with the exchanges and the memory that its passes promise."""

import itertools
import random
import re
from dataclasses import replace

import numpy
import pytest
import torch
import torch.nn.functional as F
from helpers.architectures import build
from helpers.models import TINY, mlp, mlp_loss, regression_batch, share, tiny_gpt, token_batches
from helpers.strategies import MESHES, chains, models
from helpers.trees import relative_error
from hypothesis import given, note, settings
from hypothesis import strategies as st
from optree import tree_map
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import shardlib as sl
from shardlib.common._compat import FUSED_ATTENTIONS
from shardlib.common.thresholds import Threshold
from shardlib.errors import IllegalComposition
from shardlib.execute.batches import batch_index
from shardlib.execute.counting import LiveBytes
from shardlib.execute.graph import fuse, merge
from shardlib.execute.graph.analysis import alive, kind_of, peak_of_wholes
from shardlib.execute.graph.nodes import BACKWARD, BLOCK, FORWARD, PHASE, fetched, link_at, nbytes
from shardlib.execute.graph.passes import PASSES
from shardlib.execute.graph.runner import GraphPipe, GraphStage
from shardlib.execute.graph.sums import landed
from shardlib.execute.stages.pipe import runner_of
from shardlib.execute.step import LossStep
from shardlib.execute.values.keeping import arrived
from shardlib.models import gpt, huggingface
from shardlib.tree import leaves_of


def both(loss_fn, params, batches, transform, mesh=None, without=(), rng=None, buffers=None, fuses=False):
    """Losses, norms and gradients with and without a graph, and the graphs, of rank 0."""

    def run(mesh):
        sharded, found, graphs = sl.shard(params, mesh, transform), [], []
        plan = sharded.plan

        def graph_stage(*args, **kwargs):
            kind = GraphPipe if plan.stages.axes else GraphStage
            graphs.append(kind(*args, **kwargs, without=without, fuses=fuses))
            return graphs[-1]

        for run_by in (runner_of, graph_stage):
            step = LossStep(loss_fn, plan, mesh, buffers is not None, run_by=run_by)
            comm = {name: kept for channel in plan.channels for name, kept in channel.start(mesh.device).items()}
            for number, batch in enumerate(batches[:1] + batches):  # the first step has no graph
                mine = share(batch, batch_index(plan, mesh), plan.batch_ranks)
                key = None if rng is None else rng.fold_in(number)
                got = step(sharded, mine, buffers, key, comm=comm, equal={})
                comm = got.residuals.after
                found.append((got.loss, got.weight, got.norm, dict(got.grads), got.aux, got.buffers, comm))
        for graph in graphs[0].graphs.values():
            graph.lint()
        half = len(batches) + 1
        return (
            found[1:half],
            found[half + 1 :],
            list(graphs[0].graphs.values()),
            graphs[0],
        )  # which keeps the graphs' links

    return sl.simulate(run, mesh=mesh or {"data": 2})


def check(results, tolerance=0.0):
    for eager, compiled, graphs, _ in results:
        assert graphs
        for one, other in zip(eager, compiled, strict=True):
            error, path = relative_error(tree_map(torch.as_tensor, other), tree_map(torch.as_tensor, one))
            assert error <= tolerance, f"{path}: {error}"
    return results[0][2][0]


def count(graph, kind):
    return sum(kind_of(node) == kind for node in graph.nodes)


AT = torch.ops.aten
DOTS = {AT.mm.default, AT.addmm.default, AT.bmm.default, AT.baddbmm.default, *FUSED_ATTENTIONS}


def of_products(context, op, *args, **kwargs):
    """A policy that keeps products of matrices alone, and sees what they make."""
    return op in DOTS and (isinstance(context.op_output, list | tuple) or context.op_output.numel() > 0)


CHAINS = {
    "0": sl.zero(0),
    "1": sl.zero(1),
    "2, dots kept": sl.chain(sl.zero(2), sl.remat("dots")),
    "2 in 2 micro-batches, together": sl.chain(sl.zero(2), sl.accumulate(2, sync="last")),
    "3 in bf16": sl.chain(sl.zero(3), sl.precision("bf16")),
    "3 under autocast": sl.chain(sl.zero(3), sl.precision("bf16", autocast=True)),
    "2 in bf16 without masters": sl.chain(sl.zero(2), sl.precision("bf16", master=False)),
    "3 in 2 micro-batches, recomputed": sl.chain(sl.zero(3), sl.accumulate(2), sl.remat()),
    "3, kept": sl.zero(3, keep="forward"),
    "3, kept in part, in 2 micro-batches": sl.chain(sl.zero(3, keep="6kB"), sl.accumulate(2), sl.remat()),
    "3, frozen": sl.chain(sl.zero(3), sl.freeze("blocks/0/*")),
    "0 in 1 bit, in 3 micro-batches": sl.chain(sl.zero(0), sl.onebit(), sl.accumulate(3)),
    "2 in int8, in 3 micro-batches": sl.chain(sl.zero(2), sl.quantize(gradients="int8"), sl.accumulate(3)),
    "3 in int4 and fp8, bf16": sl.chain(sl.zero(3), sl.precision("bf16"), sl.quantize("fp8", "int4"), sl.remat()),
    "3 in int8, nothing kept": sl.chain(sl.zero(3), sl.quantize("int8", "int8", feedback=False), sl.accumulate(3)),
    "3, products in fp8": sl.chain(sl.zero(3), sl.precision("fp8"), sl.remat("dots")),
    "3, named values kept": sl.chain(sl.zero(3), sl.remat(save=["attn/out", "mlp/hidden"])),
    "2 in 2 micro-batches, one block recomputed": sl.chain(sl.zero(2), sl.accumulate(2), sl.remat(blocks=1)),
    "3, a policy": sl.chain(sl.zero(3), sl.remat(of_products)),
    "3, reproducible": sl.chain(sl.zero(3), sl.reproducible(6)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_gpt(name):
    """To the bit, with draws whose keys differ from step to step, and whose places in the batch from micro-batch to
    micro-batch, by one graph."""
    loss_fn, params = tiny_gpt(dropout=0.1)
    results = both(loss_fn, params, token_batches(2, 12), CHAINS[name], rng=sl.Key(3))
    check(results)
    assert all(len(graphs) == 1 for _, _, graphs, _ in results)


EVEN = replace(TINY, sequence=8)
SLICES = sl.tensor_slicing(gpt.slicing_rules(TINY), axis="model")
DIVIDED = sl.remat(store="sharded", smallest=1)
PARTS = {
    "slices": SLICES,
    "slices at stage 0": sl.chain(SLICES, sl.accumulate(2)),
    "slices, recomputed": sl.chain(SLICES, sl.remat()),
    "slices, inputs of blocks divided": sl.chain(SLICES, DIVIDED),
    "slices in 2 micro-batches, divided, dots kept": sl.chain(
        SLICES, sl.accumulate(2), sl.remat("dots", store=("sharded", "host"), smallest=1, blocks=1)
    ),
    "slices in 2 micro-batches": sl.chain(SLICES, sl.accumulate(2)),
    "ulysses": sl.sequence("model", "ulysses"),
    "ring": sl.chain(sl.sequence("model", "ring"), sl.remat()),
    "megatron": sl.chain(sl.sequence("model", "megatron"), SLICES),
    "slices, products in fp8": sl.chain(SLICES, sl.precision("fp8")),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_gpt_in_parts(name):
    loss_fn, params = tiny_gpt(dropout=0.1, sequence=8)
    transform, mesh = sl.chain(sl.zero(0 if "stage 0" in name else 3), PARTS[name]), {"data": 2, "model": 2}
    graph = check(both(loss_fn, params, token_batches(2, 8, EVEN), transform, mesh, rng=sl.Key(3)))
    assert any("_start" in str(node.target) for node in graph.nodes)
    blocks = 2 if name == "slices, inputs of blocks divided" else 1 if "divided" in name else 0
    assert sum(node.target is arrived for node in graph.nodes) == blocks


BOTH = ("data", "expert")
EXPERTS = {
    "0, padded": ({"expert": 2}, sl.experts(padded=True)),
    "1": ({"expert": 2}, sl.experts(), sl.zero(1, axis="expert")),
    "2 in 2 micro-batches, padded": (
        *({"data": 2, "expert": 2}, sl.experts(padded=True)),
        *(sl.zero(2, axis=BOTH), sl.accumulate(2)),
    ),
    "3, recomputed": ({"expert": 2}, sl.experts(), sl.zero(3, axis="expert"), sl.remat()),
    "3 in bf16, padded, two hops": (
        *({"data": 2, "expert": 2}, sl.experts(BOTH, padded=True)),
        *(sl.zero(3, axis=BOTH), sl.precision("bf16")),
    ),
    "2 in codes, two hops": (
        {"data": 2, "expert": 2},
        sl.experts(BOTH, codec="fp8", back_codec="int8"),
        sl.zero(2, axis=BOTH),
    ),
    "3, in slices": ({"expert": 2, "model": 2}, sl.experts(), sl.zero(3, axis="expert")),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_a_gpt_with_experts(name):
    """To the bit, by one graph, though in every step other numbers of tokens travel."""
    mesh, *transforms = EXPERTS[name]
    dropping = sl.nn.routers.top_k(2, sampled=True, capacity=sl.nn.routers.Capacity(0.8, 1, "random"))
    router = dropping if "padded" in name else sl.nn.routers.top_k(2, renormalise="chosen")
    moe = gpt.Experts((4,), sl.nn.MoEConfig(router, jitter=0.1), hidden=6, z=0.1)
    loss_fn, params = tiny_gpt(dropout=0.1, layers=1, moe=moe)
    if "slices" in name:
        transforms.append(sl.tensor_slicing(gpt.slicing_rules(replace(TINY, layers=1, moe=moe)), axis="model"))
    results = both(loss_fn, params, token_batches(2, 8), sl.chain(*transforms), mesh, rng=sl.Key(3))
    graph = check(results)
    assert all(len(graphs) == 1 for _, _, graphs, _ in results)
    called = [str(node.target) for node in graph.nodes]
    assert called.count("shardlib.routing_top_k.default") == 1  # a recomputed block takes over what was decided
    assert "all_to_all over 'expert'" in str(results[0][3]) and max(map(sum, alive(graph))) > 0


def test_checks_and_draws_that_nothing_uses_are_kept():
    """In the last step a choice is of no expert."""

    def loss_fn(params, choices):
        torch.rand(3)  # after which the weights are others
        routing = sl.nn.routers.Routing.of(choices, torch.rand(choices.shape), 2)
        product = lambda params, rows, product: product(rows, params["w"])  # noqa: E731
        return sl.nn.run_experts(params, torch.ones(len(choices), 4), routing, product).square().mean()

    def losses(compile):
        state, step = sl.make_train_step(loss_fn, {"w": torch.ones(2, 3, 4)}, sl.optim.sgd(0.1), rng=1, compile=compile)
        found = []
        for number in range(3):
            state, metrics = step(state, torch.tensor([[0], [number % 2]]))
            found.append(metrics["loss"].item())
        with pytest.raises(RuntimeError, match=r"a choice is not among .* 1, of 2 experts"):
            step(state, torch.tensor([[0], [2]]))
        return found

    assert losses(True) == losses(False)


def test_replicas_have_no_graph():
    config = sl.nn.MoEConfig(sl.nn.routers.switch())
    params = sl.nn.init_moe(sl.Key(0), config, experts=4, width=4, hidden=4, seats=True, replicas=True)

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.experts(spare=1))
        sl.make_train_step(
            lambda params, x: sl.nn.moe(params, x, config)[0].mean(), sharded, sl.optim.sgd(0.1), compile=True
        )

    with pytest.raises(IllegalComposition, match=r"(?s)compile=True does not go together with.*experts\(spare=\): "):
        sl.simulate(run, mesh={"expert": 2})


PIPES = {
    "1f1b": (sl.pipeline("1f1b", 3), sl.zero(1), sl.precision("fp8")),
    "1f1b, stage 3, recomputed": (sl.pipeline("1f1b", 3), sl.zero(3), sl.remat()),
    "two stages a rank": (sl.pipeline("interleaved-1f1b", 4), sl.zero(2), sl.remat("dots")),
    "zero-bubble": (sl.pipeline("zb-h1", 4), sl.zero(3)),
    "v": (sl.pipeline("zb-v", 4), sl.zero(2), sl.precision("bf16")),
    "zero-bubble, one block recomputed": (sl.pipeline("zb-h1", 4), sl.zero(3), sl.remat(save="attn/out", blocks=1)),
    "slices": (
        *(sl.pipeline("zb-h1", 2), DIVIDED),
        sl.tensor_slicing(gpt.slicing_rules(replace(TINY, layers=4), blocks=True), axis="model"),
    ),
}


@pytest.mark.parametrize("name", PIPES)
def test_a_pipeline(name):
    _, params = tiny_gpt(dropout=0.1, layers=4)
    config = replace(TINY, layers=4, dropout=0.1)
    mesh = {"pipe": 2, "model" if name == "slices" else "data": 2}
    blocks = gpt.to_blocks(params)
    results = both(
        gpt.make_sequential(config), blocks, token_batches(2, 24), sl.chain(*PIPES[name]), mesh, rng=sl.Key(3)
    )
    check(results)
    graphs = results[-1][2]
    assert len(graphs) == {
        "two stages a rank": 4,
        "zero-bubble": 3,
        "zero-bubble, one block recomputed": 3,
        "v": 6,
        "slices": 3,
    }.get(name, 2)
    if name == "1f1b, stage 3, recomputed":  # backward gathers again: other micro-batches come between
        assert [count(graph, "gather") for graph in graphs] == [1, 1]


def first(params, carry, batch):
    x = batch @ params["w"]
    return {"x": x.tanh(), "old": x, "skip": batch, "mask": batch > 0, "n": 3}


def middle(params, carry, batch):
    """Torch's dropout, a number of the carry, and a value that is written to."""
    x = F.dropout(carry["x"] @ params["w"] + carry["skip"] * carry["n"], 0.3)
    kept = torch.zeros_like(x)
    kept[:, 0] = x[:, 0]
    return carry | {"x": x.add_(1.0) + kept}


def last(params, carry, batch):
    x = torch.where(carry["mask"], carry["x"], carry["old"]) @ params["w"]
    counted = (batch[:, 0] > 0).double()
    return sl.Mean((x.square().sum(1) * counted).sum(), counted.sum()), {"x": x.sum(), "n": carry["n"]}


@pytest.mark.parametrize(
    ("schedule", "frozen", "fuses"),
    [
        ("1f1b", "[01]/*", False),
        ("1f1b", "[23]/*", False),
        ("zb-h1", "[01]/*", False),
        ("zb-h1", "[23]/*", False),
        pytest.param("zb-h1", "[23]/*", True, marks=pytest.mark.nightly),
    ],
)
def test_what_passes_between_stages(schedule, frozen, fuses):
    params = [{"w": PARAMS["weights"][number % 3]} for number in range(4)]
    batches = [torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)).double() for seed in range(2)]
    chain = sl.chain(sl.pipeline(schedule, 2), sl.zero(2), sl.freeze(frozen))
    loss_fn, mesh = sl.sequential([first, middle, middle, last]), {"pipe": 2, "data": 2}
    check(both(loss_fn, params, batches, chain, mesh, rng=sl.Key(3), fuses=fuses), 1e-12 if fuses else 0.0)


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (sl.quantize(gradients="int8"), "quantize(gradients=)"),
        (sl.reproducible(4), "reproducible"),
        (sl.offload(), "offload"),
    ],
)
def test_what_a_pipeline_has_no_graph_of(transform, name):
    def run(mesh):
        chain = sl.chain(sl.pipeline("1f1b", 2), sl.zero(2), transform)
        params = sl.shard([{"w": torch.ones(4, 4)} for _ in range(2)], mesh, chain)
        loss_fn = sl.sequential([lambda params, carry, batch: batch @ params["w"]] * 2)
        sl.make_train_step(loss_fn, params, sl.optim.sgd(0.1), compile=True)

    with pytest.raises(IllegalComposition, match=rf"(?s)compile=True does not go together with.*{re.escape(name)}"):
        sl.simulate(run, mesh={"pipe": 2, "data": 2})


def test_a_pipeline_holds_what_it_holds_without_graphs():
    config = gpt.GPTConfig(vocab=64, layers=8, width=32, heads=2, sequence=32)

    def run(mesh, compile):
        params = sl.shard(
            gpt.to_blocks(gpt.init(config)), mesh, sl.chain(sl.pipeline("1f1b", 4), sl.zero(3), sl.remat())
        )
        loss_fn, live = gpt.make_sequential(config), LiveBytes()
        state, step = sl.make_train_step(loss_fn, params, sl.optim.sgd(0.1), compile=compile)
        (batch,) = token_batches(1, 16, config)
        state, _ = step(state, batch)
        with live:
            step(state, batch)
        return live.peak

    held, compiled = (sl.simulate(run, compile, mesh={"pipe": 2, "data": 1}) for compile in (False, True))
    assert all(other <= 1.04 * one for one, other in zip(held, compiled, strict=True)), (held, compiled)


@settings(max_examples=max(10, settings().max_examples // 3))
@given(st.data())
def test_drawn_chains(data):
    mesh = data.draw(MESHES)
    transforms, microbatches, _ = data.draw(chains(mesh))
    model = data.draw(models())
    rows = torch.Size(mesh.values()).numel() * microbatches
    batch = torch.randn(rows, 2, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    note(f"{mesh} {transforms}")
    check(both(model.loss_fn, model.params, [batch], sl.chain(*transforms), mesh), 1e-12)


def test_buffers_and_aux():
    def loss_fn(params, buffers, batch):
        x, y = batch
        error = (x @ params["w"] - y).square().sum(1)
        counted = (x[:, 0] > 0).double()
        mean = buffers["running_mean"] + x.mean(0)
        return (sl.Mean((error * counted).sum(), counted.sum()), {"error": sl.Mean(error.sum(), len(x))}), {
            "running_mean": mean
        }

    params = {"w": torch.randn(6, 4, dtype=torch.float64)}
    buffers, batch = {"running_mean": torch.zeros(6, dtype=torch.float64)}, regression_batch(8, 6, 4)
    transform = sl.chain(sl.zero(3), sl.accumulate(2))
    check(both(loss_fn, params, [batch, batch], transform, buffers=buffers))


@sl.block
def normed(params, x, mean, variance):
    return x + F.gelu(F.batch_norm(x @ params["w"], mean, variance, training=True))


def test_running_statistics_are_those_of_one_pass():
    """Of blocks that backward computes again: operators of batch_norm update them without a sign."""

    def loss_fn(params, buffers, x):
        after = []
        for layer, before in zip(params, buffers):
            mean, variance = (before[name].clone() for name in ("running_mean", "running_var"))
            x = normed(layer, x, mean, variance)
            after.append({"running_mean": mean, "running_var": variance})
        return x.square().mean(), after

    params = [{"w": torch.randn(6, 6, generator=torch.Generator().manual_seed(seed))} for seed in range(3)]
    buffers = [{"running_mean": torch.zeros(6), "running_var": torch.ones(6)} for _ in params]
    batches = [torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    once = both(loss_fn, params, batches, sl.zero(3), buffers=buffers)
    again = both(loss_fn, params, batches, sl.chain(sl.zero(3), sl.remat()), buffers=buffers)
    check(once)
    check(again)
    check([(plain, repeated, *rest) for (plain, *_), (repeated, _, *rest) in zip(once, again)])


def test_compiled_code_in_a_block_is_compiled_no_more_often_than_without_remat():
    def compiled(*transforms):
        counter = CompileCounter()
        function = torch.compile(lambda x: x.tanh().sin(), backend=counter)
        block = sl.block(lambda weight, x: function(x @ weight))
        params = sl.shard(torch.ones(4, 4), sl.make_mesh(), sl.chain(sl.zero(3), *transforms))
        loss_fn = lambda weight, x: block(weight, block(weight, x)).square().mean()  # noqa: E731
        state, train_step = sl.make_train_step(loss_fn, params, sl.optim.sgd(0.1))
        for _ in range(3):
            state, _ = train_step(state, torch.ones(2, 4))
        return counter.frame_count

    torch._dynamo.reset()
    assert compiled(sl.remat()) <= compiled()


@pytest.mark.parametrize("stage", [0, 3])
def test_what_torch_differentiates_inside_a_loss(stage):
    """Per-sample gradients and a Hessian-vector product of parameters that are gathered for the loss."""
    _, params = mlp([6, 5, 4])

    def loss_fn(params, batch):
        def each(params, x, y):
            return mlp_loss(params, (x[None], y[None]))

        samples = torch.func.vmap(torch.func.grad(each), (None, 0, 0))(params, *batch)

        def slope(params):
            grads = torch.func.grad(mlp_loss)(params, batch)
            return sum((grad * leaf.cos()).sum() for grad, leaf in zip(leaves_of(grads), leaves_of(params)))

        curved = torch.func.grad(slope)(params)
        parts = [sample.square().sum() for sample in leaves_of(samples)]
        return sum(parts) + sum(leaf.sum() for leaf in leaves_of(curved))

    check(both(loss_fn, params, [regression_batch(8, 6, 4)], sl.zero(stage)), 1e-12)


UNITS = 5  # of a GPT of three layers


def exchanges(graphs, kind):
    return [sum(kind_of(node) == kind for node in graph.nodes) for graph in graphs]


@pytest.mark.parametrize(
    "without", [(), *[(name,) for name in PASSES], PASSES], ids=lambda names: "-".join(names) or "all"
)
def test_each_pass_keeps_the_bits(without):
    loss_fn, params = tiny_gpt(layers=2)
    transform = sl.chain(sl.zero(3), sl.remat())
    check(both(loss_fn, params, token_batches(2, 4), transform, without=without))


def plain_blocks(count=4, width=8):
    """A loss of layers of torch's own operations, and their parameters."""
    shapes = {"scale": (width,), "qkv": (3 * width, width), "out": (width, width)}
    draw = torch.Generator().manual_seed(0)
    params = [{name: torch.randn(shape, generator=draw) / 3 for name, shape in shapes.items()} for _ in range(count)]

    @sl.block
    def block(layer, x):
        parts = F.linear(F.layer_norm(x, x.shape[-1:], layer["scale"]), layer["qkv"]).chunk(3, -1)
        q, k, v = (part.view(*x.shape[:2], 2, -1).transpose(1, 2) for part in parts)
        k = torch.cat([k.new_zeros(0), k], 2)  # as of a cache: inductor would lay it out otherwise
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return x + F.gelu(F.linear(mixed, layer["out"]))

    def loss_fn(params, x):
        for layer in params:
            x = block(layer, x)
        return x.square().mean()

    return loss_fn, params


@pytest.mark.parametrize(
    ("transform", "tolerance"),
    [
        (sl.chain(sl.zero(3), sl.remat()), 1e-5),
        pytest.param(sl.chain(sl.zero(1), sl.precision("bf16"), sl.accumulate(2)), 2e-2, marks=pytest.mark.nightly),
    ],
)
def test_runs_of_operations_are_compiled(transform, tolerance, caplog):
    """But for the order of sums as without a graph; blocks that are alike share their code."""
    loss_fn, params = plain_blocks()
    batches = [torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    results = both(loss_fn, params, batches, transform, fuses=True)
    check(results, tolerance)
    codes, runs = map(int, re.search(r"(\d+) pieces of code for (\d+) runs", str(results[0][3])).groups())
    assert 0 < codes < runs
    assert not [record for record in caplog.records if record.name.startswith("shardlib")]


def test_what_inductor_cannot_compile_runs_as_it_is(monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("no compiler is there")

    monkeypatch.setattr(fuse, "compiled_by_inductor", fail)
    loss_fn, params = plain_blocks(1)
    check(both(loss_fn, params, [torch.ones(4, 6, 8)], sl.zero(3), fuses=True))
    assert "no compiler is there). Install a compiler for C++" in caplog.text


def test_two_units_are_whole_at_a_time():
    """Each is gathered twice but for the last two, and embeddings, which backward does not read; and reduced as soon as its
    gradient is there."""
    loss_fn, params = tiny_gpt(layers=3)
    run = lambda *without: both(loss_fn, params, token_batches(1, 4), sl.zero(3), without=("merge", *without))  # noqa: E731
    (_, _, graphs, stage), *_ = run()
    assert exchanges(graphs, "gather") == [2 * UNITS - 3] and exchanges(graphs, "reduce-scatter") == [UNITS]
    assert peak_of_wholes(graphs[0]).units == 2 and "gathered at a time: 2 units at most" in str(stage)
    order = [kind_of(node)[0] for node in graphs[0].nodes if kind_of(node)]
    assert "".join(order) == "ggggg" + "r" + "gr" * 2 + "rr"
    (_, _, graphs, stage), *_ = run("regather")
    assert peak_of_wholes(graphs[0]).units == UNITS and exchanges(graphs, "gather") == [UNITS]
    (_, _, graphs, stage), *_ = run("hoist")
    assert [kind_of(node)[0] for node in graphs[0].nodes if kind_of(node)][-UNITS:] == ["r"] * UNITS


@pytest.mark.parametrize(
    ("keep", "without", "gathers", "units"),
    [("forward", ["merge"], UNITS, 4), ("3kB", ["merge"], UNITS + 1, 3), ("12kB", [], 3, 2)],
)
def test_what_stays_is_gathered_once(keep, without, gathers, units):
    """The head, and the embeddings, which backward does not read, or all blocks too; what stays is merged with what stays."""
    loss_fn, params = tiny_gpt(layers=3)
    (_, _, graphs, stage), *_ = both(loss_fn, params, token_batches(1, 4), sl.zero(3, keep=keep), without=without)
    assert exchanges(graphs, "gather") == [gathers] and peak_of_wholes(graphs[0]).units == units
    assert "gather over" in str(stage)


@pytest.mark.parametrize(
    ("stage", "kinds"), [(0, {"all-reduce": 1}), (1, {"reduce-scatter": 1}), (3, {"gather": 1, "reduce-scatter": 1})]
)
def test_small_messages_are_merged(stage, kinds):
    loss_fn, params = tiny_gpt(layers=3)
    (_, _, graphs, stage), *_ = both(loss_fn, params, token_batches(1, 4), sl.zero(stage))
    assert {kind: exchanges(graphs, kind)[0] for kind in kinds} == kinds


def test_blocks_are_recomputed():
    """Of what blocks compute backward reads what they return alone."""
    loss_fn, params = tiny_gpt(layers=3)

    def kept(transform, loss_fn=loss_fn, params=params, batches=token_batches(1, 4)):  # noqa: B008
        results = both(loss_fn, params, batches, transform, without=("merge", "overlap"), rng=sl.Key(3))
        check(results)
        graphs = results[0][2]
        wholes = fetched(graphs[0])
        forward = [node for node in graphs[0].nodes if node.meta.get(PHASE) == FORWARD and node not in wholes]
        later = [node for node in forward if any(user.meta.get(PHASE) == BACKWARD for user in node.users)]
        return sum(nbytes(node) for node in later if node.meta.get(BLOCK) is not None)

    whole, dots, nothing = (
        kept(t) for t in (sl.zero(3), sl.chain(sl.zero(3), sl.remat("dots")), sl.chain(sl.zero(3), sl.remat()))
    )
    rows, width = 2 * TINY.sequence, TINY.width
    assert nothing == 3 * rows * width * 4 < dots < whole
    recomputing = lambda *args, **options: kept(sl.chain(sl.zero(3), sl.remat(*args, **options)))  # noqa: E731
    assert recomputing(save="attn/out") == nothing + 3 * rows * width * 4
    assert [recomputing(blocks=blocks) for blocks in (0, 3)] == [whole, nothing]
    assert nothing < recomputing(blocks=2) < recomputing(blocks=1) < whole
    assert recomputing(lambda context, op, *args, **kwargs: CheckpointPolicy.PREFER_SAVE) == whole
    assert recomputing(of_products) == dots

    def dropping(params, batch):
        x = batch
        for weight in params["weights"]:
            x = sl.block(lambda weight, x: F.dropout(torch.tanh(x @ weight), 0.5))(weight, x)
        return x.square().mean()

    masks_and_inputs = kept(sl.chain(sl.zero(3), sl.remat()), dropping, PARAMS, [BATCH["x"]])
    assert masks_and_inputs == (3 + 3) * 4 * 6 * 8

    def writing(params, batch):
        """What was computed of it before a write is kept; what is read later is computed again."""

        @sl.block
        def block(weight, x):
            y = x @ weight
            before = y.sigmoid()
            return torch.tanh((y.mul_(2.0).sin().cos() + before) @ weight)

        x = batch
        for weight in params["weights"]:
            x = block(weight, x)
        return x.square().mean()

    assert kept(sl.chain(sl.zero(3), sl.remat()), writing, PARAMS, [BATCH["x"]]) == (3 + 3) * 4 * 6 * 8


def layers(params, batch):
    x = batch["x"]
    for weight in params["weights"]:
        x = torch.tanh(x @ weight)
    return x


PARAMS = {"weights": [torch.randn(6, 6, generator=torch.Generator().manual_seed(2)).double() for _ in range(3)]}
BATCH = {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(3)).double(), "scale": 2.0}


def of_batch(params, batch):
    """A `Mean` with aux, scaled by a number of the batch."""
    x = layers(params, batch)
    counted = (batch["x"][:, 0] > 0).double()
    error = sl.Mean((x.square().sum(1) * counted).sum() * batch["scale"], counted.sum())
    return error, {"error": sl.Mean(x.sum(), len(x)), "w": params["weights"][0], "name": "x"}


def branching(params, batch):
    x = layers(params, batch)
    if x.sum() > 0:
        x = x * 2
    return x.square().mean()


def steps(loss_fn, batches, compile, transform=None, **options):
    """Metrics and parameters of training on two simulated ranks; rank 0's."""

    def run(mesh):
        params = sl.shard(PARAMS, mesh, sl.zero(3) if transform is None else transform)
        state, step = sl.make_train_step(loss_fn, params, sl.optim.adamw(1e-2), compile=compile, **options)
        found = []
        for batch in batches:
            mine = {key: share(leaf, mesh.rank, 2) if torch.is_tensor(leaf) else leaf for key, leaf in batch.items()}
            state, metrics = step(state, mine)
            found.append(
                tree_map(
                    torch.as_tensor, [metrics["loss"], metrics["grad_norm"], metrics.get("aux", {}).get("error", 0)]
                )
            )
        graphs = len(step.graph.graphs) if compile else 0
        return found, sl.unshard(state.params), graphs, str(step.graph)

    return sl.simulate(run, mesh={"data": 2})[0]


def test_train_steps():
    """A graph is traced anew for another number in the batch."""
    batches = [BATCH, BATCH, BATCH | {"scale": 3.0}, BATCH]
    eager, compiled = (steps(of_batch, batches, compile) for compile in (False, True))
    assert relative_error(compiled[:2], eager[:2])[0] == 0
    assert compiled[2] == 2 and "reduce-scatter" in compiled[3] and eager[3] == "None"
    assert re.search(r"form 1, compiled in \d+\.\d\d s: \d+ nodes", compiled[3])


KEPT = torch.arange(6.0).double()


def in_place(x, weight):
    y, z = x @ weight, torch.zeros_like(x)
    y[:, 0].mul_(2.0)
    y.view(-1).add_(1.0)
    z[:, :3] = y[:, 3:]
    return y + z


def places(x, weight):
    parts = [(x @ weight)[2:] for _ in range(2)]
    return torch.cat([part.as_strided((2, 3), (6, 1), part.storage_offset()) for part in parts])


RECORDED = {
    "places in memory": places,
    "writes to views": in_place,
    "constants": lambda x, weight: (x @ weight) * KEPT + torch.tensor([1.0] * 6) * torch.tensor(2.0).item(),
    "parts that begin further on": lambda x, weight: torch.cat([part.t() for part in (x @ weight).chunk(3, 1)][::-1]),
    "complex numbers": lambda x, weight: torch.fft.fft(x @ weight).conj().abs(),
    "a checkpoint": lambda x, weight: checkpoint(lambda x: torch.tanh(x @ weight), x, use_reentrant=False),
    "a compiled block": sl.block(torch.compile(lambda x, weight: torch.tanh(x @ weight), backend="eager")),
    "a place in a table": lambda x, weight: torch.nn.functional.embedding(torch.tensor([0, 1, 5]), weight) * x.sum(),
    "several results": lambda x, weight: (x @ weight).topk(2).values,
}


@pytest.mark.parametrize("name", RECORDED)
def test_what_a_graph_computes(name):
    """Operations of which results are not known from the forms of arguments alone."""
    loss_fn = lambda params, batch: RECORDED[name](batch["x"], params["weights"][1]).square().mean()  # noqa: E731
    eager, compiled = (steps(loss_fn, [BATCH] * 3, compile) for compile in (False, True))
    assert relative_error(compiled[:2], eager[:2])[0] == 0 and compiled[2] == 1


def test_shares_of_different_sizes_draw_as_without_a_graph():
    """The second rank's share begins at no whole number of its rows."""

    def loss_fn(params, batch, rng):
        x = sl.dropout(batch @ params["w"], 0.5, rng.fold_in("x"))
        return sl.Mean(x.square().sum(), len(x))

    def run(mesh, compile):
        params = sl.shard({"w": PARAMS["weights"][0]}, mesh, stage=3)
        state, step = sl.make_train_step(loss_fn, params, sl.optim.adamw(1e-2), rng=1, compile=compile)
        found = []
        for sizes in ((4, 4), (4, 4), (3, 5)):
            state, metrics = step(state, BATCH["x"].split(sizes)[mesh.rank])
            found.append(metrics["loss"].item())
        return found, len(step.graph.graphs) if compile else 0

    (eager, _), (compiled, graphs) = (sl.simulate(run, compile, mesh={"data": 2})[0] for compile in (False, True))
    assert compiled == eager and graphs == 2


def test_a_number_that_changes_in_every_step_is_named(caplog):
    """Each is another graph, and eight are kept."""
    batches = [BATCH | {"scale": float(number)} for number in range(9)]
    eager, compiled = (steps(of_batch, batches, compile) for compile in (False, True))
    assert relative_error(compiled[:2], eager[:2])[0] == 0
    told = [record.message for record in caplog.records if "the 9th form of the loss's inputs" in record.message]
    assert len(told) == 2 and all("scale of the batch changes" in each and "torch.tensor" in each for each in told)


def test_what_cannot_be_traced_runs_and_is_named_with_its_line(caplog):
    eager, compiled = (steps(branching, [BATCH, BATCH], compile) for compile in (False, True))
    assert relative_error(compiled[:2], eager[:2])[0] == 0 and compiled[3].startswith("no graph: ")
    told = [record.message for record in caplog.records if "cannot be traced" in record.message]
    assert len(told) == 1 and "test_graph.py" in told[0] and "if x.sum() > 0:" in told[0]


def of_python(params, batch):
    return layers(params, batch).square().mean() * random.random()


def of_numpy(params, batch):
    return layers(params, batch).square().mean() * numpy.random.rand()


def of_a_constant(params, batch, called=itertools.count()):  # noqa: B008
    return layers(params, batch).square().mean() * torch.tensor(float(next(called)))


def of_calls(params, batch, called=itertools.count()):  # noqa: B008
    return layers(params, batch).square().mean() * (1 + next(called))


@pytest.mark.parametrize("loss_fn", [of_python, of_numpy, of_calls, of_a_constant])
def test_what_would_be_a_constant_is_refused_by_name(loss_fn, caplog):
    """Numbers that change from step to step and are in no tensor."""
    found = steps(loss_fn, [BATCH] * 2, True)
    assert found[3].startswith("no graph: ")
    (told,) = [record.message for record in caplog.records if "cannot be traced" in record.message]
    why = {of_python: "Python's random", of_numpy: "numpy.random"}
    assert why.get(loss_fn, "when called again") in told


def test_a_checkpoint_that_draws_runs_as_without_a_graph(caplog):
    """Its second call, in backward, draws again what its first one drew."""

    def loss_fn(params, batch):
        drop = lambda x: F.dropout(torch.tanh(x @ params["weights"][0]), 0.5) @ params["weights"][1]  # noqa: E731
        return checkpoint(drop, batch["x"], use_reentrant=False).square().mean()

    eager, compiled = (steps(loss_fn, [BATCH] * 2, compile) for compile in (False, True))
    assert relative_error(compiled[:2], eager[:2])[0] == 0
    assert "backward would draw other numbers than forward" in caplog.text


def in_parts(params, batch):
    """A parameter in tiles, a layer of which a product of each part is added to a sum in place, and a mask with two names."""
    one, two, three = params["weights"]
    x = batch["x"] @ sl.nn.tiled(torch.tanh, one, 2, dim=0)
    y = x[:, :3] @ two[:3]
    y = y.addmm_(x[:, 3:], two[3:])
    mask = torch.empty_like(y)
    flat = mask.view(-1)
    mask.bernoulli_(0.5)
    return torch.tanh(torch.tanh(y) * flat.view_as(y) @ three).square().mean()


def test_gradients_that_are_written_in_parts():
    eager, compiled = (steps(in_parts, [BATCH] * 2, compile) for compile in (False, True))
    assert relative_error(compiled[:2], eager[:2])[0] == 0 and compiled[2] == 1


def test_sums_in_place_are_recomputed():
    block = sl.block(in_parts)
    transform = sl.chain(sl.zero(3), sl.remat())
    eager, compiled = (steps(block, [BATCH] * 2, compile, transform) for compile in (False, True))
    assert relative_error(compiled[:2], eager[:2])[0] == 0 and compiled[2] == 1


class Settings:
    def __init__(self):
        self.power = 1

    def to_power(self, value):
        return value**self.power


SCALE = 1.0  # read by a loss


def helper(x):
    return x * SCALE


@pytest.mark.parametrize("in_blocks", [False, True])
def test_values_that_a_loss_closes_over_are_read_in_every_step(in_blocks, caplog):
    """Each change is another graph; at the ninth the value is named."""
    global SCALE
    settings, beta, table = Settings(), 1.0, {"weights": [1.0]}

    def loss_fn(params, batch):
        return helper(layers(params, batch)).square().mean() * settings.to_power(beta) + table["weights"][0]

    def losses(compile):
        nonlocal beta
        global SCALE
        SCALE, beta, settings.power, table["weights"] = 1.0, 1.0, 1, [1.0]
        blocks = sl.sequential([lambda params, carry, batch: loss_fn(params, batch)])
        given = (blocks, [PARAMS]) if in_blocks else (loss_fn, PARAMS)
        state, step = sl.make_train_step(*given, sl.optim.sgd(0.1), compile=compile)
        found = []
        for number in range(8):
            if number == 2:
                SCALE = 2.0
            if number == 3:
                beta = 0.5
            if number == 4:
                settings.power = 2
            if number == 5:
                table["weights"] = [0.0]
            state, metrics = step(state, BATCH)
            found.append(metrics["loss"].item())
        return found, state, step

    (eager, *_), (compiled, state, step) = losses(False), losses(True)
    assert compiled == eager and len(step.graph.graphs) == 5
    for beta in range(4):  # noqa: B007
        state, _ = step(state, BATCH)
    told = [record.message for record in caplog.records if "9th form" in record.message]
    assert len(told) == 1 and "beta changes, which the loss function reads" in told[0]


def test_what_is_done_to_a_module_is_done_in_its_graph():
    module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.5), torch.nn.Linear(6, 3)).double()
    batch = BATCH["x"]

    def losses(compile):
        module[1].p = 0.5
        apply, params = sl.from_module(module)
        loss_fn = lambda params, x: apply(params, x).square().mean()  # noqa: E731
        state, step = sl.make_train_step(loss_fn, params, sl.optim.sgd(0.1), rng=1, compile=compile)
        found = []
        for p in (0.5, 0.5, 0.0, 0.0):
            module[1].p = p
            state, metrics = step(state, batch)
            found.append(metrics["loss"].item())
        return found, step.graph

    (eager, _), (compiled, graph) = losses(False), losses(True)
    assert compiled == eager and len(graph.graphs) == 1


def test_errors_of_the_loss_are_raised():
    with pytest.raises(sl.errors.LossError, match="does not depend on any trained parameter"):
        steps(lambda params, batch: batch["x"].sum(), [BATCH], True)


NODES = sl.chain(sl.zero(3, axis="node"), sl.zero(3, axis="data"), sl.hierarchical("data"))
LEVELS = {
    "two levels": sl.chain(NODES, sl.remat()),
    "two levels in few bits": sl.chain(
        NODES, sl.quantize("int8", "int8", axis="node"), sl.quantize("int4", "int4"), sl.accumulate(2)
    ),
}


@pytest.mark.parametrize("name", LEVELS)
def test_second_shards_stay(name):
    """Nodes are gathered over once for forward and backward, and as long before a use as the unit inside."""
    loss_fn, params = mlp([6, 5, 5, 5, 3], torch.float32)
    batches = [regression_batch(8, 6, 3, torch.float32)] * 2
    results = both(loss_fn, params, batches, LEVELS[name], {"node": 2, "data": 2}, without=("merge",))
    graph = check(results)
    axes = [link_at(node).axis for node in graph.nodes if kind_of(node) == "gather"]
    assert (axes.count("node"), axes.count("data")) == (4, 5)  # backward needs the second layer again
    assert peak_of_wholes(graph).units == 2


def trained(mesh, transform, how, tx):
    """Losses, norms, parameters and residuals after steps, of which each is compiled, or not, as ``how`` says."""
    loss_fn, params = tiny_gpt(dropout=0.1, layers=1)
    sharded, state, steps, found = sl.shard(params, mesh, transform), None, {}, []
    for compile in dict.fromkeys(how):
        first, steps[compile] = sl.make_train_step(loss_fn, sharded, tx, rng=3, compile=compile)
        state = state or first
    for compile, batch in zip(how, token_batches(len(how), 12), strict=True):
        state, metrics = steps[compile](state, share(batch, mesh.rank, mesh.size))
        found.append((metrics["loss"], metrics["grad_norm"]))
    graphs = list(steps[True].graph.graphs.values()) if True in steps else [None]
    return (found, sl.unshard(state.params), dict(state.comm)), graphs


ELSEWHERE = {
    "states": (0, 1, {}),
    "parameters": (3, 3, {"params": "host"}),
    "gradients, a half": (2, 3, {"gradients": "host", "fraction": 0.5}),
    "ahead": (3, 1, {"speculate": True}),
    "a step later": (1, 3, {"delay": True}),
    "disk": (3, 3, {"optimizer": "disk", "params": "disk", "gradients": "disk"}),
    "disk, whole": (0, 1, {"optimizer": "disk", "params": "disk", "gradients": "disk"}),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_lies_elsewhere(name, tmp_path):
    """A gradient leaves for the optimizer's memory in the graph, where it is complete there."""
    stage, count, options = ELSEWHERE[name]
    tx = sl.optim.chain(sl.optim.clip_by_global_norm(0.3), sl.optim.adamw(1e-2))

    def found(folder, compile):
        disk = {"folder": tmp_path / folder} if "disk" in name else {}
        transform = sl.chain(sl.zero(stage), sl.offload(**options, **disk), sl.accumulate(count))
        return sl.simulate(trained, transform, [compile] * 3, tx, mesh={"data": 2})

    for (eager, _), (compiled, graphs) in zip(found("a", False), found("b", True), strict=True):
        assert relative_error(compiled, eager)[0] == 0
        (graph,) = graphs
        assert any(node.target is landed for node in graph.nodes) == (count == 1 or "gradients" in options)


OWNERS = {
    "onebit_adam": sl.optim.onebit_adam(1e-2, 2),
    "zero_one_adam": sl.optim.zero_one_adam(1e-2, 2),
}


@pytest.mark.parametrize("name", ["1 bit", "int8", "factors", *OWNERS])
def test_states_go_on_from_a_step_with_a_graph_to_one_without(name):
    codecs = {"1 bit": [sl.onebit()], "int8": [sl.quantize("int8", "int8")], "factors": [sl.powersgd(1)]}
    stage = {"int8": 3, "1 bit": 2}.get(name, 0)
    transform = sl.chain(sl.zero(stage), sl.accumulate(3 if stage == 2 else 1), *codecs.get(name, []))
    tx = OWNERS.get(name, sl.optim.adamw(1e-2))
    run = lambda how: sl.simulate(trained, transform, how, tx, mesh={"data": 2})  # noqa: E731
    mixed = run([True, True, False, True, False])
    for (eager, _), (changing, graphs) in zip(run([False] * 5), mixed, strict=True):
        assert relative_error(changing, eager)[0] == 0 and len(graphs) == 1


REFUSED = {}


@pytest.mark.parametrize("name", REFUSED)
def test_plans_that_have_no_graph(name):
    with pytest.raises(IllegalComposition, match=rf"(?s)compile=True does not go together with.*{re.escape(name)}.*: "):
        steps(layers, [BATCH], True, REFUSED[name])


def on_a_rank(mesh, *transforms):
    """Parameters after steps with and without graphs, and the number of these, on a rank of its own process."""
    blocks, experts = "pipe" in mesh.shape, "experts" in str(transforms)
    moe = gpt.Experts((0, 4), sl.nn.MoEConfig(sl.nn.routers.top_k(2)), hidden=6) if experts else None
    loss_fn, params = tiny_gpt(dropout=0.1, moe=moe)
    if blocks:
        loss_fn, params = gpt.make_sequential(replace(TINY, dropout=0.1)), gpt.to_blocks(params)
    found = []
    for compile in (False, True):
        sharded = sl.shard(params, mesh, sl.chain(*transforms, DIVIDED if "model" in mesh.shape else sl.remat()))
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.adamw(1e-2), rng=3, compile=compile)
        for batch in token_batches(3, 8):
            state, metrics = step(state, batch if blocks else share(batch, mesh.coords["data"], mesh.shape["data"]))
        found.append((sl.unshard(state.params), metrics["loss"]))
    return (*found, len(step.graph.graphs))


IN_PROCESSES = {
    "3": ({"data": 2}, sl.zero(3)),
    "slices, inputs divided": ({"data": 1, "model": 2}, sl.zero(3), SLICES),
    "3 and experts": ({"data": 2}, sl.zero(3), sl.experts("data")),
    "3, in tiles, of some tokens": (
        {"data": 2},
        sl.chain(sl.zero(3), sl.tile("*/mlp/up/*", 2), sl.random_ltd(3, ends=0, layers="blocks/*")),
    ),
    "pipeline": ({"pipe": 2}, sl.pipeline("zb-h1", 2)),
}


@pytest.mark.parametrize("name", IN_PROCESSES)
def test_in_processes(pool, name):
    mesh, *transforms = IN_PROCESSES[name]
    found = pool.run(on_a_rank, *transforms, mesh=mesh)
    assert all(relative_error(compiled, eager)[0] == 0 for eager, compiled, _ in found)
    # The first stage has no carry, of which a gradient would be sent.
    assert [graphs for *_, graphs in found] == ([2, 3] if "pipe" in mesh else [1, 1])


@pytest.mark.parametrize("kind", ["llama", "mixtral", "mixtral, dealt out", "bert", "vit"])
def test_models_of_transformers(kind):
    """The embeddings of BERT are tied: their two gradients are added in another order."""
    torch.manual_seed(0)
    tied, dealt = kind == "bert", "dealt" in kind
    module = build(kind.split(",")[0])
    module = huggingface.with_experts(module) if dealt else module
    apply, params = sl.from_module(module.double() if tied else module)
    name = "pixel_values" if kind == "vit" else "input_ids"
    x = torch.rand(8, 3, 8, 8) if kind == "vit" else torch.randint(50, (8, 6))

    def loss_fn(params, batch):
        return apply(params, **batch).loss

    batch = {name: x, "labels": torch.randint(5, (8,)) if kind == "vit" else x}
    transform = sl.zero(3) if tied else sl.chain(sl.zero(3), sl.precision("bf16"))
    if dealt:
        experts = sl.experts("data", rules=huggingface.expert_rules(module))
        transform = sl.chain(experts, sl.zero(3), sl.precision("bf16"))
    check(both(loss_fn, params, [batch] * 2, transform), 1e-12 if tied else 0)


def test_a_model_whose_first_call_after_a_change_is_another():
    """A copy that takes over what was done to the module, as in eval(), detaches parameters in that call alone."""

    def run(mesh, compile):
        torch.manual_seed(0)
        module = build("gpt2", resid_pdrop=0.2)
        apply, params = sl.from_module(module.train())
        loss_fn = lambda params, batch: apply(params, **batch).loss  # noqa: E731
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, stage=3), sl.optim.sgd(0.1), compile=compile)
        x, found = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(1)), []
        for number in range(4):
            if number == 2:
                module.eval()
            state, metrics = step(state, {"input_ids": x, "labels": x})
            found.append(metrics["loss"].item())
        return found, str(step.graph).count("compiled in") if compile else 1

    (eager, _), (compiled, graphs) = (sl.simulate(run, compile, mesh={"data": 2})[0] for compile in (False, True))
    assert compiled == eager and graphs == 1


def test_merged_units_are_whole_two_at_a_time(monkeypatch):
    monkeypatch.setattr(merge, "SMALLEST", Threshold(12_000))
    loss_fn, params = tiny_gpt(layers=6)
    results = both(loss_fn, params, token_batches(1, 4), sl.zero(3))
    graph = check(results)
    assert exchanges([graph], "gather") == [4] and exchanges([graph], "reduce-scatter") == [3]
    assert peak_of_wholes(graph).units == 2


def held(mesh, *transforms, **changes):
    """The most bytes that a graph holds on each rank: as measured, and as it says."""
    loss_fn, params = tiny_gpt(**changes)

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.chain(sl.zero(3), *transforms))
        stage = GraphStage(loss_fn, sharded.plan, mesh)
        step = LossStep(loss_fn, sharded.plan, mesh, False, run_by=lambda *args, **kwargs: stage)
        batch = share(token_batches(1, 4, replace(TINY, **changes))[0], mesh.coords["data"], mesh.shape["data"])
        step(sharded, batch, None, None, comm={}, equal={})
        ((_, traced),) = stage._graphs.named()
        module, live = traced.module, LiveBytes()

        def measured(*inputs):
            with live:
                return module(*inputs)

        traced.module = measured
        step(sharded, batch, None, None, comm={}, equal={})
        return live.peak, max(map(sum, alive(traced.graph)))

    return sl.simulate(run, mesh=mesh)


@pytest.mark.parametrize(
    "remat",
    [(), (sl.remat(),), (sl.remat(save="attn/out"),), (sl.remat(blocks=1),)],
    ids=["kept", "recomputed", "named", "a block"],
)
def test_bytes_at_each_node_are_those_of_a_run(remat):
    for peak, said in held({"data": 2}, *remat, layers=3):
        assert said == pytest.approx(peak, rel=0.01)


def test_sums_are_told_from_nodes_of_the_same_names():
    """Of three layers one has a bias, whose gradient is a node ``sum_1``."""
    generator = torch.Generator().manual_seed(0)
    params = {name: {"w": torch.randn(4, 4, generator=generator)} for name in "abc"}
    params["a"]["b"] = torch.zeros(4)

    def loss_fn(params, batch):
        for layer in params.values():
            batch = torch.tanh(F.linear(batch, layer["w"], layer.get("b")))
        return batch.square().mean()

    batches = [torch.randn(8, 4, generator=generator) for _ in range(2)]
    check(both(loss_fn, params, batches, sl.chain(sl.zero(3), sl.accumulate(2))))


def test_bytes_of_inputs_that_are_divided():
    """Each rank holds half of each, but for what it computes with: as measured, and as said."""
    mesh, changes = {"data": 1, "model": 2}, {"layers": 12, "sequence": 32}
    whole, divided = (held(mesh, SLICES, remat, **changes)[0] for remat in (sl.remat(), DIVIDED))
    assert whole[0] == whole[1] and divided[0] == divided[1]
    assert whole[0] - divided[0] > (12 / 2 - 2) * 4 * 32 * TINY.width * 4


@pytest.mark.parametrize(
    "remat",
    [sl.remat(save="mlp/hidden"), sl.remat(blocks=2), sl.remat(of_products), DIVIDED],
    ids=["named", "blocks", "policy", "divided"],
)
def test_a_graph_holds_what_is_held_without(remat):
    config = gpt.GPTConfig(vocab=16, layers=6, width=16, heads=2, sequence=64)
    rules = sl.tensor_slicing(gpt.slicing_rules(config), axis="model")

    def run(mesh, compile):
        params, live = sl.shard(gpt.init(config), mesh, sl.chain(rules, sl.zero(3), remat)), LiveBytes()
        state, step = sl.make_train_step(gpt.make_loss(config), params, sl.optim.sgd(0.1), compile=compile)
        (batch,) = token_batches(1, 8, config)
        state, _ = step(state, batch)
        with live:
            step(state, batch)
        return live.peak

    eager, compiled = (sl.simulate(run, compile, mesh={"data": 1, "model": 2})[0] for compile in (False, True))
    assert compiled <= 1.02 * eager, (eager, compiled)
