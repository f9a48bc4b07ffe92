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
from shardlib.execute.graph.analysis import alive
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
    """Equal with and without graphs; returns the runner of graphs, without which they cannot be read."""
    eager, compiled = (trained(loss_fn, params, batches, *args, compile=how, **options) for how in (False, True))
    found = [tree_map(torch.as_tensor, results[:2]) for results in (compiled, eager)]
    error, path = relative_error(*found)
    assert error <= tolerance, f"{path}: {error}"
    return compiled[2].graph


CHAINS = {
    "0": ({"data": 1}, sl.zero(0)),
    "3 in 2 micro-batches, recomputed": ({"data": 2}, sl.zero(3), sl.accumulate(2), sl.remat()),
    "2, recomputed, in host memory": ({"data": 1}, sl.zero(2), sl.remat(store="host", smallest=0)),
    "zero-bubble": ({"pipe": 2}, sl.pipeline("zb-h1", 2)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_gpt(name):
    """With draws, whose places in the batch depend on its length."""
    mesh, *chain = CHAINS[name]
    loss_fn, params = tiny_gpt(sequence=64, dropout=0.1, layers=1)
    if "pipe" in mesh:
        config = gpt.GPTConfig(**TINY.__dict__ | {"sequence": 64, "dropout": 0.1, "layers": 1})
        loss_fn, params = gpt.make_sequential(config), gpt.to_blocks(params)
    lengths = LENGTHS if name == "0" else LENGTHS[:4]
    batches = [tokens(length, number) for number, length in enumerate(lengths)]
    runner = check(loss_fn, params, batches, sl.chain(*chain), mesh, rng=3)
    assert len(runner.graphs) == (4 if "pipe" in mesh else 2)  # forward and backward apart
    assert any("of any length" in name for name in runner.graphs)
    for graph in runner.graphs.values():  # bytes as of the length of the trace
        assert all(type(size) is int for sizes in alive(graph) for size in sizes)


def test_sequence_parts():
    loss_fn, params = tiny_gpt(sequence=64, layers=1)
    batches = [tokens(length, number) for number, length in enumerate([12, 10, 20, 14])]
    assert len(check(loss_fn, params, batches, sl.sequence("model", "ulysses"), {"model": 2}).graphs) == 2


@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_experts(padded):
    router = sl.nn.routers.top_k(2, capacity=sl.nn.routers.Capacity(1.1) if padded else None)
    moe = gpt.Experts((4,), sl.nn.MoEConfig(router), hidden=6, z=0.1)
    loss_fn, params = tiny_gpt(sequence=64, layers=1, moe=moe)
    chain = sl.chain(sl.experts(padded=padded), sl.zero(3, axis="expert"))
    batches = [tokens(length, number) for number, length in enumerate([12, 10, 20])]
    assert len(check(loss_fn, params, batches, chain, {"expert": 2}).graphs) == 2


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


def of_all_kinds(x):
    lower = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return arange(x) & lower & TABLE[: x.shape[1], : x.shape[1]] & padding(x)


def scored(logits, batch):
    return F.cross_entropy(logits.view(-1, TINY.vocab), batch["targets"].reshape(-1), reduction="sum")


def divided(made, batch):
    """Quotients by lengths, and the root of one."""
    length = batch["tokens"].shape[1]
    return scored(made, batch) / batch["tokens"].numel() * (1.0 / length**0.5)


def weighted(made, batch):
    """Half of the positions, what is padded, and weights that are lengths."""
    rows, length = batch["tokens"].shape
    first = {"targets": batch["targets"][:, : length // 2]}
    later = F.pad(made, (0, 0, 1, 0))[:, :-1].contiguous()
    total = scored(made[:, : length // 2].contiguous(), first) + scored(later, batch)
    return sl.Mean(total, rows * length) + sl.Mean(made.square().sum(), length)


@pytest.mark.parametrize("loss", [divided, weighted])
def test_masks_and_numbers_of_a_length(loss):
    logits, params = attention_of(of_all_kinds)
    batches = [tokens(length, number) for number, length in enumerate(LENGTHS[:3])]
    runner = check(lambda params, batch: loss(logits(params, batch), batch), params, batches)
    assert len(runner.graphs) == (4 if loss is weighted else 2)  # forward and backward apart


def test_lengths_that_equal_other_sizes():
    """Of the width, of the vocabulary, of the rows, of 1, and two lengths that are equal in some steps alone."""
    logits, params = attention_of(arange)

    def loss_fn(params, batch):
        rest = (batch["other"].unsqueeze(1) * params["out"][0]).square().sum()
        return scored(logits(params, batch), batch) + rest

    sizes = [(9, 5), (WIDTH, WIDTH), (6, 6), (6, 9), (TINY.vocab, 4), (1, 7), (7, 1), (2, 12)]
    batches = [
        tokens(one, number, 4) | {"other": torch.arange(float(other * WIDTH)).view(other, WIDTH) / 99}
        for number, (one, other) in enumerate(sizes)
    ]
    assert len(check(loss_fn, params, batches).graphs) == 4


LAYER = {"w": torch.arange(9.0).view(3, 3) / 9}


def inputs(*sizes):
    return [torch.arange(float(rows * length * 3)).view(rows, length, 3) / 99 for rows, length in sizes]


def test_rows_and_lengths():
    """Each that changes for the first time takes a trace."""

    def loss_fn(params, x):
        return (x @ params["w"]).softmax(1).square().mean()

    batches = inputs((4, 9), (4, 12), (4, 7), (6, 7), (2, 20), (8, 9), (3, 5))
    assert len(check(loss_fn, LAYER, batches).graphs) == 3


def test_branches_take_a_trace_each():
    def loss_fn(params, x):
        made = x @ params["w"]
        return (made.cumsum(1) if x.shape[1] % 2 else made).square().mean()

    assert len(check(loss_fn, LAYER, inputs((4, 6), (4, 8), (4, 7), (4, 10), (4, 9))).graphs) == 3


def test_a_loop_over_a_length_is_traced_for_each(caplog):
    """The graph that was used longest ago makes room for the ninth, and a warning names what changes."""

    def loss_fn(params, x):
        state = torch.zeros(x.shape[0], 3)
        for part in x.unbind(1):
            state = torch.tanh(state @ params["w"] + part)
        return state.square().mean()

    runner = check(loss_fn, LAYER, inputs(*((4, length) for length in (*range(2, 12), 11, 2))))
    assert len(runner.graphs) == 8 and "form 11, of any length" in str(runner)
    told = [record.message for record in caplog.records if "9th form" in record.message]
    assert len(told) == 1 and "the batch changes in shape" in told[0]


def test_aux_of_a_length_is_that_of_the_batch():
    def loss_fn(params, x):
        return (x @ params["w"]).mean(), {"length": x.shape[1]}

    def lengths(compile):
        state, step = sl.make_train_step(loss_fn, LAYER, sl.optim.sgd(0.1), compile=compile)
        found = []
        for x in inputs((2, 4), (2, 5), (2, 6), (2, 4), (2, 7)):
            state, metrics = step(state, x)
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
    assert len(check(loss_fn, params, [batch(length) for length in (7, 5, 6, 12)]).graphs) == 2
