"""Sliced layers train like whole ones on every mesh and at every stage, or are refused."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import training
from helpers.measure import count_payload
from helpers.models import TINY, tiny_gpt, token_batches
from helpers.trees import assert_close
from oracle import one_device
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    logging,
)

import shardlib as sl
from shardlib import checkpoint
from shardlib.errors import HandleError, IllegalComposition, RankMismatch, TreeError
from shardlib.models import gpt, huggingface

logging.set_verbosity_error()
SIZES = {"vocab": 32, "width": 12, "heads": 4}
CONFIG = replace(TINY, **SIZES)
MAX_NORM = 0.3
MESHES = [({"model": 2}, None), ({"data": 2, "model": 2}, 1), ({"data": 2, "model": 2}, 3)]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def sliced(*others, rules=None):
    return sl.chain(sl.tensor_slicing(rules or gpt.slicing_rules(CONFIG)), *others)


@functools.cache
def expected(dtype, steps, **changes):
    loss_fn, params = tiny_gpt(dtype, **SIZES, **changes)
    return one_device.train(loss_fn, params, token_batches(steps, config=CONFIG), max_norm=MAX_NORM)


def check(dtype, mesh, transform, steps=6, **changes):
    loss_fn, params = tiny_gpt(dtype, **SIZES, **changes)
    batches = token_batches(steps, config=CONFIG)
    got = training.simulate(mesh, loss_fn, params, batches, transform, training.optimizer(MAX_NORM))
    training.assert_same_training(got, expected(dtype, steps, **changes), TOLERANCE[dtype], 10 * TOLERANCE[dtype])


@pytest.mark.parametrize(("dtype", "steps"), [(torch.float32, 20), (torch.float64, 6)])
@pytest.mark.parametrize("stage", range(4))
def test_every_stage(stage, dtype, steps):
    check(dtype, {"data": 2, "model": 2}, sliced(sl.zero(stage), sl.accumulate(2)), steps)


@pytest.mark.parametrize(
    ("mesh", "others"),
    [
        ({"model": 4}, ()),
        ({"model": 2, "data": 3}, (sl.zero(3), sl.remat())),
        ({"data": 2, "model": 2}, (sl.zero(2), sl.remat("dots"))),
        ({"node": 2, "data": 2, "model": 2}, (sl.zero(3, replicate="node"), sl.accumulate(4))),
        ({"data": 2, "model": 1}, (sl.zero(1),)),
    ],
)
def test_meshes_and_chains(mesh, others):
    check(torch.float64, mesh, sliced(*(others or (sl.zero(0, axis="model"),)[:0])))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_tied_embedding_is_looked_up_and_scores(stage):
    check(torch.float64, {"data": 2, "model": 2}, sliced(sl.zero(stage)), tie=True)


def test_sliced_over_two_axes():
    """The MLP over one axis and the rest over another: each with its own pairs."""
    rules = gpt.slicing_rules(CONFIG)
    inner = {glob: rules.pop(glob) for glob in list(rules) if "mlp" in glob}
    transform = sl.chain(sl.tensor_slicing(rules, axis="a"), sl.tensor_slicing(inner, axis="b"), sl.zero(3))
    check(torch.float64, {"data": 2, "a": 2, "b": 2}, transform)


def test_dropout_is_the_same_on_every_mesh():
    loss_fn, params = tiny_gpt(torch.float64, **SIZES, dropout=0.2)
    batches = token_batches(4, config=CONFIG)
    alone = training.simulate({"data": 1}, loss_fn, params, batches, sl.zero(0), training.optimizer(), rng=5)
    got = training.simulate(
        {"data": 2, "model": 2}, loss_fn, params, batches, sliced(sl.zero(3)), training.optimizer(), rng=5
    )
    assert got[0] == pytest.approx(alone[0], rel=1e-10)
    assert_close(got[2], alone[2], 1e-10)


def dropped(p, x):
    """Torch's own dropout of whole activations, before and after sliced layers."""
    return F.dropout(F.linear(F.linear(F.dropout(x, 0.3), p["up"]).tanh(), p["down"]), 0.5)


def train_dropped(mesh, *transforms):
    """Losses and parameters. Before, the ranks' generators are in states of their own; and they still are afterwards."""
    generator = torch.Generator().manual_seed(2)
    shapes = {"up": (8, 6), "down": (6, 8)}
    params = [{n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()} for _ in "ab"]
    batches = [torch.randn(8, 6, generator=generator, dtype=torch.float64) for _ in range(4)]
    blocks = [lambda p, _, x: dropped(p, x), lambda p, h, _: F.dropout(dropped(p, h).square(), 0.2).mean()]
    torch.manual_seed(mesh.rank)
    before = torch.get_rng_state()
    losses, _, final = training.train(
        mesh, sl.sequential(blocks), params, batches, sl.chain(*transforms), training.optimizer(), rng=5
    )
    assert torch.equal(torch.get_rng_state(), before)
    return losses, final


@pytest.mark.parametrize(
    ("mesh", "others"),
    [
        ({"data": 2}, (sl.zero(0),)),
        ({"data": 2}, (sl.zero(3), sl.accumulate(2))),
        ({"data": 2}, (sl.zero(3), sl.remat())),
        ({"pipe": 2}, (sl.pipeline("1f1b", 2), sl.remat())),
    ],
)
def test_torchs_own_dropout_is_the_same_on_all_ranks_of_one_model(pool, mesh, others):
    slices = sl.tensor_slicing({"*/up": "column", "*/down": "row"})
    wanted = sl.simulate(train_dropped, *others, mesh=mesh)[0]
    for run in (sl.simulate, pool.run):
        for losses, final in run(train_dropped, slices, *others, mesh=mesh | {"model": 2}):
            assert losses == pytest.approx(wanted[0], rel=1e-10)
            assert_close(final, wanted[1], 1e-10)


@pytest.mark.parametrize("stage", [1, 3])
def test_16_bit(stage):
    """Against the same precision on one device: sums in another order, so to 16-bit rounding."""
    loss_fn, params = tiny_gpt(torch.float32, **SIZES)
    batches = token_batches(6, config=CONFIG)
    alone = training.simulate({"data": 1}, loss_fn, params, batches, sl.precision("bf16"), training.optimizer(1.0))
    transform = sliced(sl.zero(stage), sl.precision("bf16"))
    got = training.simulate({"data": 2, "model": 2}, loss_fn, params, batches, transform, training.optimizer(1.0))
    assert got[0] == pytest.approx(alone[0], rel=2**-7)


@pytest.mark.parametrize(("mesh", "stage"), MESHES)
def test_real_processes(pool, mesh, stage):
    job = *tiny_gpt(torch.float64, **SIZES), token_batches(4, config=CONFIG)
    transform = sliced() if stage is None else sliced(sl.zero(stage))
    for got in pool.run(training.train, *job, transform, training.optimizer(MAX_NORM), mesh=mesh):
        training.assert_same_training(got, expected(torch.float64, 4), norms=1e-9)


# transformers, unmodified

SMALL = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
TOKENS = torch.randint(0, 48, (3, 8, 10), generator=torch.Generator().manual_seed(1))


def llama(**changes):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, **SMALL, **changes}
    return LlamaForCausalLM(LlamaConfig(bos_token_id=1, eos_token_id=2, **sizes))


def bert(**changes):
    sizes = {"num_attention_heads": 4, **SMALL, **changes}
    return BertForMaskedLM(BertConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0, **sizes))


def gpt2(**changes):
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 10, "vocab_size": 48, **changes}
    return huggingface.sliceable(GPT2LMHeadModel(GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **sizes)))


def of_vocab(module):
    return huggingface.slicing_rules(module) | {"model/embed_tokens": "vocab"}


MODELS = {
    "llama": (llama, lambda module: module.config.base_model_tp_plan | {"lm_head": "colwise_gather_output"}),
    "llama, its vocabulary too": (llama, of_vocab),
    "llama, tied": (lambda: llama(tie_word_embeddings=True), huggingface.slicing_rules),
    "bert": (bert, huggingface.slicing_rules),
    "gpt2": (gpt2, huggingface.slicing_rules),
}


def made(make):
    """A module, with no bias at zero: softmax ignores a key's, which would then hold rounding noise alone."""
    torch.manual_seed(0)
    module = make().train()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    apply, params = sl.from_module(module)
    return module, lambda params, tokens: apply(params, input_ids=tokens, labels=tokens).loss, params


@functools.cache
def transformer(name):
    make, rules = MODELS[name]
    module, loss_fn, params = made(make)
    return loss_fn, params, rules(module), one_device.train(loss_fn, params, list(TOKENS), max_norm=1.0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("mesh", "stage"), MESHES)
def test_unmodified_transformers(name, mesh, stage):
    """In fp32: these models compute their own loss in it, whatever the dtype of the weights."""
    loss_fn, params, rules, wanted = transformer(name)
    transform = sliced(*([] if stage is None else [sl.zero(stage)]), rules=rules)
    tx = training.optimizer(max_norm=1.0)
    got = training.simulate(mesh, loss_fn, copy.deepcopy(params), list(TOKENS), transform, tx)
    training.assert_same_training(got, wanted, 1e-5, norms=1e-5)


def test_a_sliceable_gpt2_computes_the_same():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=10, vocab_size=48)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        want = model(TOKENS[0]).logits
        got = huggingface.sliceable(model)(TOKENS[0]).logits
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_a_model_without_rules_says_so():
    class Odd(torch.nn.Module):
        config = type("Config", (), {"model_type": "odd"})

    with pytest.raises(TreeError, match="shardlib no rules for 'odd'"):
        huggingface.slicing_rules(Odd())


def test_consumers_of_one_input_share_its_copy():
    """q, k and v share one backward all-reduce, gate and up another: 6 for 3 layers, not 15; and one for the output."""
    loss_fn, params, rules, _ = transformer("llama, its vocabulary too")

    def run(mesh):
        step = sl.value_and_grad(loss_fn)
        sharded = sl.shard(params, mesh, sl.tensor_slicing(rules))
        reduced = []
        group = mesh.group("model")
        all_reduce = group.all_reduce
        group.all_reduce = lambda tensor: (reduced.append(tensor.numel()), all_reduce(tensor))[1]
        step(sharded, TOKENS[0])
        return reduced

    for reduced in sl.simulate(run, mesh={"model": 2}):
        activations = [numel for numel in reduced if numel == TOKENS[0].numel() * SMALL["hidden_size"]]
        forward = 2 * SMALL["num_hidden_layers"] + 1  # o_proj, down_proj, and the embedding
        assert len(activations) == forward + 2 * SMALL["num_hidden_layers"] + 1


@pytest.mark.parametrize("ways", [2, 4])
def test_payload_of_a_layer_is_the_papers(ways):
    """8(t−1)/t·bsh elements a layer, forward and backward, counted at the group; as the traced plan says."""
    layers, rows = 3, 4
    config = replace(CONFIG, layers=layers, dtype=torch.float64)
    params, batch = gpt.init(config), token_batches(1, rows=rows, config=config)[0]
    rules = {glob: style for glob, style in gpt.slicing_rules(config).items() if glob.startswith("blocks")}
    transform = sl.tensor_slicing(rules)
    plan = sl.make_plan(params, sl.abstract_mesh(model=ways), transform, loss_fn=gpt.make_loss(config), batch=batch)
    expected = layers * 8 * (ways - 1) * rows * config.sequence * config.width * 8 // ways
    assert plan.payload() == {"model": expected}

    def run(mesh):
        sharded = sl.shard(params, mesh, transform)
        step = sl.value_and_grad(gpt.make_loss(config))
        sent = count_payload(mesh)
        step(sharded, batch)
        return sent()

    for sent in sl.simulate(run, mesh={"model": ways}):
        assert sent == {"model": expected}


# the vocabulary


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(6,), (2, 3)])
@pytest.mark.parametrize("ignored, smoothing", [(-100, 0.0), (3, 0.1)])
def test_vocab_cross_entropy(reduction, shape, ignored, smoothing):
    generator = torch.Generator().manual_seed(0)
    scores = (30 * torch.randn(*shape, 8, generator=generator, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(8, shape, generator=generator)
    targets.view(-1)[1] = ignored
    options = {"ignore_index": ignored, "label_smoothing": smoothing, "reduction": reduction}
    weight = torch.randn(shape if reduction == "none" else (), generator=generator, dtype=torch.float64)
    want = F.cross_entropy(scores.flatten(0, -2), targets.flatten(), **options)
    want = want.view(targets.shape) if reduction == "none" else want
    (grad,) = torch.autograd.grad((want * weight).sum(), scores)

    def run(mesh):
        mine = scores.detach().chunk(4, -1)[mesh.rank].requires_grad_()
        loss = sl.collectives.vocab_cross_entropy(mine, targets, "model", **options)
        return loss.detach(), torch.autograd.grad((loss * weight).sum(), mine)[0]

    results = sl.simulate(run, mesh={"model": 4})
    for loss, _ in results:
        torch.testing.assert_close(loss, want.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([mine for _, mine in results], -1), grad, rtol=1e-10, atol=1e-12)


def test_vocab_cross_entropy_refuses_what_torch_refuses():
    scores, targets = torch.randn(4, 8), torch.tensor([0, 15, 1, 2])

    def run(mesh, **changed):
        return sl.collectives.vocab_cross_entropy(**{"scores": scores, "targets": targets, "axis": "model"} | changed)

    for changed, error, message in (
        ({"targets": targets + 1}, IndexError, "a target lies outside the 16 words, and is not ignore_index"),
        ({"targets": targets[:2]}, ValueError, r"targets have shape \(2,\), and scores of shape \(4, 8\)"),
        (
            {"targets": targets.int()},
            TypeError,
            r"targets is torch.int32, not int64; pass int64: targets.to\(torch.int64\)",
        ),
        ({"reduction": "average"}, ValueError, "use 'mean', 'sum' or 'none'"),
        ({"label_smoothing": -1.0}, ValueError, "give a share of the target"),
    ):
        with pytest.raises(error, match=message):
            sl.simulate(functools.partial(run, **changed), mesh={"model": 2})
    sl.simulate(functools.partial(run, targets=targets + 1, ignore_index=16), mesh={"model": 2})


def test_the_librarys_loss_never_gathers_the_logits():
    config = replace(CONFIG, dtype=torch.float64)
    params, batch = gpt.init(config), token_batches(1, rows=2, config=config)[0]
    tokens = batch["tokens"].numel()

    def run(mesh, loss_fn):
        sharded = sl.shard(params, mesh, sl.tensor_slicing({"head/weight": "vocab"}))
        sent = count_payload(mesh)
        sl.value_and_grad(loss_fn)(sharded, batch)
        return sent()["model"] // 8

    def gathered_loss(params, batch):
        return F.cross_entropy(gpt.logits(config, params, batch["tokens"]).flatten(0, 1), batch["targets"].flatten())

    hidden = tokens * config.width  # the input's cotangent is summed either way
    for sent in sl.simulate(run, gpt.make_loss(config), mesh={"model": 2}):
        assert sent == hidden + tokens + 2 * tokens  # the largest score gathered, two numbers summed
    for sent in sl.simulate(run, gathered_loss, mesh={"model": 2}):
        assert sent == hidden + tokens * config.vocab // 2


# checkpoints


def resumed(tmp_path, loss_fn, params, batches, slices, first, second, stage):
    """The parameters of each rank after half of the batches on one mesh, and the others on another, from a checkpoint."""

    def start(mesh, stage):
        transform = sl.chain(sl.zero(stage), *([slices] if "model" in mesh.shape else []))
        return sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), training.optimizer(MAX_NORM))

    def trained(mesh, state, step, batches):
        for batch in batches:
            state, _ = step(state, training.share(batch, mesh.coords["data"], mesh.shape["data"]))
        return state

    def save(mesh):
        checkpoint.save(tmp_path, trained(mesh, *start(mesh, 3), batches[: len(batches) // 2]))

    def resume(mesh):
        state, step = start(mesh, stage)
        state = checkpoint.restore(checkpoint.latest(tmp_path), state)
        return sl.unshard(trained(mesh, state, step, batches[len(batches) // 2 :]).params)

    sl.simulate(save, mesh=first)
    return sl.simulate(resume, mesh=second)


@pytest.mark.parametrize(
    ("mesh", "stage"), [({"data": 2, "model": 2}, 3), ({"data": 1, "model": 4}, 1), ({"data": 3}, 2), ({"data": 1}, 0)]
)
def test_a_checkpoint_resumes_with_other_slices(mesh, stage, tmp_path):
    job = *tiny_gpt(torch.float64, **SIZES), token_batches(6, config=CONFIG)
    for final in resumed(tmp_path, *job, sliced(), {"data": 2, "model": 2}, mesh, stage):
        assert_close(final, expected(torch.float64, 6)[2], 1e-10)


# refused


def plan_of(params, rules, **mesh):
    return sl.make_plan(params, sl.abstract_mesh(**mesh), sl.tensor_slicing(rules))


def test_what_does_not_divide_is_listed_together():
    params = gpt.init(replace(TINY, heads=2))
    with pytest.raises(IllegalComposition) as error:
        plan_of(params, gpt.slicing_rules(replace(TINY, heads=2)), model=4)
    for result in (
        "blocks/1/attn/qkv/weight: shape (30, 10): 2 heads",
        "blocks/0/attn/out/weight: shape (10, 10): dimension 1 of size 10",
        "model=4",
    ):
        assert result in str(error.value)


def test_the_plan_says_which_outputs_are_gathered():
    params = {"head": {"weight": torch.zeros(4, 4)}, "up": {"weight": torch.zeros(4, 4)}}
    text = str(plan_of(params, {"head": "vocab", "up": "colwise_rep"}, model=2))
    assert "gathered on every rank: the outputs of up/weight" in text
    assert "gathered on every rank: logits by head/weight, except in sl.nn.linear_cross_entropy" in text
    assert "gathered on every rank" not in str(plan_of(params, {"head": "vocab", "up": "colwise_rep"}, model=1))


def test_unknown_styles_are_named():
    with pytest.raises(IllegalComposition, match=r"moe\.experts: 'grouped_gemm'\n(.|\n)*column"):
        sl.tensor_slicing({"moe.experts": "grouped_gemm", "q_proj": "colwise"})


def test_a_rule_that_matches_nothing_and_an_axis_that_is_not_there():
    params = {"up": {"weight": torch.zeros(4, 4)}}
    with pytest.raises(IllegalComposition, match="rule 'down' matches no parameter"):
        plan_of(params, {"up": "column", "down": "row"}, model=2)
    with pytest.raises(IllegalComposition, match="uses axis 'model', which abstract_mesh"):
        plan_of(params, {"up": "column"}, data=2)


@pytest.mark.parametrize("zero", [*(sl.zero(stage, axis="model") for stage in range(4)), sl.zero(replicate="model")])
def test_an_axis_cannot_both_slice_and_share_the_batch(zero):
    params = {"up": {"weight": torch.zeros(4, 4)}}
    result = (
        r"axis 'model': zero\((1, |2, |3, )?(axis|replicate)='model'\) divides the batch, "
        r"and tensor_slicing\({'up': 'column'}\) slices layers"
    )
    with pytest.raises(IllegalComposition, match=result):
        transform = sl.chain(sl.tensor_slicing({"up": "column"}), zero)
        sl.make_plan(params, sl.abstract_mesh(data=2, model=2), transform)


def test_a_tied_leaf_with_two_styles():
    weight = torch.zeros(4, 4)
    with pytest.raises(
        IllegalComposition, match=r"a/w = b/w: one tied leaf .*, by the rules 'a', 'b'; give all .* one style"
    ):
        plan_of({"a": {"w": weight}, "b": {"w": weight}}, {"a": "column", "b": "row"}, model=2)


@pytest.mark.parametrize(
    ("rules", "loss", "message"),
    [
        ({"w": "column"}, lambda p, x: p["w"].square().sum(), "pow uses w|square uses w"),
        ({"w": "column"}, lambda p, x: (p["w"] @ x.T).sum(), "a layer as its input uses w"),
        ({"w": "column"}, lambda p, x: (x @ p["w"]).sum(), r"used as \(in, out\)"),
        ({"w": sl.column(transposed=True)}, lambda p, x: F.linear(x, p["w"]).sum(), r"used as \(out, in\)"),
        ({"w": "row"}, lambda p, x: F.linear(x, p["w"]).sum(), r"2 inputs on this rank, and got 4"),
        ({"w": "column"}, lambda p, x: F.embedding(x.long(), p["w"]).sum(), "looked up and has the style column"),
        ({"w": "vocab"}, lambda p, x: F.embedding(x.long(), p["w"], max_norm=1.0).sum(), "max_norm"),
        ({"b": "column"}, lambda p, x: F.linear(x, p["w"], p["b"]).sum(), "b is sliced and its weight"),
        (
            {"w": "column"},
            lambda p, x: F.linear(x, p["w"], p["b"]).sum(),
            r"a bias of 4; give both the same rule\nraised",
        ),
        (
            {"l/w": "column"},
            lambda p, x: F.linear(x, p["l"]["w"], p["l"]["b"]).sum(),
            "l/w has .* a bias of 4; give both the same rule: a rule for 'l' is one",
        ),
        ({"w": "column"}, lambda p, x: torch.addmm(p["b"], x, p["w"], alpha=2).sum(), "alpha=1"),
        (
            {"w": "column"},
            lambda p, x: sl.nn.linear_cross_entropy(x, p["w"], torch.zeros(2, dtype=torch.int64)),
            "output layer with the style column",
        ),
    ],
)
def test_a_use_that_would_be_wrong_is_refused(rules, loss, message):
    params = {"w": torch.ones(4, 4), "b": torch.ones(4), "l": {"w": torch.ones(4, 4), "b": torch.ones(4)}}

    def run(mesh):
        sl.value_and_grad(loss)(sl.shard(params, mesh, sl.tensor_slicing(rules)), torch.ones(2, 4))

    with pytest.raises(HandleError, match=message):
        sl.simulate(run, mesh={"model": 2})


def test_ranks_of_one_model_with_different_batches(pool):
    params = {"up": {"w": torch.ones(4, 4)}}

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.tensor_slicing({"up": sl.column(gather=True)}))
        sl.value_and_grad(lambda p, x: F.linear(x, p["up"]["w"]).sum())(sharded, torch.full((2, 4), 1.0 + mesh.rank))

    result = (
        r"(?s)the ranks' batches differ:.*batch: rank 0: checksum.*; rank 1: checksum.*axis 'model' work on one batch"
    )
    with pytest.raises(RankMismatch, match=result):
        sl.simulate(run, mesh={"model": 2})
    for _, error in pool.outcomes(run, mesh={"model": 2}):
        assert isinstance(error, RankMismatch)


def test_compiled_code_with_slices_in_it_is_refused():
    params = {"up": {"w": torch.ones(4, 4)}}
    block = sl.block(torch.compile(lambda p, x: F.linear(x, p["w"]), backend="eager"))

    def run(mesh, loss):
        sl.value_and_grad(loss)(sl.shard(params, mesh, sl.tensor_slicing({"up": "column"})), torch.ones(2, 4))

    with pytest.raises(HandleError, match="a compiled block is given up/w, which is sliced"):
        sl.simulate(run, lambda p, x: block(p["up"], x).sum(), mesh={"model": 2})
    with pytest.raises(HandleError, match="compiled as a whole, and tensor slicing"):
        sl.simulate(
            run, torch.compile(lambda p, x: F.linear(x, p["up"]["w"]).sum(), backend="eager"), mesh={"model": 2}
        )


@pytest.mark.parametrize(
    ("rules", "layer"),
    [
        (
            {"w": "column", "b": "column"},
            lambda p, x: sl.collectives.all_gather(F.linear(x, p["w"], p["b"]), "model", dim=-1, dst="invariant"),
        ),
        ({"w": sl.column(gather=True), "b": "column"}, lambda p, x: F.linear(x, p["w"], p["b"])),
        ({"w": sl.column(gather=True, transposed=True), "b": sl.column()}, lambda p, x: torch.addmm(p["b"], x, p["w"])),
        ({"w": sl.column(gather=True, transposed=True)}, lambda p, x: x @ p["w"] + p["b"]),
        ({"w": sl.row(split=True)}, lambda p, x: F.linear(x, p["w"], p["b"])),
        ({"w": sl.row(split=True, transposed=True)}, lambda p, x: torch.addmm(p["b"], x, p["w"])),
        ({"w": sl.row(split=True, transposed=True)}, lambda p, x: torch.matmul(x, p["w"]) + p["b"]),
    ],
)  # fmt: skip
def test_layers_one_by_one(rules, layer):
    generator = torch.Generator().manual_seed(2)
    params = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in (("w", (6, 6)), ("b", (6,)))
    }
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)

    def loss_fn(params, x):
        return layer(params, x.sin()).cos().mean()

    def whole(params, x):
        weight = params["w"] if getattr(rules["w"], "transposed", False) else params["w"].T
        return (x.sin() @ weight + params["b"]).cos().mean()

    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    want = whole(leaves, x)
    grads = dict(zip(leaves, torch.autograd.grad(want, list(leaves.values()))))

    def run(mesh):
        loss, found = sl.value_and_grad(loss_fn)(sl.shard(params, mesh, sl.tensor_slicing(rules)), x)
        return loss, sl.unshard(found)

    for loss, found in sl.simulate(run, mesh={"model": 3}):
        torch.testing.assert_close(loss, want.detach(), rtol=1e-12, atol=1e-12, check_dtype=False)
        assert_close(found, grads, 1e-10)


def test_a_leaf_that_slices_use_whole():
    """A norm on sliced heads: its gradient is summed over the slices."""
    generator = torch.Generator().manual_seed(2)
    params = {
        "up": torch.randn(8, 4, generator=generator, dtype=torch.float64),
        "norm": torch.randn(2, generator=generator, dtype=torch.float64),
        "down": torch.randn(4, 8, generator=generator, dtype=torch.float64),
    }

    def loss_fn(params, x):
        heads = F.linear(x, params["up"]).unflatten(-1, (-1, 2)) * params["norm"]
        return F.linear(heads.flatten(-2).tanh(), params["down"]).square().mean()

    batches = [torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(4)]
    wanted = one_device.train(loss_fn, params, batches, max_norm=MAX_NORM)
    rules = {"up": sl.column(heads=4), "norm": "replicated_with_grad_allreduce", "down": sl.row(heads=4)}
    for stage in range(4):
        job = loss_fn, params, batches, sliced(sl.zero(stage), rules=rules), training.optimizer(MAX_NORM)
        training.assert_same_training(training.simulate({"data": 2, "model": 2}, *job), wanted, norms=1e-9)
