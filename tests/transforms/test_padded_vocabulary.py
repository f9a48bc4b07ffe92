"""Vocabularies that the axis does not divide: slices are padded with rows of zeros, which have no effect."""

import functools
from dataclasses import replace

import optree
import pytest
import torch
import torch.nn.functional as F
from helpers import training
from helpers.measure import count_payload, stored_bytes
from helpers.models import TINY, tiny_gpt, token_batches
from helpers.profile import NIGHTLY
from helpers.trees import assert_close
from oracle import one_device
from transforms.test_tensor_slicing import bert as masked
from transforms.test_tensor_slicing import gpt2, llama, made, of_vocab, resumed

import shardlib as sl
from shardlib import checkpoint
from shardlib.errors import IllegalComposition, SpecError
from shardlib.models import bert, gpt, huggingface

SIZES = {"width": 12, "heads": 4}
STEPS, MAX_NORM = 4 if NIGHTLY else 2, 0.3
VOCABS = {31: "a last rank with fewer", 5: "and, of four, one without any", 257: "a prime"}


def sliced(config, *others, blocks=False):
    return sl.chain(sl.tensor_slicing(gpt.slicing_rules(config, blocks)), *others)


def config_of(vocab, **changes):
    return replace(TINY, **SIZES, vocab=vocab, **changes)


@functools.cache
def model_and_batches(vocab, steps, **changes):
    config = config_of(vocab, **changes)
    loss_fn, params = tiny_gpt(torch.float64, **SIZES, vocab=vocab, **changes)
    return config, loss_fn, params, token_batches(steps, rows=24, config=config)


@functools.cache
def expected(vocab, steps, **changes):
    _, loss_fn, params, batches = model_and_batches(vocab, steps, **changes)
    return one_device.train(loss_fn, params, batches, max_norm=MAX_NORM)


def check(mesh, vocab, *others, steps=STEPS, **changes):
    config, loss_fn, params, batches = model_and_batches(vocab, steps, **changes)
    got = training.simulate(mesh, loss_fn, params, batches, sliced(config, *others), training.optimizer(MAX_NORM))
    training.assert_same_training(got, expected(vocab, steps, **changes), norms=1e-9)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("ways", [2, 4])
def test_trains_as_one_device(ways, vocab, tie):
    check({"model": ways}, vocab, tie=tie)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_every_stage(stage, tie):
    check({"data": 2, "model": 4}, 5, sl.zero(stage), sl.accumulate(2), tie=tie)
    check({"data": 2, "model": 2}, 31, sl.zero(stage), tie=tie)


@pytest.mark.parametrize(
    ("mesh", "others"),
    [
        ({"node": 2, "data": 2, "model": 2}, (sl.zero(3, replicate="node"),)),
        ({"model": 2, "data": 3}, (sl.zero(2, axis="data"),)),
        ({"data": 2, "model": 2}, (sl.zero(3), sl.remat())),
        ({"data": 2, "model": 2}, (sl.zero(3), sl.sequence("model", "megatron"), sl.accumulate(2))),
        ({"model": 4}, (sl.sequence("model", "megatron"),)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tie", [False, True])
def test_meshes_and_chains(mesh, others, tie):
    check(mesh, 31, *others, tie=tie, sequence=8)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("stage", [0, 3])
def test_through_stages(schedule, stage):
    config, loss_fn, params, batches = model_and_batches(31, 3, tie=True)
    loss_fn, params = gpt.make_sequential(config), gpt.to_blocks(params)
    rules = gpt.slicing_rules(config, blocks=True)
    transform = sl.chain(sl.tensor_slicing(rules), sl.zero(stage), sl.pipeline(schedule, 2))
    got = training.simulate(
        {"data": 2, "pipe": 2, "model": 2}, loss_fn, params, batches, transform, training.optimizer(MAX_NORM)
    )
    training.assert_same_training((*got[:2], gpt.from_blocks(got[2])), expected(31, 3, tie=True), norms=1e-9)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_with_masters_in_fp32(stage):
    """Against the same precision on one device: to 16-bit rounding."""
    config = config_of(31)
    loss_fn, params = tiny_gpt(torch.float32, **SIZES, vocab=31)
    batches = token_batches(6, rows=16, config=config)
    alone = training.simulate({"data": 1}, loss_fn, params, batches, sl.precision("bf16"), training.optimizer(1.0))
    transform = sliced(config, sl.zero(stage), sl.precision("bf16"))
    got = training.simulate({"data": 2, "model": 4}, loss_fn, params, batches, transform, training.optimizer(1.0))
    assert got[0] == pytest.approx(alone[0], rel=2**-7)
    assert got[1] == pytest.approx(alone[1], rel=2**-5)


@pytest.mark.parametrize(("mesh", "stage"), [({"model": 4}, 0), ({"data": 2, "model": 2}, 3)])
def test_real_processes(pool, mesh, stage):
    transform = sliced(config_of(5), *([sl.zero(stage)] if "data" in mesh else []))
    _, *job = model_and_batches(5, 4, tie=True)
    for got in pool.run(training.train, *job, transform, training.optimizer(MAX_NORM), mesh=mesh):
        training.assert_same_training(got, expected(5, 4, tie=True), norms=1e-9)


def test_the_librarys_bert():
    config = bert.BERTConfig(vocab=31, layers=2, width=12, heads=4, sequence=6, dtype=torch.float64)
    params, loss_fn = bert.init(config), bert.make_loss(config)
    generator = torch.Generator().manual_seed(4)
    batches = [
        bert.mask_tokens(config, torch.randint(31, (8, 6), generator=generator), 30, sl.Key(step), share=0.5)
        for step in range(3)
    ]

    def mean(params, batch):
        total, weight = loss_fn(params, batch)
        return total / weight

    wanted = one_device.train(mean, params, batches, max_norm=MAX_NORM)
    for stage in (0, 3):
        transform = sl.chain(sl.tensor_slicing(bert.slicing_rules(config)), sl.zero(stage))
        job = loss_fn, params, batches, transform, training.optimizer(MAX_NORM)
        training.assert_same_training(training.simulate({"data": 2, "model": 4}, *job), wanted, norms=1e-9)


# transformers, unmodified

SMALL = {"vocab_size": 49, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
TOKENS = torch.randint(0, 49, (3, 8, 10), generator=torch.Generator().manual_seed(1))
small_llama = functools.partial(llama, num_key_value_heads=4, **SMALL)
small_gpt2 = functools.partial(gpt2, n_embd=16, vocab_size=49)
MODELS = {
    "gpt2, tied": (small_gpt2, huggingface.slicing_rules),
    "llama, its logits gathered": (small_llama, huggingface.slicing_rules),
    "llama, its vocabulary too": (small_llama, of_vocab),
    "llama, tied": (functools.partial(small_llama, tie_word_embeddings=True), huggingface.slicing_rules),
    "bert, and the bias of its output layer": (functools.partial(masked, **SMALL), huggingface.slicing_rules),
}


@pytest.mark.parametrize("name", MODELS)
def test_unmodified_transformers(name):
    make, rules = MODELS[name]
    module, loss_fn, params = made(make)
    wanted = one_device.train(loss_fn, params, list(TOKENS), max_norm=1.0)
    for mesh, others in (({"model": 4}, []), ({"data": 2, "model": 2}, [sl.zero(3)])):
        transform = sl.chain(sl.tensor_slicing(rules(module)), *others)
        got = training.simulate(mesh, loss_fn, params, list(TOKENS), transform, training.optimizer(1.0))
        training.assert_same_training(got, wanted, 1e-5, norms=1e-5)


def test_the_words_of_the_real_gpt2():
    """50,257 words, by GPT-2's own rules."""
    module, loss_fn, params = made(lambda: gpt2(n_layer=1, n_embd=8, n_head=2, vocab_size=50257).double())
    rules = huggingface.slicing_rules(module)
    plan = sl.make_plan(params, sl.abstract_mesh(model=8), sl.tensor_slicing({"*wte": rules["*wte"]}))
    assert "padded with rows of zeros: lm_head/weight (50257 as 8 × 6283)" in str(plan)
    assert plan.placement_of["lm_head/weight"].param.spec == sl.P("model", padded=True)
    batches = [torch.randint(0, 50257, (2, 4), generator=torch.Generator().manual_seed(step)) for step in range(2)]
    batches[1][0, :2] = torch.tensor([50256, 25129])  # the last word, and the first of the second slice
    got = training.simulate({"model": 2}, loss_fn, params, batches, sl.tensor_slicing(rules), training.optimizer(1.0))
    wanted = one_device.train(loss_fn, params, batches, max_norm=1.0)
    training.assert_same_training(got, wanted, 1e-5, norms=1e-5)


def test_a_state_dict_has_the_true_shape():
    module, _, params = made(small_gpt2)

    def run(mesh):
        return sl.models.state_dict(
            module, sl.shard(params, mesh, sl.tensor_slicing(huggingface.slicing_rules(module)))
        )

    for found in sl.simulate(run, mesh={"model": 4}):
        assert_close(dict(found), dict(module.state_dict()), 0)


# padding counts nowhere


def spoil(sharded):
    """Put what would show into the rows that pad."""
    for bucket in sharded.plan.buckets:
        parts = bucket.leaf_segments(sharded.buffers[bucket.name], bucket.param_level)
        first = bucket.owner(sharded.mesh.coords, 0, bucket.param_level)
        for part, held in zip(parts, bucket.held(sharded.mesh.coords), strict=True):
            part[max(0, held - first * len(part)) :] = 1e3
    return sharded


def test_values_in_the_padding_do_not_matter():
    config, loss_fn, params, batches = model_and_batches(31, 2)

    def run(mesh, change):
        sharded = change(sl.shard(params, mesh, sliced(config)))
        spoilt = any(buffer.max() == 1e3 for buffer in sharded.buffers.values())
        assert spoilt == (change is spoil and mesh.rank == 3)
        loss, grads = sl.value_and_grad(loss_fn)(sharded, batches[0])
        assert_close(sl.unshard(sharded), params, 0)
        return (
            loss,
            sl.unshard(grads),
            [leaf[7:].abs().max() for leaf in (grads["embed"]["tokens"], grads["head"]["weight"])],
        )

    wanted, got = (sl.simulate(run, change, mesh={"model": 4}) for change in (lambda sharded: sharded, spoil))
    for (loss, grads, _), (other, same, _) in zip(wanted, got):
        assert loss == other
        assert_close(same, grads, 0)
    assert not any(got[-1][2])  # of the last rank's gradients, those of the padding


def test_each_rank_initialises_its_slices():
    """A rank draws its own rows, and the padding stays zero."""

    def init():
        return {"t": sl.init.normal(sl.Key(1), (5, 3)), "w": torch.ones(5, 3)}

    def run(mesh):
        sharded = sl.shard(init, mesh, sl.chain(sl.tensor_slicing({"*": "vocab"}), sl.zero(3)))
        return sl.unshard(sharded), sum(int((buffer != 0).sum()) for buffer in sharded.buffers.values())

    results = sl.simulate(run, mesh={"data": 2, "model": 4})
    for whole, _ in results:
        assert_close(whole, init(), 0)
    assert sum(count for _, count in results) == 2 * 15


OPTIMIZERS = {
    "lamb": lambda: sl.optim.lamb(0.02, weight_decay=0.1),
    "adafactor": lambda: sl.optim.adafactor(0.05, 3, momentum=0.9, weight_decay_rate=0.01),
    "muon": lambda: sl.optim.muon(0.02, weight_decay=0.1),
    "noise": lambda: sl.optim.chain(sl.optim.add_noise(0.01, 0.5, key=1), sl.optim.sgd(0.1)),
    "lion": lambda: sl.optim.lion(0.01, weight_decay=0.1),
    "block norm": lambda: sl.optim.chain(sl.optim.clip_by_block_norm(0.1), sl.optim.sgd(0.1)),
    "elements": lambda: sl.optim.chain(counting(), sl.optim.sgd(0.1)),
}


def counting():
    """Gradients over the number of all elements: a sum to which padding of zeros would add."""

    def update(updates, state, params, *, shards):
        count = shards.sum(lambda leaf: torch.tensor(float(leaf.numel()), dtype=torch.float64), updates)
        return optree.tree_map(lambda leaf: leaf * (1000 / count), updates), state

    return sl.optim.GradientTransformation(lambda params, shards: (), update, sl.optim.Locality.GLOBAL)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_do_not_see_the_padding(name):
    params = {"t": torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}
    ids = torch.tensor([0, 4, 2, 4, 1, 3])

    def loss_fn(params, ids):
        return sl.nn.linear_cross_entropy(F.embedding(ids, params["t"]).sin(), params["t"], ids.roll(1))

    def run(mesh, *transforms):
        tx = OPTIMIZERS[name]()
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, sl.chain(*transforms)), tx)
        for _ in range(3):
            state, metrics = step(state, ids)
        return sl.unshard(state.params), metrics["grad_norm"]

    ((wanted, norm),) = sl.simulate(run, sl.zero(0), mesh={"data": 1})
    for stage in (0, 3):
        rules = sl.tensor_slicing({"t": "vocab"})
        for found, other in sl.simulate(run, rules, sl.zero(stage), mesh={"data": 2, "model": 4}):
            assert_close(found, wanted, 1e-10)
            assert other.item() == pytest.approx(norm.item(), rel=1e-10)


ENCODED = {
    "1 bit": (0, sl.onebit()),
    "1 bit, scattered": (2, sl.onebit()),
    "1 bit in blocks": (0, sl.onebit(scales=16)),
    "integers": (3, sl.quantize(gradients="int8")),
    "factors": (0, sl.powersgd(rank=1)),
}


@pytest.mark.parametrize("name", ENCODED)
def test_codecs_do_not_see_the_padding(name, tmp_path):
    """Gradients of one size and rank 1: nothing is left out, if scales are of the true elements alone."""
    stage, codec = ENCODED[name]
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(7, 32, generator=generator)
    signs = torch.outer(*(torch.randn(size, generator=generator).sign() for size in (7, 32)))

    def loss_fn(params, ids):
        return (F.embedding(ids, params["t"]) * signs).sum()

    def start(mesh):
        transform = sl.chain(sl.tensor_slicing({"t": "vocab"}), sl.zero(stage), codec)
        return sl.make_train_step(loss_fn, sl.shard({"t": whole}, mesh, transform), sl.optim.sgd(0.5))

    def train(mesh):
        state, step = start(mesh)
        state, _ = step(state, torch.arange(7))
        checkpoint.save(tmp_path, state)
        left_out = [kept.abs().max() for at, kept in state.comm.items() if "factors" not in at]
        return sl.unshard(state.params)["t"], left_out

    def resume(mesh):
        return sl.unshard(checkpoint.restore(checkpoint.latest(tmp_path), start(mesh)[0]).params)["t"]

    wanted = whole - 0.5 * signs
    for found, left_out in sl.simulate(train, mesh={"data": 2, "model": 2}):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert max(left_out) < 1e-5
    for found in sl.simulate(resume, mesh={"data": 2, "model": 3}):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


# checkpoints


@pytest.mark.parametrize("first", [{"data": 2, "model": 2}, {"data": 1, "model": 4}, {"data": 2}])
@pytest.mark.parametrize("second", [({"data": 2, "model": 2}, 1), ({"data": 2, "model": 4}, 3), ({"data": 3}, 2)])
def test_a_checkpoint_resumes_with_other_slices(first, second, tmp_path):
    """Saved in the true shape: vocabularies of 5 words over 2, 3 or 4 ranks, or whole."""
    config, *job = model_and_batches(5, 4)
    for final in resumed(tmp_path, *job, sliced(config), first, *second):
        assert_close(final, expected(5, 4)[2], 1e-10)


# bytes


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("gathered", [False, True])
def test_bytes_held_and_sent_are_the_plans(stage, gathered):
    config, loss_fn, params, (batch,) = model_and_batches(31, 1, tie=True)

    def gathered_loss(params, batch):
        return F.cross_entropy(gpt.logits(config, params, batch["tokens"]).flatten(0, 1), batch["targets"].flatten())

    loss_fn = gathered_loss if gathered else loss_fn
    transform, tx = sliced(config, sl.zero(stage)), training.optimizer(MAX_NORM)
    mesh = {"data": 2, "model": 4}
    part = training.share(batch, 0, mesh["data"])
    plan = sl.make_plan(params, sl.abstract_mesh(**mesh), transform, loss_fn=loss_fn, batch=part, optimizer=tx)

    def run(mesh):
        mine = training.share(batch, mesh.coords["data"], mesh.shape["data"])
        sharded = sl.shard(params, mesh, transform)
        state, step = sl.make_train_step(loss_fn, sharded, tx)
        sent = count_payload(mesh)
        state, _ = step(state, mine)
        return sent(), {"param": stored_bytes(state.params), "optimizer": stored_bytes(state.opt, counters=True)}

    for message, held in sl.simulate(run, mesh=mesh):
        assert message == plan.payload()
        assert held == {role: plan.bytes(role) for role in held}


def test_a_padded_vocabulary_costs_the_rows_that_pad_it():
    """Computed by hand: 31 words over 4 ranks are 8 rows each; logits of 32 words are gathered, and 31 returned."""
    params = {"t": torch.zeros(31, 6, dtype=torch.float64)}
    x = torch.ones(5, 6, dtype=torch.float64)

    def loss_fn(params, x):
        logits = F.linear(x, params["t"])
        assert logits.shape == (5, 31) and logits.is_contiguous()
        return logits.sum()

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.tensor_slicing({"t": "vocab"}))
        sent = count_payload(mesh)
        sl.value_and_grad(loss_fn)(sharded, x)
        return stored_bytes(sharded), sent()["model"]

    for held, sent in sl.simulate(run, mesh={"model": 4}):
        assert held == 8 * 6 * 8
        assert sent == 3 * 5 * 8 * 8


# by hand, and refused


@pytest.mark.parametrize("cut_off", [False, True])
@pytest.mark.parametrize("words", [11, 9])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_vocab_cross_entropy(words, smoothing, cut_off):
    generator = torch.Generator().manual_seed(0)
    scores = (30 * torch.randn(6, words, generator=generator, dtype=torch.float64)).requires_grad_()
    targets = torch.tensor([0, words - 1, 3, -100, 5, 8])
    want = F.cross_entropy(scores, targets, label_smoothing=smoothing)
    (grad,) = torch.autograd.grad(want, scores)

    def run(mesh):
        share = 3
        mine = scores.detach()[:, share * mesh.rank : share * (mesh.rank + 1)]
        if not cut_off or not mine.numel():
            mine = F.pad(mine, (0, share - mine.shape[1]), value=1e3)
        mine = mine.clone().requires_grad_()
        loss = sl.collectives.vocab_cross_entropy(mine, targets, "model", words=words, label_smoothing=smoothing)
        return loss.detach(), torch.autograd.grad(loss, mine)[0]

    results = sl.simulate(run, mesh={"model": 4})
    for loss, _ in results:
        torch.testing.assert_close(loss, want.detach(), rtol=1e-12, atol=1e-12)
    grads = torch.cat([mine for _, mine in results], -1)
    torch.testing.assert_close(grads[:, :words], grad, rtol=1e-10, atol=1e-12)
    assert not grads[:, words:].any()


def test_logits_of_a_wrong_width_are_refused():
    def run(mesh):
        sl.collectives.vocab_cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), "model", words=11)

    with pytest.raises(SpecError, match=r"got 3 scores, and 6 of 11 words are this rank's .*; pass words="):
        sl.simulate(run, mesh={"model": 2})


@pytest.mark.parametrize("word", [7, 8, -1])
def test_targets_outside_the_vocabulary_are_refused_as_by_torch(word):
    """A target that is the index of a padding row is refused too."""
    params, ids = {"t": torch.ones(7, 3)}, torch.tensor([1, word])
    uses = {
        "looked up": lambda p, ids: F.embedding(ids, p["t"]).sum(),
        "a target": lambda p, ids: sl.nn.linear_cross_entropy(torch.ones(2, 3), p["t"], ids),
    }

    def run(mesh, use):
        sl.value_and_grad(uses[use])(sl.shard(params, mesh, sl.tensor_slicing({"t": "vocab"})), ids)

    for use in uses:
        with pytest.raises(IndexError):
            uses[use](params, ids)
        with pytest.raises(IndexError, match=r"out of range|outside the 7 words"):
            sl.simulate(run, use, mesh={"model": 2})


@pytest.mark.parametrize(
    ("rules", "shape"),
    [
        ({"w": "column"}, (7, 4)),
        ({"w": "row"}, (4, 7)),
        ({"w": sl.row(split=True)}, (4, 7)),
        ({"w": sl.column(gather=True, transposed=True)}, (4, 7)),
        ({"w": sl.column(gather=True, heads=7)}, (7, 4)),
    ],
)
def test_other_layers_are_not_padded(rules, shape):
    with pytest.raises(IllegalComposition, match=r"w: shape|7 heads"):
        sl.make_plan({"w": torch.zeros(shape)}, sl.abstract_mesh(model=2), sl.tensor_slicing(rules))


def test_evaluates_and_samples():
    config, loss_fn, params, (batch,) = model_and_batches(31, 1, tie=True)
    prompts = batch["tokens"][:2, :3].tolist()

    def run(mesh):
        sharded = sl.shard(params, mesh, sliced(config, sl.zero(3)))
        evaluate = sl.make_eval_step(lambda p, b: sl.Mean(loss_fn(p, b), 1.0), sharded)
        return evaluate(sharded, batch), sl.generate(config, sharded, prompts, 4, seed=3)

    for loss, tokens in sl.simulate(run, mesh={"data": 1, "model": 4}):
        assert float(loss) == pytest.approx(float(loss_fn(params, batch)), rel=1e-12)
        assert list(map(list, tokens)) == list(map(list, sl.generate(config, params, prompts, 4, seed=3)))
