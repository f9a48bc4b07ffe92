"""The BERT against transformers' BERT with the same weights, and its training on meshes against one device."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers import training
from helpers.models import shaken
from helpers.trees import assert_close
from oracle import one_device
from test_gpt import queries_first

import shardlib as sl
from shardlib.models import bert
from shardlib.rng import Key

CONFIG = bert.BERTConfig(vocab=32, layers=2, width=24, heads=4, sequence=16, dtype=torch.float64)
PRE = dataclasses.replace(CONFIG, pre_norm=True)
MASK = 31


def random_params(config):
    params = shaken(bert.init(config))
    params["head"]["weight"] = params["embed"]["tokens"]
    return params


def random_batch(config, rows=4, seed=2):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab - 1, (rows, config.sequence), generator=generator)
    lengths = torch.randint(config.sequence // 2, config.sequence + 1, (rows, 1), generator=generator)
    mask = torch.arange(config.sequence) < lengths
    batch = bert.mask_tokens(config, tokens, MASK, Key(seed), share=0.4)
    segments = torch.randint(config.segments, tokens.shape, generator=generator)
    targets = batch["targets"].where(mask, bert.IGNORED)
    return {"tokens": batch["tokens"], "targets": targets, "mask": mask, "segments": segments}


def theirs(config, params):
    """transformers' BERT with ``params`` copied in."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": config.vocab, "hidden_size": config.width, "num_hidden_layers": config.layers}
    sizes |= {"num_attention_heads": config.heads, "intermediate_size": 4 * config.width}
    sizes |= {"max_position_embeddings": config.sequence, "type_vocab_size": config.segments}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).eval()
    embedded, head = params["embed"], params["head"]
    state = {
        "bert.embeddings.word_embeddings.weight": embedded["tokens"],
        "bert.embeddings.position_embeddings.weight": embedded["positions"],
        "bert.embeddings.token_type_embeddings.weight": embedded["segments"],
        "cls.predictions.decoder.weight": head["weight"],
        "cls.predictions.bias": torch.zeros(config.vocab),
        "cls.predictions.decoder.bias": torch.zeros(config.vocab),
    }
    pairs = {
        "bert.embeddings.LayerNorm": embedded["norm"],
        "cls.predictions.transform.dense": head["dense"],
        "cls.predictions.transform.LayerNorm": head["norm"],
    }
    for i, p in enumerate(params["blocks"]):
        layer = f"bert.encoder.layer.{i}"
        packed = {key: queries_first(value, config).chunk(3) for key, value in p["attn"]["qkv"].items()}
        for number, name in enumerate(("query", "key", "value")):
            pairs[f"{layer}.attention.self.{name}"] = {key: value[number] for key, value in packed.items()}
        pairs |= {
            f"{layer}.attention.output.dense": p["attn"]["out"],
            f"{layer}.attention.output.LayerNorm": p["ln1"],
            f"{layer}.intermediate.dense": p["mlp"]["up"],
            f"{layer}.output.dense": p["mlp"]["down"],
            f"{layer}.output.LayerNorm": p["ln2"],
        }
    state |= {f"{name}.{key}": value for name, pair in pairs.items() for key, value in pair.items()}
    model.to(config.dtype).load_state_dict(state)
    return model


def test_same_logits_and_loss_as_transformers():
    params, batch = random_params(CONFIG), random_batch(CONFIG)
    with torch.no_grad():
        scores = bert.logits(CONFIG, params, batch)
        expected = theirs(CONFIG, params)(
            batch["tokens"], attention_mask=batch["mask"].long(), token_type_ids=batch["segments"]
        ).logits
        torch.testing.assert_close(scores, expected, atol=1e-11, rtol=1e-11)
        total, weight = bert.make_loss(CONFIG)(params, batch)
        wanted = F.cross_entropy(expected.flatten(0, 1), batch["targets"].flatten())
        torch.testing.assert_close(total / weight, wanted, atol=1e-11, rtol=1e-11)


MESHES = {
    "data": ({"data": 2}, sl.zero(3)),
    "sliced": ({"model": 2}, sl.tensor_slicing(bert.slicing_rules(CONFIG), axis="model")),
    "3-d": ({"data": 2, "model": 2}, sl.chain(sl.zero(2), sl.tensor_slicing(bert.slicing_rules(CONFIG), axis="model"))),
    "ulysses": ({"seq": 2}, sl.sequence(axis="seq", kind="ulysses")),
    "ring": ({"seq": 2}, sl.sequence(axis="seq", kind="ring")),
}


@pytest.mark.parametrize("config", [CONFIG, PRE], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("name", MESHES)
def test_trains_like_one_device(name, config):
    """Rows of different lengths and numbers of targets."""
    mesh, transform = MESHES[name]
    params, batches = random_params(config), [random_batch(config, seed=seed) for seed in range(3)]
    fit = bert.make_loss(config)
    got = training.simulate(mesh, fit, params, batches, transform, training.optimizer(1.0))

    def mean(params, batch):
        total, weight = fit(params, batch)
        return total / weight

    assert_close(got[2], one_device.train(mean, params, batches, max_norm=1.0)[2], 1e-10)


def test_every_dropout_has_a_key_of_its_own(monkeypatch):
    config, keys = dataclasses.replace(CONFIG, dropout=0.3), []

    def noting(p, x, rng, name):
        keys.append(rng.fold_in(name))
        return x

    monkeypatch.setattr(bert, "drop", noting)
    bert.make_loss(config)(random_params(config), random_batch(config), Key(1))
    assert len(keys) == len(set(keys)) == 1 + 2 * config.layers


def test_masking_has_the_papers_shares():
    config = dataclasses.replace(CONFIG, vocab=1000)
    tokens = torch.randint(999, (200, 500), generator=torch.Generator().manual_seed(0))
    batch = bert.mask_tokens(config, tokens, 999, Key(3))
    counts = batch["targets"] != bert.IGNORED
    assert torch.equal(batch["targets"][counts], tokens[counts])
    assert torch.equal(batch["tokens"][~counts], tokens[~counts])
    shown, true = batch["tokens"][counts], tokens[counts]
    shares = [counts.double().mean(), (shown == 999).double().mean(), (shown == true).double().mean()]
    assert shares == pytest.approx([0.15, 0.8, 0.1], abs=0.01)


@pytest.mark.parametrize(("field", "value"), [("layers", 0), ("segments", 0), ("heads", 5), ("dropout", 1.0)])
def test_sizes_are_checked(field, value):
    with pytest.raises(ValueError, match=f"BERTConfig: {field}={value}"):
        bert.BERTConfig(**{field: value})
