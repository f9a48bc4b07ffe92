"""`shardlib generate`, as a user types it."""

import dataclasses
import re

import pytest
import torch
from helpers.decoders import decoder

import shardlib as sl
from shardlib.commands import __main__ as cli
from shardlib.models import gpt

CONFIG = gpt.GPTConfig(layers=1, width=32, heads=2, sequence=24)
SIZES = ["--layers", "1", "--width", "32", "--heads", "2", "--sequence", "24"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint, and its parameters."""
    batch = dict.fromkeys(("tokens", "targets"), torch.arange(8).expand(2, 8).contiguous())
    params = sl.shard(gpt.init(CONFIG), sl.make_mesh(), stage=2)
    state, step = sl.make_train_step(gpt.make_loss(CONFIG), params, sl.optim.adamw(1e-2))
    state, _ = step(state, batch)
    folder = tmp_path_factory.mktemp("run")
    sl.checkpoint.save(folder, state)
    return folder, sl.unshard(state.params)


def test_a_checkpoint_of_training(trained, capsys):
    folder, params = trained
    options = ["--max-new", "9", "--temperature", "0.9", "--top-k", "50", "--seed", "3"]
    given = ["--prompt", "def ", "--tokens", "97,98", *options]
    assert cli.main(["generate", str(folder), *given, *SIZES]) == 0
    prompts = [list(b"def "), [97, 98]]
    texts = sl.generate(CONFIG, params, prompts, 9, temperature=0.9, top_k=50, seed=3)
    wanted = [bytes([*p, *t.tolist()]).decode("utf-8", errors="replace") for p, t in zip(prompts, texts)]
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in wanted)


@pytest.mark.parametrize(("kind", "bits"), [("llama", None), ("llama", "8"), ("mixtral", None)])
def test_a_model_of_transformers(tmp_path, capsys, kind, bits):
    model = decoder(kind, torch.float32).eval()
    model.save_pretrained(tmp_path)
    options = ["--temperature", "0", "--max-new", "5", "--stop", "3", *(["--bits", bits] if bits else [])]
    assert cli.main(["generate", str(tmp_path), "--tokens", "1,5,9", *options]) == 0
    _, params = sl.from_module(model)
    params = sl.models.decoding.quantized(model, params) if bits else params
    (text,) = sl.generate(model, params, [[1, 5, 9]], 5, temperature=0, stop=[3])
    assert capsys.readouterr().out == ",".join(map(str, [1, 5, 9, *text.tolist()])) + "\n"


@pytest.mark.parametrize("bits", [None, "8"])
def test_experts_in_host_memory(tmp_path, capsys, bits):
    moe = gpt.Experts((0, 4), sl.nn.MoEConfig(sl.nn.routers.top_k(2, renormalise="chosen"), "gelu_tanh"))
    config = dataclasses.replace(CONFIG, layers=2, moe=moe)
    params = sl.shard(gpt.init(config), sl.make_mesh(), stage=0)
    state, _ = sl.make_train_step(gpt.make_loss(config), params, sl.optim.sgd(0.1))
    sl.checkpoint.save(tmp_path, state)
    sizes = [*SIZES, "--layers", "2", "--experts", "4"]
    given = [
        "generate",
        str(tmp_path),
        "--tokens",
        "1,5,9",
        "--max-new",
        "5",
        *sizes,
        *(["--bits", bits] if bits else []),
    ]
    capsys.readouterr()
    assert cli.main(given) == 0
    whole = capsys.readouterr()
    assert cli.main([*given, "--experts-on-device", "2"]) == 0
    found = capsys.readouterr()
    assert found.out == whole.out and whole.err == ""
    assert re.fullmatch(r"experts: Tally\(used=[1-9]\d*, misses=[1-9]\d*, .*\)\n", found.err)


def test_a_tokenizer(tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    decoder("llama", torch.float32).save_pretrained(tmp_path)
    assert cli.main(["generate", str(tmp_path), "--prompt", "w1 w5", "--max-new", "3"]) == 0
    printed = capsys.readouterr().out.split()
    assert printed[:2] == ["w1", "w5"] and len(printed) == 5


def test_refusals(trained, tmp_path):
    folder, _ = trained
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    for given, message in (
        ([str(folder), *SIZES], "give a --prompt, or --tokens"),
        ([str(folder), "--prompt", "a"], r"params/.*\n"),
        ([str(folder), "--prompt", "", *SIZES], "prompt 0 is"),
        ([str(tmp_path), "--prompt", "a"], "no"),
        (["owner/model", "--prompt", "a"], "names of the Hub are not looked up"),
        ([str(adapter), "--prompt", "a"], "has an adapter of peft"),
        ([str(folder), "--prompt", "a", "--top-k", "0", *SIZES], "top_k=0"),
        ([str(folder), "--prompt", "a", "--experts-on-device", "2", *SIZES], "names no layers of experts"),
    ):
        with pytest.raises(SystemExit, match=f"shardlib generate: (?s:.*){message}"):
            cli.main(["generate", *given])
    decoder("llama", torch.float32).save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="the folder has no tokenizer; give --tokens"):
        cli.main(["generate", str(tmp_path), "--prompt", "a"])
