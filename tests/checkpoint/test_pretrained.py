"""Models of transformers from a folder: what the files have is read, and what they lack is drawn alike on every rank."""

import copy

import pytest
import torch
import transformers
from helpers.decoders import decoder
from helpers.measure import Live
from helpers.trees import assert_same
from torch import nn

import shardlib as sl
from shardlib.common import thresholds
from shardlib.errors import TreeError

transformers.logging.set_verbosity_error()
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS_OF = {"vocab_size": 37, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGES = {"image_size": 8, "patch_size": 4}
WAVES = {"conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_feat_extract_layers": 2}
TWICE = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "decoder_start_token_id": 1,
}  # fmt: skip
# Class -> its configuration. Most have initialisers that read values, or parameters that none writes.
CLASSES = {
    "BertForMaskedLM": SIZES | TOKENS_OF | {"max_position_embeddings": 12},
    "ModernBertForMaskedLM": SIZES | TOKENS_OF | {"cls_token_id": 1, "sep_token_id": 2},
    "ViTForImageClassification": SIZES | IMAGES,
    "Dinov2Model": {key: size for key, size in SIZES.items() if key != "intermediate_size"} | IMAGES,
    "CLIPModel": {
        "text_config": SIZES | TOKENS_OF | {"max_position_embeddings": 12}, "vision_config": SIZES | IMAGES,
        "projection_dim": 8,
    },
    "Wav2Vec2ForCTC": SIZES | TOKENS_OF | WAVES | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
    "WhisperForConditionalGeneration": TWICE | TOKENS_OF | {
        "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 10,
    },
    "PegasusForConditionalGeneration": TWICE | TOKENS_OF | {"max_position_embeddings": 12},
    "MarianMTModel": TWICE | TOKENS_OF | {"max_position_embeddings": 12},  # its sinusoids are in no file
}  # fmt: skip
TOKENS = torch.arange(16).view(2, 8) * 3 % 32


@pytest.mark.parametrize("kind", CLASSES)
def test_a_model_whose_files_hold_every_value(kind, tmp_path):
    made = getattr(transformers, kind)
    torch.manual_seed(1)
    theirs = made(made.config_class(**CLASSES[kind]))
    theirs.save_pretrained(tmp_path)

    def run(mesh):
        _, params, buffers, frozen = sl.checkpoint.from_pretrained(
            tmp_path, mesh, stage=3, kind=made, buffers=True, frozen=True
        )
        return sl.models.state_dict(theirs, params, buffers), buffers, frozen

    _, (found, buffers, frozen) = sl.simulate(run, mesh={"data": 2})
    assert_same(dict(found), dict(theirs.state_dict()))
    assert_same({name: buffers[name] for name, _ in theirs.named_buffers()}, dict(theirs.named_buffers()))
    every = theirs.named_parameters(remove_duplicate=False)
    assert frozen == [name.replace(".", "/") for name, leaf in every if not leaf.requires_grad]


def saved(folder):
    torch.manual_seed(5)
    module = decoder("llama")
    module.save_pretrained(folder)
    return module


def lora(model):
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


def test_processes_without_a_seed(pool, tmp_path):
    """Nothing that the files hold is compared; a new head and new tokens are drawn alike."""
    theirs = saved(tmp_path / "llama")
    waves = transformers.Wav2Vec2ForCTC  # which draws on the CPU what its files hold
    waves(waves.config_class(**CLASSES["Wav2Vec2ForCTC"])).save_pretrained(tmp_path / "waves")

    def with_head(model):
        model.head = nn.Linear(16, 2)
        return model

    def run(mesh):
        torch.seed()
        sl.checkpoint.from_pretrained(tmp_path / "waves", mesh, kind=waves)
        _, params = sl.checkpoint.from_pretrained(tmp_path / "llama", mesh, stage=3, change=with_head, vocab=40)
        return torch.initial_seed(), sl.unshard(params)

    (seed, params), (other, again) = pool.run(run, mesh={"data": 2})
    assert seed != other
    assert_same(params, again)
    assert params["head"]["weight"].any()
    wanted = theirs.state_dict()
    for name, leaf in sl.models.state_dict(with_head(decoder("llama", vocab_size=40)), params).items():
        if name in wanted:
            rows = len(wanted[name])
            assert torch.equal(leaf[:rows], wanted[name])
            assert len(leaf) == rows or 0 < leaf[rows:].std() < 0.04  # as the model draws them


def test_adapters_train_as_on_one_device_and_no_rank_holds_the_base(tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    sizes = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 64}
    decoder("llama", **sizes).double().save_pretrained(tmp_path / "base")
    theirs = lora(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    for name, leaf in theirs.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(leaf, std=0.1)
    theirs.save_pretrained(tmp_path / "adapter")

    def run(mesh):
        with thresholds.small(1 << 14), Live() as live:
            apply, params, _ = sl.checkpoint.from_pretrained(
                tmp_path / "base", mesh, stage=3, frozen=True,
                change=lambda model: peft.PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True),
            )  # fmt: skip
        assert live.peak < 8 * params.plan.parameters / 2
        state, step = sl.make_train_step(lambda p, x: apply(p, x, labels=x).loss, params, sl.optim.sgd(0.5))
        for _ in range(3):
            state, _ = step(state, TOKENS[mesh.rank % 2][None])
        return sl.models.state_dict(theirs, state.params)

    found = sl.simulate(run, mesh={"data": 4})[0]
    optimizer = torch.optim.SGD([leaf for leaf in theirs.parameters() if leaf.requires_grad], 0.5)
    for _ in range(3):
        theirs.train()(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, wanted in theirs.state_dict().items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-10, atol=1e-10 if "lora_" in name else 0)


class Scorer(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.body, self.again = model.model, copy.deepcopy(model.model.layers[0].mlp)
        self.small = nn.Linear(16, 2)
        with torch.device("meta"):
            self.large = nn.Linear(16, 3)


def test_changes_wrap_copy_leave_out_and_add(tmp_path):
    theirs = saved(tmp_path)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        small = nn.Linear(16, 2)
    torch.manual_seed(7)
    _, params = sl.checkpoint.from_pretrained(tmp_path, sl.make_mesh(), stage=3, change=Scorer)
    wanted = sl.from_module(theirs)[1]
    assert_same(params["body"], wanted["model"])
    assert_same(params["again"], wanted["model"]["layers"][0]["mlp"])
    assert torch.equal(params["small"]["weight"], small.weight)
    assert 0 < params["large"]["weight"].abs().max() <= 0.25  # as nn.Linear draws it: 16 ** -0.5


def halved(model):
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight * 0.5)
    return model


def turned(model):
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = nn.Parameter(layer.weight.t())
    return model


def scaled(model):
    model.model.norm.weight.data.mul_(2)
    return model


def read(model):
    return model if model.model.norm.weight.sum() > 0 else None


@pytest.mark.parametrize(
    ("change", "names"), [(halved, "up_proj"), (turned, "q_proj"), (scaled, "model.norm"), (read, "item")]
)
def test_changes_that_compute_with_weights_are_refused(change, names, tmp_path):
    saved(tmp_path)
    with pytest.raises(TreeError, match=rf"(?s)weights .*not read yet.*{names}.*Let it wrap, copy"):
        sl.checkpoint.from_pretrained(tmp_path, sl.make_mesh(), change=change)


def test_another_head_is_drawn_where_partial_names_it(tmp_path):
    theirs = saved(tmp_path)
    options = {"kind": transformers.AutoModelForSequenceClassification, "stage": 3}
    with pytest.raises(
        TreeError, match=r"lm_head\.weight: in the files, not in .*\n.*score\.weight: not in the checkpoint"
    ):
        sl.checkpoint.from_pretrained(tmp_path, sl.make_mesh(), **options)
    _, params = sl.checkpoint.from_pretrained(tmp_path, sl.make_mesh(), **options, partial=["lm_head.*", "score.*"])
    assert 0 < params["score"]["weight"].std() < 0.04
    assert torch.equal(params["model"]["norm"]["weight"], theirs.model.norm.weight)


def test_fewer_tokens(tmp_path):
    theirs = saved(tmp_path)
    apply, params = sl.checkpoint.from_pretrained(tmp_path, sl.make_mesh(), stage=3, vocab=30)
    logits = sl.make_eval_step(lambda p, x: apply(p, x).logits, params)(params, TOKENS % 30)
    torch.testing.assert_close(logits, theirs(TOKENS % 30).logits[..., :30])


def test_what_is_no_model_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "llama"}')
    (tmp_path / "empty").mkdir()
    for folder, message in (
        ("adapter", r"adapter has an adapter of peft, and not its base model \(llama\): give the base's folder"),
        (
            "meta-llama/Llama-3.1-8B",
            r"names of the Hub are not looked up: download it .*\n?.*snapshot_download\('meta-llama",
        ),
        ("empty", r"empty has no config\.json"),
        ("/no/such/folder", r"folder has no config\.json"),
    ):
        with pytest.raises((TreeError, FileNotFoundError), match=message):
            sl.checkpoint.from_pretrained(folder, sl.make_mesh())
    saved(tmp_path / "base")
    with pytest.raises(
        TreeError, match=r"requires_grad=False.*(?s:.*)Pass frozen=True: from_pretrained then freezes them"
    ):
        sl.checkpoint.from_pretrained("base", sl.make_mesh(), change=lambda model: model.requires_grad_(False))
