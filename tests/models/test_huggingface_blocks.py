"""transformers' decoders as blocks: the whole model's loss and gradients, in stages and slices too."""

from functools import partial

import pytest
import torch
from helpers import training
from helpers.decoders import EXPERTS, SIZES, VOCAB, cut, decoder, in_float64, label_batches, names, whole_loss
from helpers.models import token_batches
from helpers.trees import assert_close
from oracle import one_device
from torch import nn

import shardlib as sl
from shardlib.errors import BatchError, IllegalComposition, TreeError
from shardlib.models import huggingface

ROWS, MAX_NORM = 16, 0.3
OPTIONAL = [(), ("attention_mask",), ("position_ids",), ("attention_mask", "position_ids")]
MODELS = {
    "llama": {},
    "llama, tied": {"tie": True},
    "llama, its own attention": {"attn_implementation": "eager"},
    "mistral": {},
    "qwen2": {},
    "qwen2, tied": {"tie": True},
    "qwen3": {},
    "gpt2": {},
    "gpt2, tied": {"tie": True},
    **{kind: {} for kind in EXPERTS},
}
# transformers' own attention takes its softmax in fp32, where float64's mask is infinite.
BOTH = [
    (name, dtype)
    for name in MODELS
    for dtype in (torch.float32, torch.float64)
    if dtype.itemsize < 8 or "own" not in name
]


def gradients(loss_fn, params, batch):
    """The loss, and the gradient of each tensor by one of its names."""
    leaves = names(params)
    distinct = {id(leaf): name for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.requires_grad_()
    loss = loss_fn(params, batch)
    loss = loss.total / loss.weight if isinstance(loss, sl.Mean) else loss
    found = torch.autograd.grad(loss, [leaves[name] for name in distinct.values()])
    for leaf in leaves.values():
        leaf.requires_grad_(False)
    return loss.detach(), dict(zip(distinct.values(), found))


@pytest.mark.parametrize("optional", OPTIONAL)
@pytest.mark.parametrize(("name", "dtype"), BOTH)
def test_the_whole_models_loss_and_gradients(name, optional, dtype):
    module = decoder(name.partition(",")[0], dtype, **MODELS[name]).train()
    batch = label_batches(1, ROWS, optional)[0]
    loss_fn, params = cut(module)
    assert len(params) == len(loss_fn) == SIZES["num_hidden_layers"] + 2
    assert set(names(params)) == {name for name, _ in module.named_parameters(remove_duplicate=False)}
    wanted, wanted_gradients = gradients(whole_loss(module), params, batch)
    if dtype is torch.float32:
        torch.testing.assert_close(module(**batch, use_cache=False).loss.detach(), wanted, rtol=0, atol=0)
    got, got_gradients = gradients(loss_fn, params, batch)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-10}[dtype]
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=0)
    assert_close(got_gradients, wanted_gradients, tolerance)


def train(mesh, module, transform, optional=()):
    loss_fn, params = cut(module)
    batches = label_batches(3, ROWS, optional)
    wanted = one_device.train(whole_loss(module), params, batches, max_norm=MAX_NORM)
    got = training.simulate(mesh, loss_fn, params, batches, transform, training.optimizer(MAX_NORM))
    assert got[0] == pytest.approx(wanted[0], rel=1e-10, abs=0)
    assert got[1] == pytest.approx(wanted[1], rel=1e-9, abs=0)
    assert_close(got[2], wanted[2], 1e-10)


@pytest.mark.parametrize(
    ("name", "stage", "schedule", "optional"),
    [
        ("llama, tied", 3, "zb-v", ("position_ids",)),
        ("mistral", 1, "1f1b", ("attention_mask",)),
        ("qwen2", 2, "interleaved-zb", ()),
        ("qwen3", 3, "1f1b", ()),
        ("gpt2, tied", 2, "zb-h1", ("attention_mask",)),
        ("gpt2", 3, "gpipe", ()),
    ],
)
def test_stages_slices_and_shards(name, stage, schedule, optional):
    kind, _, rest = name.partition(", ")
    module = huggingface.sliceable(in_float64(decoder(kind, tie=rest == "tied")))
    rules = huggingface.slicing_rules(module, blocks=True)
    transform = sl.chain(sl.zero(stage), sl.pipeline(schedule, 2), sl.tensor_slicing(rules))
    train({"data": 2, "pipe": 2, "model": 2}, module, transform, optional=optional)


def test_micro_batches_of_different_sizes_and_without_stages():
    module = in_float64(decoder("llama"))
    train({"data": 2, "pipe": 2}, module, sl.chain(sl.zero(2), sl.pipeline("1f1b", 3)))
    train({"data": 2}, module, sl.chain(sl.zero(3), sl.accumulate(2), sl.remat()))


def test_the_logits_are_never_gathered():
    module = decoder("llama")
    loss_fn, params = cut(module)
    transform = sl.tensor_slicing(huggingface.slicing_rules(module, blocks=True))
    batch = label_batches(1, ROWS)[0]

    def run(mesh):
        gathered = []
        group = mesh.group("model")
        all_gather = group.all_gather
        group.all_gather = lambda out, tensor: (gathered.append(tensor.numel()), all_gather(out, tensor))[1]
        sl.value_and_grad(loss_fn)(sl.shard(params, mesh, transform), batch)
        return gathered

    tokens = batch["labels"].numel()
    for gathered in sl.simulate(run, mesh={"model": 2}):
        assert gathered and max(gathered) == tokens < tokens * VOCAB // 2


# --- refused ------------------------------------------------------------------------------------------------------


def test_a_plan_without_ranks():
    """Traced on fake tensors: stages pass on the residual stream and nothing else, one rank there and one back."""
    loss_fn, params = cut(decoder("llama"))
    batch = label_batches(1, ROWS)[0]
    plan = sl.make_plan(params, sl.abstract_mesh(pipe=2), sl.pipeline("1f1b", 2), loss_fn=loss_fn, batch=batch)
    assert plan.payload() == {"pipe": batch["labels"].numel() * SIZES["hidden_size"] * 4}


@pytest.mark.parametrize("kind", ["megatron", "ulysses", "ring"])
def test_sequences_stay_whole(kind):
    module = decoder("llama")
    loss_fn, params = cut(module)
    axis = "model" if kind == "megatron" else "seq"
    slices = [sl.tensor_slicing(huggingface.slicing_rules(module, blocks=True))] if kind == "megatron" else []

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.chain(sl.sequence(axis, kind), *slices))
        sl.value_and_grad(loss_fn)(sharded, label_batches(1, ROWS)[0])

    with pytest.raises(IllegalComposition, match="transformers' attention needs whole sequences"):
        sl.simulate(run, mesh={axis: 2})


def test_unknown_models_are_refused():
    for module in (nn.Linear(2, 2), decoder("llama").model):
        for refused in (huggingface.decoder_blocks, partial(huggingface.slicing_rules, blocks=True)):
            with pytest.raises(TreeError, match=r"decoder_blocks cuts .* llama.*got (Linear|LlamaModel)"):
                refused(module)


@pytest.mark.parametrize("batch", [{"input_ids": 0}, {"input_ids": 0, "labels": 0, "token_type_ids": 0}, [0]])
def test_batches_that_hold_something_else(batch):
    loss_fn, params = cut(decoder("gpt2"))
    with pytest.raises(BatchError, match="has input_ids and labels, and may have attention_mask and position_ids;"):
        loss_fn(params, batch)


def test_a_whole_model_in_a_pipeline_is_refused_with_a_remedy():
    apply, params = sl.from_module(decoder("llama"))

    def loss_fn(params, batch):
        return apply(params, **batch).loss

    def run(mesh, params):
        sharded = sl.shard(params, mesh, sl.pipeline("1f1b", 2))
        sl.make_train_step(loss_fn, sharded, training.optimizer())[1](None, token_batches(1)[0])

    with pytest.raises(IllegalComposition, match=r"from_module\(module, blocks=...\)"):
        sl.simulate(run, params, mesh={"pipe": 2})
    with pytest.raises(IllegalComposition, match=r"or sl.from_module\(module, blocks=\)"):
        sl.simulate(run, cut(decoder("llama"))[1], mesh={"pipe": 2})
