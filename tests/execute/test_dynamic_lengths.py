"""Batches of other lengths in every step run by one graph, as without one; and what a length may not be taken for."""

import random

import pytest
import torch
import torch.nn.functional as F
from helpers.architectures import build
from helpers.models import TINY, tiny_gpt
from helpers.trees import relative_error
from optree import tree_map

import shardlib as sl
from shardlib.execute.batches import batch_index
from shardlib.execute.graph.alive import alive
from shardlib.models import gpt

LENGTHS = random.Random(3).choices(range(5, 41), k=30)


def tokens(length, number, rows=8):
    drawn = torch.randint(TINY.vocab, (rows, length + 1), generator=torch.Generator().manual_seed(number))
    return {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}


def trained(loss_fn, params, batches, transform=None, mesh=None, compile=True, **options):
    """Losses, parameters and the step of the first rank after a step of each batch."""

    def run(mesh):
        sharded = sl.shard(params, mesh, transform or sl.zero(0))
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.adamw(1e-2), compile=compile, **options)
        losses, index, ranks = [], batch_index(sharded.plan, mesh), sharded.plan.batch_ranks
        for batch in batches:
            state, metrics = step(state, tree_map(lambda leaf: leaf.chunk(ranks)[index], batch))
            losses.append(metrics["loss"].item())
        return losses, tree_map(torch.clone, sl.unshard(state.params)), step

    return sl.simulate(run, mesh=mesh or {"data": 1})[0]


def check(loss_fn, params, batches, *args, tolerance=0.0, **options):
    """Equal with and without graphs; returns the graphs."""
    eager, compiled = (trained(loss_fn, params, batches, *args, compile=how, **options) for how in (False, True))
    found = [tree_map(torch.as_tensor, results[:2]) for results in (compiled, eager)]
    error, path = relative_error(*found)
    assert error <= tolerance, f"{path}: {error}"
    return compiled[2].graph.graphs


CHAINS = {
    "0": ({"data": 1}, sl.zero(0)),
    "3, recomputed": ({"data": 2}, sl.zero(3), sl.remat()),
    "3, recomputed in host memory": ({"data": 2}, sl.zero(3), sl.remat(store="host", smallest=0)),
    "2 in 2 micro-batches": ({"data": 2}, sl.zero(2), sl.accumulate(2)),
    "pipeline": ({"pipe": 2}, sl.pipeline("zb-h1", 2)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_gpt(name):
    """With draws, whose places in the batch depend on its length."""
    mesh, *chain = CHAINS[name]
    loss_fn, params = tiny_gpt(sequence=64, dropout=0.1, layers=1)
    if name == "pipeline":
        config = gpt.GPTConfig(**TINY.__dict__ | {"sequence": 64, "dropout": 0.1, "layers": 1})
        loss_fn, params = gpt.make_sequential(config), gpt.to_blocks(params)
    lengths = LENGTHS if name == "0" else LENGTHS[:5]
    graphs = check(
        loss_fn, params, [tokens(length, n) for n, length in enumerate(lengths)], sl.chain(*chain), mesh, rng=3
    )
    assert len(graphs) == (2 if name != "pipeline" else 2 * 2)
    assert any("of any length" in name for name in graphs)
    for graph in graphs.values():  # bytes as of the length of the trace
        assert all(type(size) is int for sizes in alive(graph) for size in sizes)


def test_rows_and_lengths():
    """Each that changes for the first time takes a trace."""
    logits, params = attention_of(arange)
    sizes = [(9, 4), (12, 4), (7, 4), (7, 6), (20, 2), (9, 8), (5, 3)]
    batches = [tokens(length, n, rows) for n, (length, rows) in enumerate(sizes)]
    assert len(check(lambda params, batch: scored(logits(params, batch), batch), params, batches)) == 3


PARALLEL = {
    "ulysses": ({"model": 2}, None, sl.sequence("model", "ulysses")),
    "experts": ({"expert": 2}, sl.nn.routers.top_k(2), sl.experts(), sl.zero(1, axis="expert")),
    "experts with a capacity": (
        *({"expert": 2}, sl.nn.routers.top_k(2, capacity=sl.nn.routers.Capacity(1.1))),
        *(sl.experts(padded=True), sl.zero(3, axis="expert")),
    ),
}


@pytest.mark.parametrize("name", PARALLEL)
def test_parts_and_experts(name):
    mesh, router, *chain = PARALLEL[name]
    moe = router and gpt.Experts((4,), sl.nn.MoEConfig(router), hidden=6, z=0.1)
    loss_fn, params = tiny_gpt(sequence=64, layers=1, moe=moe)
    batches = [tokens(length, n) for n, length in enumerate([12, 10, 20, 14])]
    assert len(check(loss_fn, params, batches, sl.chain(*chain), mesh)) == 2


HEADS, WIDTH = 2, 8
TABLE = torch.ones(64, 64, dtype=torch.bool).tril()


def attention_of(mask):
    """A model of torch's own operations, with a mask of ``mask(tokens)``."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"table": (TINY.vocab, WIDTH), "places": (64, WIDTH), "qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
    params = {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}

    def logits(params, batch):
        rows, length = batch["tokens"].shape
        x = params["table"][batch["tokens"]] + params["places"][:length]
        q, k, v = F.linear(x, params["qkv"]).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT / 2).masked_fill(~mask(batch["tokens"]), -torch.inf).softmax(-1)
        x = x + F.linear((scores @ v).transpose(1, 2).reshape(rows, length, -1), params["out"])
        return x @ params["table"].T

    return logits, params


def arange(x):
    n = torch.arange(x.shape[1])
    return n[:, None] >= n


def padding(x):
    return arange(x) & (x > 3)[:, None, None] | torch.eye(x.shape[1], dtype=torch.bool)


MASKS = {
    "arange": arange,
    "tril": lambda x: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(),
    "padding": padding,
    "a table": lambda x: TABLE[: x.shape[1], : x.shape[1]],
}


def scored(logits, batch):
    return F.cross_entropy(logits.view(-1, TINY.vocab), batch["targets"].reshape(-1), reduction="sum")


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    logits, params = attention_of(MASKS[name])
    batches = [tokens(length, n) for n, length in enumerate(LENGTHS[:6])]
    graphs = check(lambda params, batch: scored(logits(params, batch), batch) / 50, params, batches, sl.zero(3))
    assert len(graphs) == 2


def by_weight(made, batch):
    return sl.Mean(scored(made, batch), batch["tokens"].numel())


def divided(made, batch):
    return scored(made, batch) / batch["tokens"].numel() * (1.0 / batch["tokens"].shape[1] ** 0.5)


def half(made, batch):
    some = batch["tokens"].shape[1] // 2
    return scored(made[:, :some].contiguous(), {"targets": batch["targets"][:, :some]})


def padded(made, batch):
    return scored(F.pad(made, (0, 0, 1, 0))[:, :-1].contiguous(), batch)


def of_two(made, batch):
    return by_weight(made, batch) + sl.Mean(made.square().sum(), batch["tokens"].shape[1])


@pytest.mark.parametrize("loss", [by_weight, divided, half, padded, of_two])
def test_numbers_of_a_length(loss):
    """Lengths in weights, factors and slices of a loss, as without a graph to the bit."""
    logits, params = attention_of(arange)
    batches = [tokens(length, n) for n, length in enumerate(LENGTHS[:6])]
    graphs = check(lambda params, batch: loss(logits(params, batch), batch), params, batches, sl.zero(3), {"data": 2})
    assert len(graphs) == (4 if loss is of_two else 2)  # forward and backward apart


def test_lengths_that_equal_other_sizes():
    """Of the width, of the vocabulary, of the rows, of 1, and two lengths that are equal in some steps alone."""
    logits, params = attention_of(arange)

    def loss_fn(params, batch):
        rest = (batch["other"].unsqueeze(1) * params["out"][0]).square().sum()
        return scored(logits(params, batch), batch) + rest

    sizes = [(WIDTH, 5), (WIDTH, WIDTH), (6, 6), (6, 9), (TINY.vocab, 6), (4, 4), (1, 7), (7, 1), (2, 12), (8, 8)]
    batches = [
        tokens(one, n, 4) | {"other": torch.arange(float(other * WIDTH)).view(other, WIDTH) / 99}
        for n, (one, other) in enumerate(sizes)
    ]
    assert len(check(loss_fn, params, batches)) <= 6


def test_branches_take_a_trace_each():
    logits, params = attention_of(arange)

    def loss_fn(params, batch):
        made = logits(params, batch)
        return scored(made * 2 if batch["tokens"].shape[1] % 2 else made, batch)

    assert len(check(loss_fn, params, [tokens(length, length) for length in (6, 8, 7, 10, 9, 12, 11)])) == 3


def test_a_loop_over_a_length_is_traced_for_each(caplog):
    """The graph that was used longest ago makes room for the ninth, and a warning names what changes."""
    params = {"w": torch.eye(3) / 2}

    def loss_fn(params, x):
        state = torch.zeros(len(x), 3)
        for part in x.unbind(1):
            state = torch.tanh(state @ params["w"] + part)
        return state.square().mean()

    batches = [torch.ones(4, length, 3) / length for length in (*range(2, 14), 13, 3)]
    assert len(check(loss_fn, params, batches)) == 8
    told = [record.message for record in caplog.records if "9th form" in record.message]
    assert len(told) == 1 and "the batch changes in shape" in told[0]


def test_aux_of_a_length_is_that_of_the_batch():
    params = {"w": torch.ones(3)}

    def loss_fn(params, x):
        return (x * params["w"]).mean(), {"length": x.shape[1]}

    def lengths(compile):
        state, step = sl.make_train_step(loss_fn, params, sl.optim.sgd(0.1), compile=compile)
        found = []
        for length in (4, 5, 6, 4, 7):
            state, metrics = step(state, torch.ones(2, length, 3))
            found.append(int(metrics["aux"]["length"]))
        return found

    assert lengths(True) == lengths(False)


def test_a_transformer():
    torch.manual_seed(0)
    apply, params = sl.from_module(build("llama"))

    def batch(length):
        x = torch.randint(50, (4, length), generator=torch.Generator().manual_seed(length))
        return {"input_ids": x, "labels": x, "attention_mask": (torch.arange(length) < length - 1).expand(4, -1).long()}

    loss_fn = lambda params, batch: apply(params, **batch).loss  # noqa: E731
    assert len(check(loss_fn, params, [batch(length) for length in (7, 5, 6, 12, 9, 15)], sl.zero(3))) == 2
