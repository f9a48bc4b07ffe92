"""Models whose sequences are cut over a mesh axis train like one device, with every kind, or are refused."""

import functools
import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import training
from helpers.measure import SCALARS, count_payload
from helpers.models import TINY, tiny_gpt, token_batches
from helpers.profile import NIGHTLY
from helpers.trees import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import one_device
from torch.utils.checkpoint import CheckpointPolicy

import shardlib as sl
from shardlib import checkpoint
from shardlib.collectives.sequence import Attention, Ring, Ulysses
from shardlib.collectives.sequence.ring import _Trip
from shardlib.errors import IllegalComposition, LossError, SpecError
from shardlib.models import gpt
from shardlib.nn.attention import plain_attention

SIZES = {"vocab": 32, "width": 16, "heads": 8, "sequence": 8}
CONFIG = replace(TINY, **SIZES)
STEPS, ROWS, MAX_NORM = 6 if NIGHTLY else 3, 8, 0.3
RULES = gpt.slicing_rules(CONFIG)
BLOCKS = {glob: style for glob, style in RULES.items() if glob.startswith("blocks")}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def cut(kind, *others, rules=RULES):
    """Sequences over axis "seq"; with its layers sliced there too, where the kind asks for it."""
    return sl.chain(
        sl.sequence("seq", kind), *([sl.tensor_slicing(rules, axis="seq")] if kind == "megatron" else []), *others
    )


@functools.cache
def expected(dtype, steps, **changes):
    loss_fn, params = tiny_gpt(dtype, **SIZES, **changes)
    return one_device.train(loss_fn, params, token_batches(steps, ROWS, CONFIG), max_norm=MAX_NORM)


def check(mesh, transform, dtype=torch.float64, steps=STEPS, **changes):
    loss_fn, params = tiny_gpt(dtype, **SIZES, **changes)
    batches = token_batches(steps, ROWS, CONFIG)
    got = training.simulate(mesh, loss_fn, params, batches, transform, training.optimizer(MAX_NORM))
    losses, norms, final = expected(dtype, steps, **changes)
    assert got[0] == pytest.approx(losses, rel=TOLERANCE[dtype], abs=0)
    assert got[1] == pytest.approx(norms, rel=TOLERANCE[dtype] * 10, abs=0)
    assert_close(got[2], final, TOLERANCE[dtype])


KINDS = ("megatron", "ulysses", "ring")


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_every_stage(kind, stage):
    check({"data": 2, "seq": 2}, cut(kind, sl.zero(stage), sl.accumulate(2)))


@pytest.mark.parametrize("kind", KINDS)
def test_in_fp32(kind):
    check({"data": 2, "seq": 2}, cut(kind, sl.zero(3)), torch.float32, steps=20)


@pytest.mark.parametrize(
    ("mesh", "others"),
    [
        ({"seq": 2}, ()),
        ({"seq": 4}, (sl.remat("dots"),)),
        ({"seq": 4, "data": 2}, (sl.zero(3), sl.remat(), sl.accumulate(2))),
        ({"data": 2, "seq": 1}, (sl.zero(1),)),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_meshes_and_chains(kind, mesh, others):
    check(mesh, cut(kind, *others))


@settings(max_examples=settings().max_examples // 3)
@given(
    kind=st.sampled_from(KINDS),
    sizes=st.permutations([("data", 2), ("seq", 2)]) | st.just([("seq", 4)]),
    stage=st.integers(0, 3),
    both=st.booleans(),
    remat=st.sampled_from([None, "full", "dots"]),
    microbatches=st.sampled_from([1, 2, 4]),
    rules=st.sampled_from([RULES, BLOCKS]),
    tie=st.booleans(),
)
def test_any_chain(kind, sizes, stage, both, remat, microbatches, rules, tie):
    others = [sl.accumulate(microbatches)]
    others += [sl.zero(stage)] if len(sizes) > 1 else []
    others += [sl.zero(stage, axis="seq")] if both and kind != "megatron" else []
    others += [sl.remat(remat)] if remat else []
    check(dict(sizes), cut(kind, *others, rules=rules), tie=tie)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tied_embedding(kind):
    check({"data": 2, "seq": 2}, cut(kind, sl.zero(3)), tie=True)


@pytest.mark.parametrize("stage", [0, 3])
def test_megatron_with_whole_embeddings(stage):
    """Each rank looks up, and scores, its own positions."""
    check({"data": 2, "seq": 2}, cut("megatron", sl.zero(stage), rules=BLOCKS))
    check({"data": 2, "seq": 2}, cut("megatron", sl.zero(stage), rules=BLOCKS), tie=True)


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
@pytest.mark.parametrize("stage", range(4))
def test_the_state_is_split_over_the_sequences_axis_too(kind, stage):
    if stage % 2:
        check({"data": 2, "seq": 2}, cut(kind, sl.zero(stage), sl.zero(stage, axis="seq")))
    else:
        check({"seq": 4}, cut(kind, sl.zero(stage, axis="seq")))


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_with_layers_sliced_over_another_axis(kind):
    check({"model": 2, "seq": 4}, cut(kind, sl.tensor_slicing(RULES), sl.zero(2, axis="seq")))


def test_hybrid_sharding_and_frozen_leaves():
    transform = cut("ring", sl.zero(3, replicate="node"), sl.freeze("embed/*"))
    loss_fn, params = tiny_gpt(torch.float64, **SIZES)
    batches = token_batches(4, ROWS, CONFIG)
    frozen = [("embed", "tokens"), ("embed", "positions")]
    losses, norms, final = one_device.train(loss_fn, params, batches, frozen=frozen)
    mesh = {"node": 2, "data": 2, "seq": 2}
    got = training.simulate(mesh, loss_fn, params, batches, transform, training.optimizer())
    assert got[0] == pytest.approx(losses, rel=1e-10) and got[1] == pytest.approx(norms, rel=1e-9)
    assert_close(got[2], final, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_that_of_the_whole_sequence(kind):
    loss_fn, params = tiny_gpt(torch.float64, **SIZES, dropout=0.2)
    batches = token_batches(3, ROWS, CONFIG)
    alone = training.simulate({"data": 1}, loss_fn, params, batches, sl.zero(0), training.optimizer(), rng=5)
    for mesh, others in (({"seq": 4}, ()), ({"data": 2, "seq": 2}, (sl.zero(3), sl.remat()))):
        transform = cut(kind, *others)
        got = training.simulate(mesh, loss_fn, params, batches, transform, training.optimizer(), rng=5)
        assert got[0] == pytest.approx(alone[0], rel=1e-10)
        assert_close(got[2], alone[2], 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_16_bit(kind):
    """Against the same precision on one device: sums in another order, so to 16-bit rounding."""
    loss_fn, params = tiny_gpt(torch.float32, **SIZES)
    batches = token_batches(6, ROWS, CONFIG)
    alone = training.simulate({"data": 1}, loss_fn, params, batches, sl.precision("bf16"), training.optimizer(1.0))
    transform = cut(kind, sl.zero(3), sl.precision("bf16"))
    got = training.simulate({"data": 2, "seq": 2}, loss_fn, params, batches, transform, training.optimizer(1.0))
    assert got[0] == pytest.approx(alone[0], rel=2**-7)


def on_real_processes(mesh, transform):
    loss_fn, params = tiny_gpt(torch.float64, **SIZES)
    return training.train(
        mesh, loss_fn, params, token_batches(4, ROWS, CONFIG), transform, training.optimizer(MAX_NORM)
    )


@pytest.mark.parametrize(
    ("kind", "mesh", "others"),
    [
        ("megatron", {"data": 2, "seq": 2}, (sl.zero(3), sl.remat("dots"))),
        ("ulysses", {"data": 2, "seq": 2}, (sl.zero(3), sl.zero(3, axis="seq"), sl.remat("dots"))),
        ("ring", {"seq": 4}, (sl.remat(),)),
    ],
)
def test_real_processes(pool, kind, mesh, others):
    losses, norms, final = expected(torch.float64, 4)
    for got in pool.run(on_real_processes, cut(kind, *others), mesh=mesh):
        assert got[0] == pytest.approx(losses, rel=1e-10)
        assert got[1] == pytest.approx(norms, rel=1e-9)
        assert_close(got[2], final, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation(kind):
    """Whole logits, and the loss of the whole sequence, on every rank."""
    config = replace(CONFIG, dtype=torch.float64)
    loss_fn, params = tiny_gpt(torch.float64, **SIZES)
    batch = token_batches(1, 2, CONFIG)[0]

    def run(mesh):
        sharded = sl.shard(params, mesh, cut(kind))
        logits = sl.make_eval_step(lambda p, tokens: gpt.logits(config, p, tokens), sharded)
        return logits(sharded, batch["tokens"]), sl.make_eval_step(loss_fn, sharded)(sharded, batch)

    for logits, loss in sl.simulate(run, mesh={"seq": 4}):
        torch.testing.assert_close(logits, gpt.logits(config, params, batch["tokens"]), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(loss, loss_fn(params, batch), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["megatron", "ring"])
def test_a_checkpoint_resumes_without_the_axis(kind, tmp_path):
    loss_fn, params = tiny_gpt(torch.float64, **SIZES)
    batches = token_batches(6, ROWS, CONFIG)

    def start(mesh, transform):
        return sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), training.optimizer(MAX_NORM))

    def save(mesh):
        state, step = start(mesh, cut(kind, sl.zero(3), *([sl.zero(3, axis="seq")] if kind == "ring" else [])))
        for batch in batches[:3]:
            state, _ = step(state, training.share(batch, mesh.coords["data"], 2))
        checkpoint.save(tmp_path, state)

    def resume(mesh):
        state, step = start(mesh, sl.zero(1))
        state = checkpoint.restore(checkpoint.latest(tmp_path), state)
        for batch in batches[3:]:
            state, _ = step(state, training.share(batch, mesh.coords["data"], 2))
        return sl.unshard(state.params)

    sl.simulate(save, mesh={"data": 2, "seq": 2})
    for final in sl.simulate(resume, mesh={"data": 2}):
        assert_close(final, expected(torch.float64, 6)[2], 1e-10)


# attention, and the loss, alone


def part_of(x, plan, rank, ranks, dim):
    chunks = plan.chunks(rank, ranks, x.shape[dim])
    return torch.cat([x.narrow(dim, start, length) for start, length in chunks], dim)


def whole_of(parts, plan, dim):
    ranks, length = len(parts), sum(part.shape[dim] for part in parts)
    found = {}
    for rank, part in enumerate(parts):
        chunks = plan.chunks(rank, ranks, length)
        fragments = part.split([size for _, size in chunks], dim)
        found.update({start: fragment for (start, _), fragment in zip(chunks, fragments, strict=True)})
    return torch.cat([found[start] for start in sorted(found)], dim)


@given(
    kind=st.sampled_from([Ulysses, Ring]),
    ranks=st.integers(1, 4),
    batch=st.integers(1, 2),
    groups=st.integers(1, 2),
    queries=st.integers(1, 3),
    chunk=st.integers(1, 3),
    size=st.integers(1, 4),
    value_size=st.integers(1, 4),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.7]),
)
def test_attention_is_torchs(kind, ranks, batch, groups, queries, chunk, size, value_size, causal, scale):
    plan = kind("seq")
    groups *= ranks if kind is Ulysses else 1
    heads, length = groups * queries, 2 * chunk * ranks
    generator = torch.Generator().manual_seed(7)
    shapes = [(heads, size), (groups, size), (groups, value_size), (heads, value_size)]
    *inputs, weight = (
        torch.randn(batch, n, length, d, generator=generator, dtype=torch.float64) * 2 for n, d in shapes
    )
    inputs = [x.requires_grad_() for x in inputs]
    want = plain_attention(*inputs, Attention(causal, scale))
    grads = torch.autograd.grad((want * weight).sum(), inputs)

    def run(mesh):
        mine = [part_of(x.detach(), plan, mesh.rank, ranks, 2).requires_grad_() for x in inputs]
        out = plan.attention(*mine, Attention(causal, scale), plain_attention, mesh)
        given = part_of(weight, plan, mesh.rank, ranks, 2)
        return [out.detach(), *torch.autograd.grad((out * given).sum(), mine)]

    results = sl.simulate(run, mesh={"seq": ranks})
    for found, whole in zip(zip(*results, strict=True), [want, *grads], strict=True):
        torch.testing.assert_close(whole_of(found, plan, 2), whole.detach(), rtol=1e-10, atol=1e-12)


def test_a_key_mask_goes_with_what_is_causal():
    """A query sees the keys that are neither padding nor behind it."""
    q, k, v = torch.randn(3, 2, 4, 8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.arange(8) < torch.tensor([[8], [5]])
    seen = mask[:, None, None, :] & torch.ones(8, 8, dtype=torch.bool).tril()
    for causal, wanted in ((True, seen), (False, mask[:, None, None, :])):
        found = sl.nn.attention(q, k, v, causal=causal, key_mask=mask)
        assert torch.equal(found, F.scaled_dot_product_attention(q, k, v, wanted))


def test_causal_rings_share_the_work_evenly():
    """The elements of score blocks that each rank computes are equal on all ranks, and half of all except its own."""

    def work(mesh):
        trip, met = _Trip(mesh, "seq", True, None), 0
        for step in range(4):
            rows, columns, _ = trip.block(step, 6)
            met += (rows.stop - rows.start) * (columns.stop - columns.start)
        return met

    assert sl.simulate(work, mesh={"seq": 4}) == [36 + 3 * 18] * 4


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["ulysses", "ring", "megatron", "megatron, vocabulary"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_uneven_sequence_parts(kind, reduction, smoothing):
    """Ignored targets lie in one rank's part; the loss is still the mean of all that count."""
    kind, _, vocabulary = kind.partition(", ")
    generator = torch.Generator().manual_seed(0)
    params = {
        "w": torch.randn(12, 6, generator=generator, dtype=torch.float64),
        "up": torch.randn(8, 6, generator=generator, dtype=torch.float64),
        "down": torch.randn(6, 8, generator=generator, dtype=torch.float64),
    }
    x = torch.randn(2, 8, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(12, (2, 8), generator=generator)
    targets[:, 5:] = 3  # a word, which is ignored
    options = {"ignore_index": 3, "label_smoothing": smoothing, "reduction": reduction}
    weight = torch.randn((2, 8) if reduction == "none" else (), generator=generator, dtype=torch.float64)

    def loss_fn(params, batch):
        h = sl.nn.shard_sequence(x)
        h = h + F.linear(F.linear(h, params["up"]).tanh(), params["down"])
        h = sl.nn.attention(*[h[:, None].expand(-1, 2, -1, -1)] * 3).sum(1) if kind != "megatron" else h
        losses = sl.nn.linear_cross_entropy(h, params["w"], targets, **options)
        return (losses * weight).sum()

    def alone(params):
        h = x + F.linear(F.linear(x, params["up"]).tanh(), params["down"])
        h = 2 * plain_attention(*[h[:, None]] * 3, Attention())[:, 0] if kind != "megatron" else h
        scores = F.linear(h, params["w"]).flatten(0, 1)
        losses = F.cross_entropy(scores, targets.flatten(), **options)
        return (losses.view(weight.shape) * weight).sum()

    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    want = alone(leaves)
    grads = dict(zip(leaves, torch.autograd.grad(want, list(leaves.values()))))
    rules = {"up": "column", "down": "row"} | ({"w": "vocab"} if vocabulary else {})

    def run(mesh):
        loss, found = sl.value_and_grad(loss_fn)(sl.shard(params, mesh, cut(kind, rules=rules)), x)
        return loss, sl.unshard(found)

    for loss, found in sl.simulate(run, mesh={"seq": 2}):
        torch.testing.assert_close(loss, want.detach(), rtol=1e-12, atol=1e-12)
        assert_close(found, grads, 1e-10)


@pytest.mark.parametrize(
    ("rules", "layer"),
    [
        ({"w": sl.column(gather=True), "b": "column"}, lambda p, x: F.linear(x, p["w"], p["b"])),
        ({"w": "vocab"}, lambda p, x: F.linear(x, p["w"]) + p["b"]),
        ({"w": sl.row(split=True)}, lambda p, x: F.linear(x, p["w"], p["b"])),
        ({"w": sl.row(split=True, transposed=True)}, lambda p, x: x @ p["w"] + p["b"]),
        (
            {"w": "column", "b": "column"},
            lambda p, x: sl.collectives.all_to_all(F.linear(x, p["w"], p["b"]), "seq", split_dim=1, concat_dim=2),
        ),
    ],
)  # fmt: skip
def test_layers_between_parts(rules, layer):
    """Megatron's: parts of the sequence go in and come out, whatever the slices do in between."""
    generator = torch.Generator().manual_seed(2)
    params = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in (("w", (6, 6)), ("b", (6,)))
    }
    x = torch.randn(2, 9, 6, generator=generator, dtype=torch.float64)

    def loss_fn(params, x):
        return sl.nn.sum_sequence(layer(params, sl.nn.shard_sequence(x).sin()).cos().sum()) / 100

    def alone(params):
        weight = params["w"] if getattr(rules["w"], "transposed", False) else params["w"].T
        return (x.sin() @ weight + params["b"]).cos().sum() / 100

    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    want = alone(leaves)
    grads = dict(zip(leaves, torch.autograd.grad(want, list(leaves.values()))))

    def run(mesh):
        loss, found = sl.value_and_grad(loss_fn)(sl.shard(params, mesh, cut("megatron", rules=rules)), x)
        return loss, sl.unshard(found)

    for loss, found in sl.simulate(run, mesh={"seq": 3}):
        torch.testing.assert_close(loss, want.detach(), rtol=1e-12, atol=1e-12)
        assert_close(found, grads, 1e-10)


# what is sent, and what is kept

ELEMENTS = {
    # A gather and a reduce-scatter each way for attention and for the MLP: what tensor slicing alone sends.
    "megatron": lambda ways, tokens, width: 8 * (ways - 1) * tokens * width // ways,
    # q, k, v and the output, each way.
    "ulysses": lambda ways, tokens, width: 8 * (ways - 1) * tokens * width // ways**2,
    # Keys and values forward; them and their gradients backward.
    "ring": lambda ways, tokens, width: 6 * (ways - 1) * tokens * width // ways,
}


@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_payload_of_a_layer_is_the_papers(kind, ways):
    """Counted at the group, as the traced plan says; beside the gradients of whole leaves, which are summed."""
    layers, rows = 3, 4
    config = replace(CONFIG, layers=layers, dtype=torch.float64)
    params, batch = gpt.init(config), token_batches(1, rows, config)[0]
    transform = cut(kind, rules=BLOCKS)
    plan = sl.make_plan(params, sl.abstract_mesh(seq=ways), transform, loss_fn=gpt.make_loss(config), batch=batch)
    tokens = rows * config.sequence
    assert plan.traces[0].activations == {"seq": layers * 8 * ELEMENTS[kind](ways, tokens, config.width)}
    whole = sum(math.prod(p.compute.shape) for p in plan.placements if "seq" not in p.compute.spec.axes)
    assert plan.payload()["seq"] == plan.traces[0].activations["seq"] + 2 * (ways - 1) * whole * 8 // ways

    def run(mesh):
        step = sl.value_and_grad(gpt.make_loss(config))
        sharded = sl.shard(params, mesh, transform)
        sent = count_payload(mesh)
        step(sharded, batch)
        return sent()

    for sent in sl.simulate(run, mesh={"seq": ways}):
        assert sent == plan.payload()


@pytest.mark.parametrize("kind", KINDS)
def test_payload_of_a_whole_chain_is_as_planned(kind):
    """The chain gathers parameters, recomputes activations (and repeats their exchanges), and has micro-batches."""
    config = replace(CONFIG, dtype=torch.float64)
    params, batch = gpt.init(config), token_batches(1, 4, config)[0]
    transform = cut(kind, sl.zero(3), sl.remat("dots"), sl.accumulate(2))
    sizes = {"data": 2, "seq": 2}
    plan = sl.make_plan(params, sl.abstract_mesh(**sizes), transform, loss_fn=gpt.make_loss(config), batch=batch)

    def run(mesh):
        step = sl.value_and_grad(gpt.make_loss(config))
        sharded = sl.shard(params, mesh, transform)
        step(sharded, batch)
        sent = count_payload(mesh)
        step(sharded, batch)
        return sent()

    for sent in sl.simulate(run, mesh=sizes):
        assert sent == plan.payload()


def test_a_recompute_policy_keeps_nothing_of_the_ring():
    """Its products are blocks of scores: kept, they would be those of the whole sequence."""
    seen = set()

    def policy(context, op, *args, **kwargs):
        seen.add(op)
        return CheckpointPolicy.PREFER_RECOMPUTE

    check({"seq": 2}, cut("ring", sl.remat(policy)), steps=2)
    assert torch.ops.aten.addmm.default in seen and torch.ops.aten.bmm.default not in seen


def test_consumers_of_one_input_share_its_gather():
    """Two layers that read one input: it is gathered once, and its gradient reduce-scattered once."""
    generator = torch.Generator().manual_seed(1)
    params = {name: torch.randn(4, 4, generator=generator, dtype=torch.float64) for name in ("a", "b", "out")}
    x = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64)

    def loss_fn(params, x):
        h = sl.nn.shard_sequence(x) + params["bias"]
        return sl.nn.sum_sequence(F.linear(F.linear(h, params["a"]) * F.linear(h, params["b"]), params["out"]).sum())

    def run(mesh):
        rules = {"a": "column", "b": "column", "out": "row"}
        sharded = sl.shard(params | {"bias": x[0, 0]}, mesh, cut("megatron", rules=rules))
        sent = count_payload(mesh, scalars=1)
        sl.value_and_grad(loss_fn)(sharded, x)
        return sent()["seq"]

    bias = 2 * 4 // 2  # its gradient is summed
    numbers = 2 * (SCALARS - 2) // 2  # and what all ranks must know; the loss and its weight are the same on them
    assert sl.simulate(run, mesh={"seq": 2}) == [8 * (4 * x.numel() // 2 + bias + numbers)] * 2


def saved_by_a_layer(mesh, transform, rows):
    """Bytes kept for backward by one layer: what a model of two keeps beyond one of one, parameters aside."""

    def run(mesh, layers):
        config = replace(CONFIG, layers=layers, dtype=torch.float64)
        loss_fn, batch = gpt.make_loss(config), token_batches(1, rows, config)[0]
        sharded = sl.shard(gpt.init(config), mesh, transform)
        ours = {buffer.untyped_storage()._cdata for buffer in sharded.buffers.values()}
        saved = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in ours:
                saved[storage._cdata] = storage.nbytes()
            return tensor

        def watched(params, batch):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                return loss_fn(params, batch)

        sl.value_and_grad(watched)(sharded, batch)
        return sum(saved.values())

    def both(mesh):
        return run(mesh, 2) - run(mesh, 1)

    return sl.simulate(both, mesh=mesh)


@pytest.mark.parametrize("ways", [1, 2, 4])
def test_activations_of_a_layer(ways):
    """Against arXiv 2205.05198, table 2, adapted: what this GPT keeps for backward, in elements.

    Without dropout, and with attention that never keeps its scores, a layer keeps of b·s·h: both norms' inputs and
    outputs (4), q, k and v (3), attention's result (1), and the MLP's inner values before and after its activation
    (8): 16·bsh, where the paper has 34 bytes·bsh (16 bits, three masks) + 5as/h for the scores. In their place stand
    a logarithm per query and head, and two numbers per token and norm.

    Tensor slicing shares out 12 of the 16. With the sequence cut too, the rest is shared out but for the layers' two
    inputs, which stay as they were gathered: the paper's 34/t would gather them once more in backward.
    """
    rows = 4
    tokens = rows * CONFIG.sequence
    bsh, numbers = tokens * CONFIG.width, 4 * tokens
    logs = tokens * CONFIG.heads
    found = {kind: saved_by_a_layer({"seq": ways}, cut(kind), rows) for kind in KINDS}
    slicing = saved_by_a_layer({"seq": ways}, sl.tensor_slicing(RULES, axis="seq"), rows)
    assert set(slicing) == {8 * (4 * bsh + numbers + (12 * bsh + logs) // ways)}
    whole = 0 if ways == 1 else 2 * bsh
    assert set(found["megatron"]) == {8 * (whole + (16 * bsh - whole + numbers + logs) // ways)}
    assert set(found["ring"]) == {8 * (16 * bsh + numbers + logs) // ways}
    # The result before and after its way back.
    twice = 0 if ways == 1 else bsh
    assert set(found["ulysses"]) == {8 * (16 * bsh + twice + numbers + logs) // ways}


# refused


def plan_of(transform, **mesh):
    return sl.make_plan(gpt.init(CONFIG), sl.abstract_mesh(**mesh), transform)


@pytest.mark.parametrize(
    ("transform", "mesh", "message"),
    [
        (
            sl.chain(sl.sequence("seq"), sl.sequence("other", "ring")),
            {"seq": 2, "other": 2},
            r"sequence\('other', kind='ring'\) and sequence\('seq'\) both claim",
        ),
        (sl.sequence("seq"), {"data": 2}, "uses axis 'seq', which abstract_mesh"),
        (sl.sequence("seq", "megatron"), {"seq": 2}, r"needs tensor_slicing\(rules, axis='seq'\)"),
        (
            sl.chain(sl.sequence("seq", "ring"), sl.tensor_slicing(RULES, axis="seq")),
            {"seq": 2},
            r"'seq': sequence\('seq', kind='ring'\) cuts .*, and tensor_slicing\({.*'}, axis='seq'\) (.|\n)*='megatron'",
        ),
        (
            cut("megatron", sl.zero(3, axis="seq")),
            {"seq": 2},
            r"zero\(3, axis='seq'\) divides .*, and sequence\('seq', kind='megatron'\) .*\n.*, and tensor_slicing\({'b",
        ),
    ],
)
def test_chains_that_make_no_sense(transform, mesh, message):
    with pytest.raises(IllegalComposition, match=message):
        plan_of(transform, **mesh)


@pytest.mark.parametrize("kind", ["striped", Ring("seq"), None, str])
def test_an_unknown_kind(kind):
    result = re.escape(f"kind={kind!r}) is not one of 'megatron', 'ulysses', 'ring', and makes no")
    with pytest.raises(IllegalComposition, match=result):
        sl.sequence("seq", kind)


def test_the_plan_prints_the_kind():
    plan = plan_of(cut("ring"), seq=2)
    assert "sequence('seq', kind='ring'): sequence=ring over axis 'seq'" in str(plan)
    assert plan != plan_of(cut("ulysses"), seq=2) and plan == plan_of(cut("ring"), seq=2)


def step_with(loss_fn, params, kind, batch, ways=2, rules=RULES):
    def run(mesh):
        return sl.value_and_grad(loss_fn)(sl.shard(params, mesh, cut(kind, rules=rules)), batch)

    return sl.simulate(run, mesh={"seq": ways})


@pytest.mark.parametrize(
    ("kind", "length", "fragments"),
    [("megatron", 6, 4), ("ulysses", 7, 4), ("ring", 6, "4 .*two chunks a rank, 8 in all")],
)
def test_lengths_that_do_not_divide(kind, length, fragments):
    loss_fn, params = tiny_gpt(**SIZES)
    batch = token_batches(1, 2, replace(CONFIG, sequence=length))[0]
    with pytest.raises(SpecError, match=f"length {length} does not divide over axis 'seq' of size {fragments}"):
        step_with(loss_fn, params, kind, batch, ways=4)


def test_heads_that_do_not_divide():
    sizes = SIZES | {"heads": 2}
    loss_fn, params = tiny_gpt(**sizes)
    with pytest.raises(
        SpecError, match="2 query heads and 2 key and value heads do not divide over axis 'seq' of size 4"
    ):
        step_with(loss_fn, params, "ulysses", token_batches(1, 2, CONFIG)[0], ways=4)

    def grouped(mesh):
        inputs = torch.ones(1, 4, 2, 2), *[torch.ones(1, 2, 2, 2)] * 2
        Ulysses("seq").attention(*inputs, Attention(), plain_attention, mesh)

    with pytest.raises(SpecError, match="2 key and value heads do not"):
        sl.simulate(grouped, mesh={"seq": 4})


X = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
TARGETS = torch.zeros(2, 4, dtype=torch.int64)


def attended(p, x):
    h = F.linear(sl.nn.shard_sequence(x), p["w"])[:, None]
    return sl.nn.attention(h, h, h)[:, 0]


@pytest.mark.parametrize(
    ("kind", "loss", "error", "message"),
    [
        # Nothing is cut: every rank would count everything.
        ("ulysses", lambda p, x: F.linear(x, p["w"]).sum(), LossError, "never calls(.|\n)*shard_sequence(.|\n)*sl.nn.atten"),
        # Each rank would attend within its own part.
        (
            "ring",
            lambda p, x: sl.nn.sum_sequence(F.linear(sl.nn.shard_sequence(x), p["w"]).sum()),
            LossError,
            "sl.nn.attention",
        ),
        # Each rank's own mean.
        ("ring", lambda p, x: (sl.nn.sum_sequence(x.sum()), attended(p, x).mean())[1], LossError, "loss differs along axis"),
        (
            "ring",
            lambda p, x: sl.Mean(sl.nn.sum_sequence(attended(p, x).sum()), sl.nn.shard_sequence(x).abs().sum()),
            LossError,
            "weight",
        ),
        (
            "ring",
            lambda p, x: sl.nn.linear_cross_entropy(attended(p, x), p["w"], sl.nn.shard_sequence(TARGETS)),
            SpecError,
            r"got targets \(2, 2\) and x",
        ),
        (
            "ring",
            lambda p, x: sl.nn.linear_cross_entropy(attended(p, x).flatten(0, 1), p["w"], TARGETS.flatten()),
            SpecError,
            "pass \\(batch, sequence\\) and \\(batch, sequence / 2, width\\)",
        ),
        ("megatron", lambda p, x: F.linear(x[:, 0], p["w"]).sum(), SpecError, r"got shape \(2, 6\)"),
        (
            "ring",
            lambda p, x: sl.nn.sum_sequence(torch.autograd.grad(attended(p, x).sum(), p["w"], create_graph=True)[0].sum()),
            LossError,
            "no second derivative",
        ),
    ],
)  # fmt: skip
def test_a_model_that_would_train_wrongly(kind, loss, error, message):
    with pytest.raises(error, match=message):
        step_with(loss, {"w": torch.eye(6)}, kind, X, rules={"w": "column"})


def in_stages(mix, leave):
    """``(loss_fn, params)``: what enters, mixes and leaves the sequence's parts, each in a block of its own."""
    first = lambda p, _, x: F.linear(sl.nn.shard_sequence(x), p["w"])[:, None]  # noqa: E731
    blocks = [first, lambda p, h, _: mix(h * p["w"][0]), lambda p, h, _: leave((h * p["w"][0]).square())]
    generator = torch.Generator().manual_seed(3)
    return sl.sequential(blocks), [{"w": torch.randn(6, 6, generator=generator, dtype=torch.float64)} for _ in blocks]


def step_in_stages(mesh, mix, leave):
    loss_fn, params = in_stages(mix, leave)
    sharded = sl.shard(params, mesh, sl.chain(sl.sequence("seq", "ring"), sl.pipeline("1f1b", 2)))
    return sl.value_and_grad(loss_fn)(sharded, X.double())[0]


def attend(h):
    return sl.nn.attention(h, h, h)


def own_mean(h):
    sl.nn.sum_sequence(h.sum())
    return h.mean()


@pytest.mark.parametrize(
    ("mix", "leave", "message"),
    [
        (torch.sin, lambda h: sl.nn.sum_sequence(h.sum()), r"never calls\n  - sl.nn.attention [^-]*\nUse these"),
        (attend, torch.mean, r"never calls\n  - sl.nn.linear_cross_entropy[^-]*\nUse these"),
        (attend, own_mean, r"loss differs along axis 'seq'.*rank 0: \d.* rank 1: \d"),
    ],
)
def test_stages_that_would_train_wrongly(pool, mix, leave, message):
    """Steps lie in several stages and the loss in one: every rank raises."""
    for good, error in pool.outcomes(step_in_stages, mix, leave, mesh={"pipe": 2, "seq": 2}):
        assert not good and isinstance(error, LossError) and re.search(message, str(error)), error
    if leave is not own_mean:  # what is left out shows without ranks
        loss_fn, params = in_stages(mix, leave)
        with pytest.raises(LossError, match=message):
            sl.make_plan(
                params, sl.abstract_mesh(pipe=2, seq=2), sl.chain(sl.sequence("seq", "ring"), sl.pipeline("1f1b", 2)),
                loss_fn=loss_fn, batch=X.double(),
            )  # fmt: skip


def test_stages_that_train_rightly():
    def leave(h):
        return sl.nn.sum_sequence(h.sum())

    loss_fn, params = in_stages(attend, leave)
    for loss in sl.simulate(step_in_stages, attend, leave, mesh={"pipe": 3, "seq": 2}):
        torch.testing.assert_close(loss, loss_fn(params, X.double()) / 2)  # a sum, in two micro-batches


def test_keys_of_another_length():
    def run(mesh, queries, keys):
        inputs = torch.ones(1, 2, queries, 2), *[torch.ones(1, 2, keys, 2)] * 2
        Ring("seq").attention(*inputs, Attention(), plain_attention, mesh)

    for lengths in ((4, 2), (3, 3)):
        with pytest.raises(SpecError, match=r"got \d keys and \d queries"):
            sl.simulate(run, *lengths, mesh={"seq": 2})


def test_generating_is_refused():
    _, params = tiny_gpt(**SIZES)

    def run(mesh):
        sl.generate(CONFIG, sl.shard(params, mesh, cut("ring")), TARGETS[:, :3], 1)

    with pytest.raises(IllegalComposition, match=r"one token at a time, which sequence\(...\) cannot cut"):
        sl.simulate(run, mesh={"seq": 2})
