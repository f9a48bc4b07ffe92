"""Sparse attention in models of shardlib and transformers, against dense attention with the layout's mask."""

import numpy as np
import pytest
import torch
from helpers import training
from helpers.texts import uncached
from helpers.trees import assert_close
from optree import tree_map
from oracle import one_device

import shardlib as sl
from shardlib.errors import BatchError, SpecError, TreeError
from shardlib.models import bert, gpt, huggingface, long
from shardlib.models.decoding import Sampling
from shardlib.sparse import Layout

transformers = pytest.importorskip("transformers")
BLOCK, LENGTH = 16, 64
# Two heads' own blocks: some rows without one, one full row and column.
DENSE = torch.tensor(
    [
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]],
        [[1, 1, 0, 0], [1, 1, 0, 1], [1, 0, 1, 0], [1, 0, 0, 1]],
    ]
)
LAYOUT = Layout.from_dense(DENSE[0], BLOCK)
BY_HEAD = Layout.from_dense(DENSE.repeat(2, 1, 1), BLOCK)
SIZES = {"vocab": 32, "layers": 2, "width": 32, "heads": 4, "sequence": LENGTH, "dtype": torch.float64}


def seen(layout, causal=False):
    """bool (heads or 1, queries, keys)."""
    whole = layout.to_dense().repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    return whole.tril() if causal else whole


def tokens(rows=2, seed=0):
    return torch.randint(31, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def words(rows=2):
    """Without RoBERTa's padding, 1."""
    return tokens(rows) % 29 + 2


def masked(monkeypatch, layout):
    """Let `sl.nn.attention` compute all scores, and mask those outside the layout."""

    def dense(q, k, v, *, layout, causal=False, key_mask=None, segments=None):
        assert segments is None
        mask = seen(layout, causal)
        if key_mask is not None:
            mask = mask & key_mask[:, None, None, :]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)

    for model in (bert, gpt):
        monkeypatch.setattr(model, "attention", dense)


@pytest.mark.parametrize("layout", [LAYOUT, BY_HEAD], ids=["shared", "by head"])
@pytest.mark.parametrize("padded", [False, True])
def test_bert_is_the_dense_model_under_the_mask(monkeypatch, layout, padded):
    config = bert.BERTConfig(**SIZES, layout=layout)
    params = bert.init(config)
    batch = bert.mask_tokens(config, tokens(), 31, sl.Key(0))
    if padded:
        batch["mask"] = torch.arange(LENGTH) < torch.tensor([[50], [64]])
    scores = bert.logits(config, params, batch)
    masked(monkeypatch, layout)
    torch.testing.assert_close(scores, bert.logits(config, params, batch), rtol=1e-12, atol=1e-12)


def test_gpt_is_the_dense_model_under_the_mask(monkeypatch):
    config = gpt.GPTConfig(**SIZES, layout=BY_HEAD)
    params, batch = gpt.init(config), {"tokens": tokens(), "targets": tokens(seed=1)}
    found = sl.value_and_grad(gpt.make_loss(config))(params, batch)
    masked(monkeypatch, BY_HEAD)
    wanted = sl.value_and_grad(gpt.make_loss(config))(params, batch)
    assert_close(found[1], wanted[1], 1e-10)


# Some rows have nothing, for one head or for all.
GAPS = torch.stack([DENSE[0], DENSE[0].clone().index_fill_(0, torch.tensor([1, 2]), 0), DENSE[1], DENSE[1]])


@pytest.mark.parametrize("length", [1, 16, 31, LENGTH - 3])
@pytest.mark.parametrize(
    "layout",
    [LAYOUT, BY_HEAD, Layout.from_dense(GAPS, BLOCK), Layout.from_dense(torch.zeros(4, 4), BLOCK)],
    ids=["shared", "by head", "gaps", "empty"],
)
def test_the_cache_changes_no_token(layout, length):
    """Within the layout's blocks, at their edges, and where the window moves on."""
    config = gpt.GPTConfig(**SIZES, layout=layout)
    generator = torch.Generator().manual_seed(1)  # weights so large that attention tells in the tokens
    params = tree_map(lambda p: p + 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype), gpt.init(config))
    prompts = tokens()[:, :length].tolist()

    def scores(window):  # what comes after a token changes none
        padded = torch.nn.functional.pad(window, (0, LENGTH - len(window)))[None]
        return gpt.logits(config, params, padded)[0, len(window) - 1]

    found = sl.generate(config, params, prompts, 36, seed=3)
    dense = sl.generate(gpt.GPTConfig(**SIZES), params, prompts, 36, seed=3)
    for number, prompt in enumerate(prompts):
        wanted = uncached(scores, prompt, 36, number, config.sequence, Sampling(seed=3))
        assert found[number].tolist() == wanted
        assert dense[number].tolist() != wanted


def test_generating_with_a_layout_of_fewer_tokens_is_refused():
    config = gpt.GPTConfig(**SIZES | {"sequence": LENGTH + 1}, layout=LAYOUT)
    with pytest.raises(ValueError, match="with 4 blocks of 16 the layout is shorter than sequence=65; make it for"):
        sl.generate(config, gpt.init(config), tokens()[:, :5], 3)


LOWER = DENSE[0].tril()
CAUSAL = Layout.from_dense(LOWER, BLOCK, causal=True)


def test_a_gpt_of_a_causal_layout_is_that_of_its_blocks():
    params, config = gpt.init(gpt.GPTConfig(**SIZES)), gpt.GPTConfig(**SIZES, layout=CAUSAL)
    plain = gpt.GPTConfig(**SIZES, layout=Layout.from_dense(LOWER, BLOCK))
    assert torch.equal(gpt.logits(config, params, tokens()), gpt.logits(plain, params, tokens()))
    found, wanted = (sl.generate(model, params, tokens()[:, :10], 60, seed=3) for model in (config, plain))
    assert all(map(torch.equal, found, wanted))  # until the window has moved on


def test_encoders_refuse_causal_layouts():
    with pytest.raises(ValueError, match="the layout is causal, and BERT is not; make it with causal=False"):
        bert.BERTConfig(**SIZES, layout=CAUSAL)
    for config in (bert.BERTConfig, gpt.GPTConfig):
        with pytest.raises(ValueError, match="the layout has 4 heads; make it for 1 or for 2"):
            config(**SIZES | {"heads": 2}, layout=BY_HEAD)
        with pytest.raises(TypeError, match="layout is a Tensor: pass"):
            config(**SIZES, layout=DENSE[0])
    for name in ("bert", "roberta"):
        model = made(name)
        before = model.config._attn_implementation
        with pytest.raises(ValueError, match=r"the layout is causal, and \w+ForMaskedLM is not"):
            long.with_sparse_attention(model, CAUSAL)
        assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert decoder"])
def test_transformers_decoders_take_causal_layouts(name):
    found = []
    for layout in (CAUSAL, Layout.from_dense(LOWER, BLOCK)):
        torch.manual_seed(0)
        if name == "bert decoder":
            sizes = {"intermediate_size": 48, "max_position_embeddings": LENGTH, "is_decoder": True}
            model = transformers.BertLMHeadModel(transformers.BertConfig(**COMMON, **sizes)).double().eval()
        else:
            model = made(name)
        found.append(long.with_sparse_attention(model, layout)(words(), use_cache=False).logits)
    assert torch.equal(*found) and found[0].isfinite().all()


def test_a_causal_layout_holds_on_parts_of_a_sequence():
    """`sl.nn.attention` in a model that says nothing of causality itself."""
    layout = sl.sparse.dense(LENGTH, block=32, causal=True)

    def loss_fn(params, batch):
        x = sl.nn.shard_sequence(batch)
        x = (x @ params["w"]).unflatten(-1, (4, 8)).transpose(1, 2)
        return sl.nn.gather_sequence(sl.nn.attention(x, x, x, layout=layout).transpose(1, 2).flatten(2)).square().mean()

    def run(mesh):
        params = sl.shard({"w": weight}, mesh, sl.sequence("m", kind="ulysses"))
        loss, grads = sl.value_and_grad(loss_fn)(params, batch)
        return loss, sl.unshard(grads)["w"]

    generator = torch.Generator().manual_seed(0)
    batch, weight = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((2, LENGTH, 16), (16, 32))
    )
    w = weight.clone().requires_grad_()
    x = (batch @ w).unflatten(-1, (4, 8)).transpose(1, 2)
    plain = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    wanted = plain.transpose(1, 2).flatten(2).square().mean()
    (grad,) = torch.autograd.grad(wanted, w)
    for loss, found in sl.simulate(run, mesh={"m": 2}):
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-10, atol=0)
        torch.testing.assert_close(found, grad, rtol=1e-10, atol=1e-12)


MESHES = {
    "zero 3": ({"data": 2}, sl.zero(3)),
    "sliced": ({"model": 2}, sl.tensor_slicing(gpt.slicing_rules(gpt.GPTConfig(**SIZES)), axis="model")),
    "ulysses": ({"seq": 2}, sl.sequence("seq", kind="ulysses")),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_sparse_gpt_trains_like_one_device(name):
    mesh, transform = MESHES[name]
    config = gpt.GPTConfig(**SIZES, layout=LAYOUT)
    fit, params = gpt.make_loss(config), gpt.init(config)
    batches = [{"tokens": tokens(4, seed), "targets": tokens(4, seed + 9)} for seed in range(2)]
    got = training.simulate(mesh, fit, params, batches, transform, training.optimizer(1.0))
    assert_close(got[2], one_device.train(fit, params, batches, max_norm=1.0)[2], 1e-10)


@pytest.mark.parametrize(
    ("transform", "layout", "message"),
    [
        (sl.sequence("m", kind="ring"), LAYOUT, "takes no layout"),
        (sl.sequence("m", kind="ulysses"), BY_HEAD, "the layout has 4 heads and q has 2"),
        (
            sl.tensor_slicing(gpt.slicing_rules(gpt.GPTConfig(**SIZES)), axis="m"),
            BY_HEAD,
            "the layout has 4 heads and q has 2",
        ),
    ],
)
def test_settings_that_exclude_a_layout_are_refused(transform, layout, message):
    config = gpt.GPTConfig(**SIZES, layout=layout)
    batch = {"tokens": tokens(), "targets": tokens()}
    with pytest.raises((SpecError, ValueError), match=message):
        training.simulate({"m": 2}, gpt.make_loss(config), gpt.init(config), [batch], transform, training.optimizer(1))


COMMON = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**COMMON, intermediate_size=48, max_position_embeddings=LENGTH)
    ),
    "roberta": lambda: transformers.RobertaForMaskedLM(
        transformers.RobertaConfig(**COMMON, intermediate_size=48, max_position_embeddings=LENGTH + 2)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**COMMON, n_positions=LENGTH, bos_token_id=None, eos_token_id=None)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**COMMON, intermediate_size=48, num_key_value_heads=2, max_position_embeddings=LENGTH)
    ),
}


def made(name):
    torch.manual_seed(0)
    return MODELS[name]().double().eval()


@pytest.mark.parametrize("layout", [LAYOUT, BY_HEAD], ids=["shared", "by head"])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_models_are_the_dense_ones_under_the_mask(name, layout):
    """A mask of four dimensions is theirs to add to the scores as it is; and one of padding, with ours."""
    model, ids = made(name), words()
    padding = torch.ones_like(ids)
    padding[0, 50:] = 0
    mask = seen(layout, name in ("gpt2", "llama")) & padding.bool()[:, None, None, :]
    positions = torch.arange(LENGTH).expand_as(ids) + 2 * (name == "roberta")
    additive = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    wanted = model(ids, attention_mask=additive, position_ids=positions).logits
    long.with_sparse_attention(model, layout)
    apply, params = sl.from_module(model)
    found = apply(params, ids, attention_mask=padding, position_ids=positions, use_cache=False).logits
    # A query without a key gives 0 here, and the mean of all values there; padding's own rows do not count.
    rows = mask.any(-1).all(1) & padding.bool()
    torch.testing.assert_close(found[rows], wanted[rows], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_positions_are_repeated(name):
    model = made(name)
    short = model(words()).logits
    long.extend_positions(model, 2 * LENGTH)
    torch.testing.assert_close(model(words()).logits, short, rtol=1e-12, atol=1e-12)
    twice = torch.cat([words(), words()], 1)
    apply, params = sl.from_module(long.with_sparse_attention(model, local(2 * LENGTH)))
    loss = apply(params, twice, labels=twice, use_cache=False).loss
    assert loss.isfinite()
    if name in ("bert", "roberta"):  # with blocks of the diagonal alone, and positions that repeat, halves are equal
        scores = apply(params, twice, use_cache=False).logits
        torch.testing.assert_close(scores[:, :LENGTH], scores[:, LENGTH:], rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="more than 64"):
        long.extend_positions(model, LENGTH)


def local(length):
    return Layout.from_dense(torch.eye(length // BLOCK), BLOCK)


def test_positions_of_shardlibs_models_are_repeated():
    positions = torch.randn(3, 2)
    assert torch.equal(long.extended(positions, 7), positions[[0, 1, 2, 0, 1, 2, 0]])


def test_sequences_are_padded_to_a_multiple():
    batch = {"tokens": torch.ones(2, 50).long(), "features": torch.ones(2, 50, 3), "weight": torch.ones(2)}
    padded = long.pad_to_multiple(batch, 16, {"tokens": 7, "features": 0})
    assert padded["tokens"].shape == (2, 64) and (padded["tokens"][:, 50:] == 7).all()
    assert padded["features"].shape == (2, 64, 3) and not padded["features"][:, 50:].any()
    assert padded["weight"] is batch["weight"]
    assert long.pad_to_multiple(padded, 16, {"tokens": 7})["tokens"].shape == (2, 64)
    with pytest.raises(BatchError, match=r"name tensors \(batch, sequence, ...\) of one"):
        long.pad_to_multiple(batch, 16, {"labels": -100})


def test_other_models_are_refused_with_a_remedy():
    with pytest.raises(TreeError, match=r"sl\.nn\.attention\(q, k, v, layout="):
        long.with_sparse_attention(torch.nn.Linear(2, 2), LAYOUT)
    model = long.with_sparse_attention(made("gpt2"), local(48))
    with pytest.raises(BatchError, match="use_cache=False"):
        cache = model(tokens()[:, :48]).past_key_values
        model(tokens()[:, :1], past_key_values=cache)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_packed_documents_are_refused(name):
    """Which would see each other."""
    documents = [list(range(1, 21)), list(range(2, 27)), list(range(30))]

    def loss(model, together):
        packed = sl.data.packed(documents, LENGTH, together=together)
        batch = packed.rows_at(np.arange(len(packed)))
        apply, params = sl.from_module(model)
        return huggingface.causal_loss(apply)(params, batch).total

    wanted = loss(made(name), False)
    sparse = long.with_sparse_attention(made(name), sl.sparse.dense(LENGTH, block=16, causal=True))
    torch.testing.assert_close(loss(sparse, False), wanted)
    with pytest.raises(TreeError, match=r"not known to keep .* together=False"):
        loss(sparse, True)
    with pytest.raises(RuntimeError, match=r"does not keep packed documents apart.* together=False"):
        sparse(torch.ones(1, 4, dtype=torch.int64), position_ids=torch.tensor([[0, 1, 0, 1]]), use_cache=False)
    with pytest.raises(TreeError, match=r"has sparse attention: write a .*Decoder whose layers call attend"):
        sl.generate(sparse, sl.from_module(sparse)[1], [[1, 2]], 1)


def test_dropout_follows_torchs_seed():
    model = long.with_sparse_attention(made("bert").train(), LAYOUT)

    def run(seed):
        torch.manual_seed(seed)
        return model(tokens()).logits

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))
