"""Files of transformers' models with experts, whose tensors the models join: read and written a box at a time."""

import json
import math

import pytest
import torch
from helpers.decoders import EXPERTS, decoder
from helpers.trees import assert_same
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, core_model_loading

import shardlib as sl
from shardlib.checkpoint import reading
from shardlib.common import thresholds
from shardlib.errors import TreeError
from shardlib.models import huggingface
from shardlib.models.huggingface import conversion
from shardlib.models.huggingface.conversion import OriginTensor

TOKENS = torch.arange(8)[None] * 3 % 32


def saved(kind, folder, size="5GB"):
    """A model, with a bias of its router that is not zero, in transformers' own files."""
    torch.manual_seed(5)
    module = decoder(kind, num_hidden_layers=2)
    for name, buffer in module.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.rand(buffer.shape))
    module.save_pretrained(folder, max_shard_size=size)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("dealt", [False, True], ids=["stage 3", "experts dealt out"])
@pytest.mark.parametrize("kind", EXPERTS)
def test_ranks_read_and_write_transformers_files(kind, dealt, tmp_path):
    """The logits are the model's; and the tensors in the files that ranks write are those in transformers' own."""
    theirs = saved(kind, tmp_path / "theirs", "4KB" if dealt else "5GB")
    wanted, rules = theirs(TOKENS).logits, huggingface.expert_rules(theirs)
    mesh, transform = {"data": 2}, sl.zero(3)
    if dealt:
        mesh, transform = {"data": 1, "expert": 2}, sl.chain(sl.experts(rules=rules), sl.zero(1))

    def run(mesh):
        apply, params, buffers = sl.checkpoint.from_pretrained(
            tmp_path / "theirs", mesh, transform, buffers=True, change=huggingface.with_experts
        )
        with thresholds.small(64):  # so that ranks with copies write parts of leaves
            sl.checkpoint.export_safetensors(
                tmp_path / "ours", params, module=decoder(kind, num_hidden_layers=2), buffers=buffers,
                max_shard_size=5 * 10**9 if dealt else 4000,
            )  # fmt: skip
        evaluate = sl.make_eval_step(lambda params, tokens: apply(params, buffers, tokens)[0].logits, params)
        return evaluate(params, TOKENS)

    for logits in sl.simulate(run, mesh=mesh):
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-6)
    theirs.config.save_pretrained(tmp_path / "ours")
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert_same(dict(again.state_dict()), dict(theirs.state_dict()))
    assert_same(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs"))


def test_a_model_from_a_folder_has_its_buffers(tmp_path):
    """Without ``buffers=True`` they are in ``apply``."""
    theirs = saved("deepseek_v3", tmp_path)
    apply, params = sl.checkpoint.from_pretrained(tmp_path, sl.make_mesh())
    logits = sl.make_eval_step(lambda params, tokens: apply(params, tokens).logits, params)(params, TOKENS)
    torch.testing.assert_close(logits, theirs(TOKENS).logits)
    with pytest.raises(TreeError, match=r"mlp\.gate\.e_score_correction_bias: not given\nPass .* and buffers="):
        sl.checkpoint.export_safetensors(tmp_path / "without", params, module=theirs)


def tensors_of(folder):
    """Name -> tensor of all files of a folder."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def test_a_rank_reads_its_own_experts_only(tmp_path, monkeypatch):
    theirs = saved("qwen3_moe", tmp_path)
    dealt = sl.chain(sl.experts(rules=huggingface.expert_rules(theirs)), sl.zero(0, axis="expert"))
    read = []
    fill = reading.TensorsOnDisk._read_at

    def counted(self, fd, view, offset, file):
        read.append(view.nbytes)
        fill(self, fd, view, offset, file)

    def run(mesh):
        sl.checkpoint.from_pretrained(tmp_path, mesh, dealt, change=huggingface.with_experts)

    monkeypatch.setattr(reading.TensorsOnDisk, "_read_at", counted)
    sl.simulate(run, mesh={"expert": 2})
    sizes = {name: leaf.nbytes for name, leaf in theirs.named_parameters()}
    experts = sum(size for name, size in sizes.items() if "experts" in name)
    assert 0 < experts < sum(sizes.values())
    assert sum(read) == 2 * sum(sizes.values()) - experts


def test_what_a_model_does_not_need_is_left_out(tmp_path):
    """DeepSeek-V3's files have a layer for predicting further tokens, which transformers' model lacks."""
    theirs = saved("deepseek_v3", tmp_path)
    theirs._keys_to_ignore_on_load_unexpected = [r"model\.layers\.9.*"]
    found = conversion.of_model(theirs, described({"model.layers.9.head.weight": (2, 2), "model.norm.weight": (16,)}))
    assert list(found) == ["model.norm.weight"]


def test_more_than_ten_experts(tmp_path):
    theirs = decoder("olmoe", num_hidden_layers=1, num_experts=12)
    theirs.save_pretrained(tmp_path)
    _, params = sl.checkpoint.from_pretrained(tmp_path, sl.make_mesh())
    assert_same(dict(sl.models.state_dict(theirs, params)), dict(theirs.state_dict()))


def described(shapes):
    return {name: (torch.float32, shape) for name, shape in shapes.items()}


def test_files_with_a_prefix_more_or_less():
    """Those of a base model without its head, and those whose names are old."""
    model = decoder("mixtral")
    files = {"layers.0.block_sparse_moe.gate.weight": (4, 16), "model.norm.weight": (16,), "other": (1,)}
    found = conversion.of_model(model, described(files))
    assert {name: tensor.origins[0].name for name, tensor in found.items()} == {
        "model.layers.0.mlp.gate.weight": "layers.0.block_sparse_moe.gate.weight",
        "model.norm.weight": "model.norm.weight",
        "other": "other",
    }


def test_experts_that_the_files_lack(tmp_path):
    theirs = saved("mixtral", tmp_path)
    tensors = tensors_of(tmp_path)
    tensors.pop("model.layers.1.block_sparse_moe.experts.3.w3.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(TreeError, match=r"cannot make model\.layers\.1\.mlp\.experts\.gate_up_proj of these"):
        sl.checkpoint.from_pretrained(tmp_path, sl.make_mesh())
    for name in [name for name in tensors if ".1." in name and ".experts.3." in name]:
        tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(TreeError) as caught:
        sl.checkpoint.from_pretrained(tmp_path, sl.make_mesh())
    width = theirs.config.hidden_size
    assert f"model.layers.1.mlp.experts.down_proj: saved [3, {width}, 12], wanted [4, {width}, 12]" in str(caught.value)


def test_what_cannot_be_converted_is_refused(tmp_path):
    model = decoder("mixtral")
    params = sl.shard(sl.from_module(model)[1], sl.make_mesh())
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(TreeError, match="Linear is no model of transformers"):
        sl.checkpoint.export_safetensors(tmp_path, params, module=linear)
    blocks = sl.shard(sl.from_module(model, blocks=huggingface.decoder_blocks(model))[1], sl.make_mesh())
    with pytest.raises(TreeError, match=r"0\.model\.embed_tokens\.weight: the module has none"):
        sl.checkpoint.export_safetensors(tmp_path, blocks, module=model)
    model._weight_conversions = [core_model_loading.WeightConverter("gate", "gate", [core_model_loading.Transpose()])]
    with pytest.raises(TreeError, match="changes these tensors by transpose, and only joined and cut ones"):
        sl.checkpoint.export_safetensors(tmp_path, params, module=model)
    saved("mixtral", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(TreeError, match="has quantized weights"):
        sl.checkpoint.from_pretrained(tmp_path, sl.make_mesh())


@st.composite
def joined(draw, name="x"):
    """A tensor joined and cut, and the same as it is followed."""
    shapes = draw(st.integers(1, 3)), tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    count, shape = shapes
    values = [torch.arange(math.prod(shape)).reshape(shape) + 1000 * at for at in range(count)]
    both = [values, [OriginTensor.whole(str(at), torch.int64, shape) for at in range(count)]]
    how = draw(st.sampled_from(["stack", "cat"]))
    dim = draw(st.integers(0, len(shape) - (how == "cat")))
    both = [getattr(torch, how)(each, dim) for each in both]
    for _ in range(draw(st.integers(0, 3))):
        dim = draw(st.integers(0, both[0].dim() - 1)) if both[0].dim() else None
        if dim is None:
            break
        how = draw(st.sampled_from(["chunk", "unbind", "split", "squeeze"]))
        size = {"chunk": (draw(st.integers(1, 3)),), "split": (draw(st.integers(1, 3)),)}.get(how, ())
        cuts = [getattr(each, how)(*size, dim) for each in both]
        if how != "squeeze":
            at = draw(st.integers(0, len(cuts[0]) - 1))
            cuts = [each[at] for each in cuts]
        both = cuts
    return values, *both


@given(joined())
def test_a_followed_tensor_is_made_of_its_origins(case):
    sources, made, followed = case
    assert followed.shape == made.shape
    found = torch.full(made.shape, -1)
    back = [torch.full_like(source, -1) for source in sources]
    for origin in followed.origins:
        there = origin.inverse("made")
        assert there.inverse(origin.name) == origin
        origin.box.of(found).copy_(origin.held.of(sources[int(origin.name)]).reshape(origin.box.sizes))
        there.box.of(back[int(origin.name)]).copy_(there.held.of(made).reshape(there.box.sizes))
    assert torch.equal(found, made)
    kept = torch.cat([each.flatten() for each in back])
    assert sorted(kept[kept >= 0].tolist()) == sorted(made.flatten().tolist())
