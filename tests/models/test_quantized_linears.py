"""Frozen linear layers in 4 or 8 bits: bitsandbytes' format, and training that is that of the weights they stand for."""

import itertools

import peft
import pytest
import torch
import transformers
from helpers.languages import save_model
from torch import nn

import shardlib as sl
from shardlib.errors import TreeError
from shardlib.models.quantized_linears import NF4, bytes_of, decode, encode

# What bitsandbytes 0.50.2 makes of the same tensor: quantize_4bit(w, blocksize=64, quant_type="nf4").
GIVEN = ((torch.arange(129) * 7919 % 257).float() - 128).view(3, 43) / 64
PACKED = (
    "0da620ec731fd9520ea621ec741fd9520eb631ec841fd9520eb631ec841fda520eb731fc841fda620eb731fd9410ea620ec731fd9520ea621ec841fd9520"
    "eb6307"
)
SCALES = [2.0, 1.984375, 1.625]
SUM, MAGNITUDES = -3.83611798286438, 130.21554505825043


def test_the_values_are_quantiles_of_a_normal_distribution():
    quantile = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), 1).icdf
    positive = quantile(torch.linspace(0.9677083, 0.5, 9, dtype=torch.float64))[:-1]
    negative = -quantile(torch.linspace(0.9677083, 0.5, 8, dtype=torch.float64))[:-1]
    found = torch.cat([positive, negative, torch.zeros(1)]).sort().values
    torch.testing.assert_close(torch.tensor(NF4, dtype=torch.float64), found / found.abs().max(), atol=1e-6, rtol=0)


def test_the_bytes_are_those_of_bitsandbytes():
    made = encode(GIVEN, "nf4")
    assert made[:65].numpy().tobytes().hex() == PACKED and len(made) == bytes_of(129, "nf4") == 77
    assert made[65:].clone().view(torch.float32).tolist() == SCALES
    weight = decode(made, "nf4", (3, 43), torch.float32).double()
    assert weight.sum().item() == pytest.approx(SUM, abs=1e-9)
    assert weight.abs().sum().item() == pytest.approx(MAGNITUDES, abs=1e-9)


def test_scales_in_8_bits_are_those_of_bitsandbytes():
    """quantize_4bit(..., compress_statistics=True) of 0.50.2, of a tensor with two groups of scales."""
    number = torch.arange(20003)
    given = ((number * 7919 % 257).float() - 128) / 64 * (1 + number % 977 / 500)
    made = encode(given, "nf4-double")
    codes, rest = made[10002:].split([313, 12])
    assert len(made) == bytes_of(20003, "nf4-double") and torch.equal(made[:10002], encode(given, "nf4")[:10002])
    assert codes[:20].numpy().tobytes().hex() == "0007141d262d3a4fb2c4d1d9e1ebf8f4080f1b24" and codes.sum() == 39643
    assert rest.clone().view(torch.float32).tolist() == pytest.approx([1.8940, 1.8391, 4.0369], abs=5e-5)
    weight = decode(made, "nf4-double", (20003,), torch.float32).double()
    assert weight.sum().item() == pytest.approx(-220.181091, abs=1e-5)
    assert weight.abs().sum().item() == pytest.approx(39641.002648, abs=1e-3)
    assert decode(encode(torch.zeros(70), "nf4-double"), "nf4-double", (70,), torch.bfloat16).tolist() == [0.0] * 70


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_an_element_is_as_near_as_its_form_allows(form):
    weight = torch.randn(7, 33, generator=torch.Generator().manual_seed(1))
    found = decode(encode(weight, form), form, (7, 33), torch.float32)
    gap = 1 / 127 if form == "int8" else max(b - a for a, b in itertools.pairwise(NF4))
    for block, mine in zip(weight.view(-1).split(64), found.view(-1).split(64)):
        assert (block - mine).abs().max() <= gap / 2 * block.abs().max() + 1e-7
    assert torch.equal(decode(encode(found, form), form, (7, 33), torch.float32), found)
    assert decode(encode(torch.zeros(70), form), form, (70,), torch.bfloat16).tolist() == [0.0] * 70


def test_a_layer_keeps_bytes_for_backward():
    torch.manual_seed(0)
    layer = sl.models.with_quantized_linears(nn.Sequential(nn.Linear(64, 96)))[0]
    weight, x = layer.weight, torch.randn(2, 64, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each.nbytes) or each, lambda each: each):
        y = layer(x)
    assert saved == [layer.packed.nbytes] and saved[0] < weight.nbytes / 7
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    expected = nn.functional.linear(x, weight, layer.bias)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(grad, 2 * expected @ weight)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    save_model(made)
    return made


LORA = {"r": 4, "target_modules": "all-linear"}
TOKENS = torch.arange(32).view(4, 8) * 11 % 384


def plain(folder, steps, form):
    """The losses of a loop of plain PyTorch over the weights that the bytes stand for."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            layer.weight.data = decode(encode(layer.weight, form), form, tuple(layer.weight.shape), torch.float32)
    torch.manual_seed(5)
    model = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    optimizer = torch.optim.AdamW([leaf for leaf in model.parameters() if leaf.requires_grad], 1e-2, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        loss = model(TOKENS, labels=TOKENS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("case", ["two ranks", "compiled", "remat", "one rank"])
def test_adapters_beside_it_train_as_beside_the_weights(case, folder):
    form = "nf4-double" if case == "two ranks" else "nf4"

    def change(model):
        return peft.get_peft_model(sl.models.with_quantized_linears(model, form), peft.LoraConfig(**LORA))

    def run(mesh):
        torch.manual_seed(5)
        plan = sl.chain(sl.zero(3), *([sl.remat()] if case == "remat" else []))
        apply, params, _ = sl.checkpoint.from_pretrained(folder, mesh, plan, frozen=True, change=change)
        size = sum(leaf.nbytes for leaf in params.buffers.values())

        def loss(params, batch):
            return apply(params, batch, labels=batch).loss

        state, step = sl.make_train_step(
            loss, params, sl.optim.adamw(1e-2, weight_decay=0.0), compile=case == "compiled"
        )
        batch, losses = TOKENS.chunk(mesh.size)[mesh.rank], []
        for _ in range(4):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        return losses, size, sorted(dict(sl.stream_weights(state, only="*packed")).items())

    expected = plain(folder, 4, form)
    found = sl.simulate(run, mesh={"data": 2 if case == "two ranks" else 1})
    for losses, _, packed in found:
        assert losses == pytest.approx(expected, abs=2e-5)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        for name, leaf in packed:
            weight = model.get_parameter(name.removeprefix("base_model.model.").replace("base_layer.packed", "weight"))
            assert torch.equal(leaf, encode(weight, form))
    if case == "two ranks":
        assert len({size for _, size, _ in found}) == 1


def shared():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers[1].weight = layers[0].weight
    return layers


@pytest.mark.parametrize(
    ("make", "form", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4)), "fp4", "form='fp4' is unknown"),
        (lambda: nn.Sequential(nn.LayerNorm(4)), "nf4", "Sequential has no linear layers"),
        (shared, "nf4", "0, 1 share their weights with other layers"),
    ],
)
def test_what_is_refused(make, form, message):
    with pytest.raises(TreeError, match=message):
        sl.models.with_quantized_linears(make(), form)


@pytest.mark.parametrize("safe", [False, True])
def test_an_adapter_is_not_merged_into_few_bits(safe):
    """Where it would be lost without a sign."""
    base = sl.models.with_quantized_linears(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    before, x = adapted(torch.ones(1, 16)), torch.ones(1, 16)
    with pytest.raises(TreeError, match=r"a weight in few bits is written to .* with its weights in floats"):
        adapted.merge_and_unload(safe_merge=safe)
    assert torch.equal(adapted(x), before)
    with pytest.raises(TreeError, match="a weight in few bits is written to"):
        peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["1"], init_lora_weights="pissa"))
