"""The GPT against transformers' GPT-2 with the same weights, and its own options."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from helpers.models import shaken
from optree import tree_flatten, tree_map

from shardlib.models import gpt
from shardlib.rng import Key

CONFIG = gpt.GPTConfig(vocab=61, layers=3, width=24, heads=4, sequence=17)
EXACT = dataclasses.replace(CONFIG, dtype=torch.float64)


def random_params(config):
    params = shaken(gpt.init(config))
    if config.tie:
        params["head"]["weight"] = params["embed"]["tokens"]
    return params


def random_batch(config, rows=3, length=None, seed=2):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(config.vocab, (rows, (length or config.sequence) + 1), generator=generator)
    return {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}


def queries_first(rows, config):
    """Rows in the order (heads, 3, size) to GPT-2's (3, heads, size)."""
    size = config.width // config.heads
    return rows.unflatten(0, (config.heads, 3, size)).transpose(0, 1).flatten(0, 2)


def oracle(config, params):
    """transformers' GPT-2 with ``params`` copied in; its weights lie (in, out), ours (out, in)."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": config.vocab,
        "n_positions": config.sequence,
        "n_embd": config.width,
        "n_layer": config.layers,
    }
    theirs = transformers.GPT2Config(
        bos_token_id=None, eos_token_id=None, n_head=config.heads, tie_word_embeddings=config.tie, **sizes
    )
    model = transformers.GPT2LMHeadModel(theirs).eval()
    state = {
        "transformer.wte.weight": params["embed"]["tokens"],
        "transformer.wpe.weight": params["embed"]["positions"],
        "transformer.ln_f.weight": params["head"]["norm"]["weight"],
        "transformer.ln_f.bias": params["head"]["norm"]["bias"],
        "lm_head.weight": params["head"]["weight"],
    }
    for i, p in enumerate(params["blocks"]):
        for name, pair in {"ln_1": p["ln1"], "ln_2": p["ln2"]}.items():
            state |= {f"transformer.h.{i}.{name}.{key}": value for key, value in pair.items()}
        for name, pair in {
            "attn.c_attn": {key: queries_first(value, config) for key, value in p["attn"]["qkv"].items()},
            "attn.c_proj": p["attn"]["out"],
            "mlp.c_fc": p["mlp"]["up"],
            "mlp.c_proj": p["mlp"]["down"],
        }.items():
            state[f"transformer.h.{i}.{name}.weight"] = pair["weight"].mT
            state[f"transformer.h.{i}.{name}.bias"] = pair["bias"]
    model.to(config.dtype).load_state_dict(state)
    return model


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_same_logits_and_loss_as_gpt2(tie, dtype, tolerance):
    config = dataclasses.replace(CONFIG, tie=tie, dtype=dtype)
    params, batch = random_params(config), random_batch(config)
    model = oracle(config, params)
    with torch.no_grad():
        expected = model(batch["tokens"]).logits
        scores = gpt.logits(config, params, batch["tokens"])
        torch.testing.assert_close(scores, expected, atol=tolerance, rtol=tolerance)
        loss = F.cross_entropy(expected.flatten(0, 1), batch["targets"].flatten())
        ours = gpt.make_loss(config)(params, batch)
        torch.testing.assert_close(ours, loss, atol=tolerance, rtol=tolerance)


def test_same_gradients_as_gpt2():
    params, batch = random_params(EXACT), random_batch(EXACT)
    model = oracle(EXACT, params)
    F.cross_entropy(model(batch["tokens"]).logits.flatten(0, 1), batch["targets"].flatten()).backward()
    params = tree_map(lambda p: p.requires_grad_(), params)
    gpt.make_loss(EXACT)(params, batch).backward()
    inner = model.transformer
    for ours, theirs in [
        (params["embed"]["tokens"], inner.wte.weight.grad),
        (params["embed"]["positions"], inner.wpe.weight.grad),
        (params["blocks"][2]["mlp"]["down"]["bias"], inner.h[2].mlp.c_proj.bias.grad),
    ]:
        torch.testing.assert_close(ours.grad, theirs, atol=1e-12, rtol=1e-10)
    ours = queries_first(params["blocks"][1]["attn"]["qkv"]["weight"].grad, EXACT)
    torch.testing.assert_close(ours, inner.h[1].attn.c_attn.weight.grad.mT, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("tie", [False, True])
def test_an_untrained_model_has_the_loss_of_guessing(tie):
    config = dataclasses.replace(CONFIG, vocab=256, width=96, tie=tie)
    loss = gpt.make_loss(config)(gpt.init(config), random_batch(config, rows=16))
    assert loss.item() == pytest.approx(math.log(256), abs=0.05)


@pytest.mark.parametrize("tie", [False, True])
def test_parameters_are_counted_seeded_and_typed(tie):
    config = dataclasses.replace(CONFIG, tie=tie, dtype=torch.bfloat16)
    leaves, structure = tree_flatten(gpt.init(config))
    distinct = {id(leaf): leaf for leaf in leaves}.values()
    assert sum(leaf.numel() for leaf in distinct) == gpt.parameters_count(config)
    assert len(leaves) - len(distinct) == tie
    assert all(leaf.dtype == torch.bfloat16 for leaf in leaves)
    again, other = tree_flatten(gpt.init(config))[0], tree_flatten(gpt.init(config, seed=1))[0]
    assert all(torch.equal(a, b) for a, b in zip(leaves, again, strict=True))
    assert not torch.equal(leaves[-1], other[-1])
    on_meta, same = tree_flatten(gpt.init(config, device="meta"))
    assert same == structure and all(leaf.is_meta for leaf in on_meta)


def test_logits_do_not_depend_on_later_tokens():
    params, tokens = random_params(CONFIG), random_batch(CONFIG)["tokens"]
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % CONFIG.vocab
    before, after = (gpt.logits(CONFIG, params, t) for t in (tokens, changed))
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_dropout_follows_its_key():
    config = dataclasses.replace(CONFIG, dropout=0.3)
    params, batch, loss = random_params(config), random_batch(config), gpt.make_loss(config)
    assert torch.equal(loss(params, batch, Key(1)), loss(params, batch, Key(1)))
    assert not torch.equal(loss(params, batch, Key(1)), loss(params, batch, Key(2)))
    with pytest.raises(ValueError, match=r"dropout=0.3, but no rng"):
        loss(params, batch)


def test_every_dropout_has_a_key_of_its_own(monkeypatch):
    """One after the embedding and two in each layer; in blocks too."""
    config, keys = dataclasses.replace(CONFIG, dropout=0.3), []

    def noting(p, x, rng, name):
        keys.append(rng.fold_in(name))
        return x

    monkeypatch.setattr(gpt, "drop", noting)
    params, batch = random_params(config), random_batch(config)
    for loss, given in ((gpt.make_loss(config), params), (gpt.make_sequential(config), gpt.to_blocks(params))):
        keys.clear()
        loss(given, batch, Key(1))
        assert len(keys) == len(set(keys)) == 1 + 2 * config.layers


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"heads": 5}, "heads=5 does not divide width=24"),
        ({"layers": 0}, "layers=0, but it must be at least 1"),
        ({"dropout": 1.0}, r"dropout=1.0, but it must lie in \[0, 1\)"),
    ],
)
def test_invalid_configurations_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **bad)


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match="18 tokens are more than the model's sequence of 17"):
        gpt.logits(CONFIG, random_params(CONFIG), torch.zeros(1, 18, dtype=torch.int64))
