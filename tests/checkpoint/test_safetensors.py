"""Parameters in safetensors files: transformers and safetensors read what ranks write, and ranks what they wrote."""

import json

import pytest
import torch
from helpers.models import tiny_gpt
from helpers.trees import assert_same
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, GPT2Config, LlamaConfig

import shardlib as sl
from shardlib.common import thresholds
from shardlib.errors import CheckpointError, TreeError
from shardlib.models import gpt, huggingface
from shardlib.tree import leaves_of, tree_map

SIZES = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {
    "vocab_size": 37,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "gpt2, tied": (AutoModelForCausalLM, GPT2Config(**GPT2, tie_word_embeddings=True)),
    "llama": (AutoModelForCausalLM, LlamaConfig(**SIZES, bos_token_id=1, eos_token_id=2)),
    "bert": (AutoModelForMaskedLM, BertConfig(**SIZES, max_position_embeddings=16)),
}
TOKENS = torch.arange(10)[None] * 3 % 37


def made(name):
    torch.manual_seed(3)
    kind, config = MODELS[name]
    return kind, kind.from_config(config).eval()


def transforms(name, module):
    yield {"data": 1}, sl.zero(0)
    yield {"data": 3}, sl.zero(3)
    yield {"node": 2, "data": 2}, sl.zero(1, replicate="node")
    if name == "llama":
        yield {"data": 2, "model": 2}, sl.chain(sl.zero(2), sl.tensor_slicing(huggingface.slicing_rules(module)))


@pytest.mark.parametrize("size", [5 * 10**9, 5000])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_what_ranks_export(name, size, tmp_path):
    kind, module = made(name)
    wanted = module(TOKENS).logits
    for number, (mesh, transform) in enumerate(transforms(name, module)):
        folder = tmp_path / str(number)

        def run(mesh, folder=folder, transform=transform):
            _, params = sl.from_module(made(name)[1])
            with thresholds.small(64):  # so that ranks with copies write parts of leaves
                sl.checkpoint.export_safetensors(folder, sl.shard(params, mesh, transform), max_shard_size=size)

        sl.simulate(run, mesh=mesh)
        module.config.save_pretrained(folder)
        files = sorted(path.name for path in folder.glob("*.safetensors*"))
        assert files == ["model.safetensors"] if size > 10**6 else files[0].startswith("model-00001-of-")
        loaded, report = kind.from_pretrained(folder, output_loading_info=True)
        assert not any(report[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
        assert torch.equal(loaded.eval()(TOKENS).logits, wanted)


@pytest.mark.parametrize("size", ["5GB", "5KB"])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_import_what_transformers_saves(name, size, tmp_path):
    _, module = made(name)
    module.save_pretrained(tmp_path, max_shard_size=size)
    for mesh, transform in transforms(name, module):

        def run(mesh, transform=transform):
            _, params = sl.from_module(made(name)[1])
            for leaf in leaves_of(params):
                leaf.data.zero_()
            params = sl.checkpoint.import_safetensors(tmp_path, sl.shard(params, mesh, transform))
            return sl.models.state_dict(made(name)[1], params)

        for found in sl.simulate(run, mesh=mesh):
            assert_same(dict(found), dict(module.state_dict()))


def test_a_pipelines_parameters(tmp_path):
    """Each rank has those of its stage; the files have all."""
    _, params = tiny_gpt()
    blocks = gpt.to_blocks(params)

    def run(mesh, transform):
        sharded = sl.shard(blocks, mesh, transform)
        sl.checkpoint.export_safetensors(tmp_path, sharded, buffers={"extra": torch.arange(3)})

    sl.simulate(run, sl.chain(sl.zero(1), sl.pipeline("1f1b", 2)), mesh={"pipe": 2, "data": 2})
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found.pop("extra"), torch.arange(3))
    assert sorted(found) == sorted(name.replace("/", ".") for name in sl.shard(blocks, sl.make_mesh()).plan.shape.paths)
    empty = tree_map(torch.zeros_like, blocks)

    def back(mesh):
        return sl.unshard(sl.checkpoint.import_safetensors(tmp_path, sl.shard(empty, mesh, stage=3), partial=["extra"]))

    assert_same(sl.simulate(back, mesh={"data": 3})[0], blocks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool])
def test_dtypes(dtype, tmp_path):
    values = (torch.arange(12).reshape(3, 4) % 5).to(dtype)
    params = sl.shard({"w": torch.ones(2), "frozen": values}, sl.make_mesh(), sl.freeze("frozen"))
    sl.checkpoint.export_safetensors(tmp_path, params)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_tensor("frozen"), values)


def test_parameters_keep_their_dtype(tmp_path):
    save_file({"w": torch.full((4,), 1.25, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    params = sl.shard({"w": torch.zeros(4)}, sl.make_mesh())
    found = sl.checkpoint.import_safetensors(tmp_path / "model.safetensors", params)
    assert found["w"].dtype == torch.float32 and found["w"].tolist() == [1.25] * 4


def test_one_file_is_read_before_an_index(tmp_path):
    """As transformers does: a file that was written into the folder of an older model in several ones."""
    params = {"a": torch.ones(100), "b": torch.ones(100)}
    sl.checkpoint.export_safetensors(tmp_path, sl.shard(params, sl.make_mesh()), max_shard_size=500)
    save_file({"a": torch.zeros(100), "b": torch.zeros(100)}, tmp_path / "model.safetensors")
    found = sl.checkpoint.import_safetensors(tmp_path, sl.shard(params, sl.make_mesh()))
    assert not found["a"].any() and not found["b"].any()


def test_other_names_and_shapes_are_listed_and_nothing_changes(tmp_path):
    save_file({"a": torch.ones(3), "b": torch.ones(2), "only": torch.ones(1)}, tmp_path / "model.safetensors")

    def run(mesh):
        params = sl.shard({"a": torch.zeros(3), "b": torch.zeros(4), "new": torch.zeros(1)}, mesh, stage=3)
        with pytest.raises(TreeError) as caught:
            sl.checkpoint.import_safetensors(tmp_path, params)
        assert not any(leaf.any() for leaf in leaves_of(params))
        return str(caught.value)

    one, other = sl.simulate(run, mesh={"data": 2})
    assert one == other
    for line in ("b: saved [2], wanted [4]", "new: not in the checkpoint", "only: in the files, not in the parameters"):
        assert f"  - {line}\n" in one
    params = sl.shard({"a": torch.zeros(3), "new": torch.full((1,), 7.0)}, sl.make_mesh())
    found = sl.checkpoint.import_safetensors(tmp_path, params, partial=["b", "new", "only"])
    assert found["a"].tolist() == [1, 1, 1] and found["new"].tolist() == [7]


def test_files_that_are_none(tmp_path):
    params = sl.shard({"a": torch.zeros(3)}, sl.make_mesh())
    with pytest.raises(FileNotFoundError, match=r"no safetensors files at .*model\.safetensors not found"):
        sl.checkpoint.import_safetensors(tmp_path, params)
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    for wrong, why in (
        (content[:-4], "ends at byte"),
        (b"\xff" * 30, "its header would have"),
        (content[:20], "its header"),
        (
            content.replace(b'"shape":[3]', b'"shape":[2]'),
            r"model.safetensors: a has shape \[2\] of F32 in 12 bytes at 0",
        ),
        (content.replace(b"data_offsets", b"data_offstes"), r"model.safetensors is no safetensors file \(KeyError"),
        (b"\2" + 7 * b"\0" + b"[]", r"model.safetensors is no safetensors file \(TypeError"),
    ):
        (tmp_path / "model.safetensors").write_bytes(wrong)
        with pytest.raises(CheckpointError, match=why):
            sl.checkpoint.import_safetensors(tmp_path, params)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "other.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"other\.safetensors not found"):
        sl.checkpoint.import_safetensors(tmp_path, params)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json is no index of safetensors files"):
        sl.checkpoint.import_safetensors(tmp_path, params)


def test_what_is_not_sharded_is_refused(tmp_path):
    state, _ = sl.make_train_step(lambda p, x: p["a"].sum(), {"a": torch.ones(3)}, sl.optim.sgd(0.1))
    for wrong in ({"a": torch.ones(3)}, state):
        for call in (sl.checkpoint.export_safetensors, sl.checkpoint.import_safetensors):
            with pytest.raises(TypeError, match=rf"{call.__name__}: {type(wrong).__name__}, where sharded parameters"):
                call(tmp_path, wrong)
    for call in (sl.checkpoint.import_dcp, sl.checkpoint.import_deepspeed):
        with pytest.raises(TypeError, match=r"state\.params, or a state of make_train_step"):
            call(tmp_path, {"a": torch.ones(3)})


def test_another_shape_that_partial_names_keeps_its_values(tmp_path):
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4)}, tmp_path / "model.safetensors")
    params = sl.shard({"a": torch.full((2, 3), 7.0), "b": torch.full((2, 2), 7.0)}, sl.make_mesh())
    found = sl.checkpoint.import_safetensors(tmp_path, params, partial=["b"])
    assert found["a"].tolist() == [[1, 1, 1]] * 2 and found["b"].tolist() == [[7, 7]] * 2


@pytest.mark.parametrize("name", MODELS)
def test_a_model_from_a_folder(name, tmp_path):
    """The logits are the module's."""
    kind, module = made(name)
    module.save_pretrained(tmp_path, max_shard_size="5KB")
    wanted = module(TOKENS).logits

    def run(mesh):
        apply, params = sl.checkpoint.from_pretrained(tmp_path, mesh, stage=3, kind=kind)
        evaluate = sl.make_eval_step(lambda params, tokens: apply(params, tokens).logits, params)
        return evaluate(params, TOKENS)

    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} | dict.fromkeys(
        ["hidden_dropout_prob", "attention_probs_dropout_prob"], 0.0
    )
    module.config.update({key: value for key, value in quiet.items() if hasattr(module.config, key)})
    module.config.save_pretrained(tmp_path)
    for logits in sl.simulate(run, mesh={"data": 2}):
        torch.testing.assert_close(logits, wanted)
