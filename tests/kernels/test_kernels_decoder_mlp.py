"""The second half of a decoder's layer against loops over tokens and experts in float64."""

import pytest
import torch
from helpers import kernels, spread
from hypothesis import assume, given
from hypothesis import strategies as st

from shardlib.kernels.decoder_mlp import MLP, ChosenExperts, decoder_mlp
from shardlib.kernels.thin_matmul import Linear, QuantizedMatrix

# Of epsilon, for each rounding. Sums round too where they are no finer than what they return, and so does float64's oracle.
ROUNDINGS = {torch.float32: 8, torch.bfloat16: 2, torch.float16: 2, torch.float64: 16}
GAP = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02, torch.float64: 1e-6}  # of logits
BY = ["reference", *kernels.ON_CPU, "amx"]


def tensors(dtype, seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def dense(width, inner, dtype, seed, biases=True):
    shapes = ((width,), (inner, width), (inner,), (inner, width), (inner,), (width, inner), (width,))
    norm, *weights = tensors(dtype, seed, *shapes)
    pairs = zip(weights[::2], weights[1::2] if biases else [None] * 3)
    return MLP(norm, 1e-5, *[Linear(weight, bias) for weight, bias in pairs])


def with_experts(width, inner, experts, count, renormalises, dtype, seed):
    shapes = ((width,), (experts, 2 * inner, width), (experts, width, inner), (experts, width))
    norm, gate_up, down, router = tensors(dtype, seed, *shapes)
    return MLP(norm, 1e-5, Linear(gate_up), None, Linear(down), ChosenExperts(router, count, renormalises))


def swiglu(x, gate, up, down):
    """Of a vector; each of the three a weight and a bias."""
    return spread.linear(spread.silu(spread.linear(x, *gate)) * spread.linear(x, *up), *down)


def plain(x, layer):
    """One token at a time, in float64, and the least distance between logits of experts that were and were not chosen."""
    rows, gap = [], float("inf")
    for token in map(spread.exact, x):
        normed = spread.normed(token, layer.norm, layer.eps)
        if layer.choice is None:
            three = [(part.weight, part.bias) for part in (layer.gate, layer.up, layer.down)]
            rows.append(token + swiglu(normed, *three))
            continue
        router, count, renormalises = layer.choice
        logits = spread.linear(normed, router, None)
        best = logits.value.sort(descending=True)
        if count < len(router):
            gap = min(gap, float(best.values[count - 1] - best.values[count]))
        taken = best.indices[:count]
        odds = spread.softmax(logits[taken]) if renormalises else spread.softmax(logits)[taken]
        y = token
        for place, expert in enumerate(taken):
            gate, up = layer.gate.weight[expert].chunk(2)
            y = y + odds[place] * swiglu(normed, (gate, None), (up, None), (layer.down.weight[expert], None))
        rows.append(y)
    return (spread.stacked(rows) if rows else spread.exact(x)), gap


def check(by, x, layer):
    wanted, gap = plain(x, layer)
    assume(gap > GAP[x.dtype])
    if by == "reference" or x.dtype == torch.float64:
        found = decoder_mlp(x, layer, using=None if x.dtype == torch.float64 else by)
    else:
        with kernels.served_by(by) as using:
            found = decoder_mlp(x, layer, using=using)
    assert found.dtype == x.dtype
    # The weights of experts are in fp32, whatever the dtype.
    dtype = torch.float32 if layer.choice and x.dtype == torch.float64 else x.dtype
    spread.assert_near(found, wanted, ROUNDINGS[dtype] * torch.finfo(dtype).eps)


SIZES = {"tokens": st.integers(0, 20), "width": st.integers(2, 70), "inner": st.integers(1, 70)}
DRAWN = {"dtype": st.sampled_from(list(ROUNDINGS)), "seed": st.integers(0, 2**30)}


@pytest.mark.parametrize("by", BY)
@given(**SIZES, biases=st.booleans(), **DRAWN)
def test_mlps(by, tokens, width, inner, biases, dtype, seed):
    (x,) = tensors(dtype, seed + 1, (tokens, width))
    check(by, x, dense(width, inner, dtype, seed, biases))


@pytest.mark.parametrize("by", BY)
@given(
    tokens=st.integers(0, 6),
    width=st.integers(2, 40),
    inner=st.integers(1, 20),
    experts=st.integers(1, 20),
    data=st.data(),
    renormalises=st.booleans(),
    **DRAWN,
)
def test_experts(by, tokens, width, inner, experts, data, renormalises, dtype, seed):
    count = data.draw(st.integers(1, min(experts, 3)))
    (x,) = tensors(dtype, seed + 1, (tokens, width))
    check(by, x, with_experts(width, inner, experts, count, renormalises, dtype, seed))


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_among_others(kind, dtype):
    (x,) = tensors(dtype, 1, (32, 50))
    layer = dense(50, 70, dtype, 0) if kind == "dense" else with_experts(50, 40, 5, 2, True, dtype, 0)
    whole = decoder_mlp(x, layer, using="cpu")
    for first, count in ((0, 1), (3, 2), (5, 7), (14, 18)):
        assert torch.equal(decoder_mlp(x[first : first + count], layer, using="cpu"), whole[first : first + count])
    with kernels.threads(3), kernels.thresholds.small(32):
        assert torch.equal(decoder_mlp(x, layer, using="cpu"), whole)
    assert torch.equal(decoder_mlp(x.t().contiguous().t(), layer, using="cpu"), whole)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 4e-6), (torch.bfloat16, 2**-6)])
def test_quantised_weights_are_what_they_stand_for(bits, dtype, tolerance):
    (x,) = tensors(dtype, 1, (3, 48))
    layer = dense(48, 64, dtype, 0)
    matrices = [QuantizedMatrix.of(linear.weight, bits, 16) for linear in (layer.gate, layer.up, layer.down)]
    biases = [linear.bias for linear in (layer.gate, layer.up, layer.down)]
    small = MLP(layer.norm, layer.eps, *map(Linear, matrices, biases))
    whole = MLP(layer.norm, layer.eps, *[Linear(matrix.dense(), bias) for matrix, bias in zip(matrices, biases)])
    found, wanted = decoder_mlp(x, small, using="cpu"), decoder_mlp(x, whole, using="cpu")
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))
    assert not torch.equal(found, decoder_mlp(x, layer, using="cpu"))


@pytest.mark.parametrize("by", [*kernels.INSTRUCTION_SETS, "amx"])
def test_logits_that_are_not_finite_are_no_finite_result(by):
    (x,) = tensors(torch.float32, 1, (3, 50))
    x[1, 4] = torch.nan
    layer = with_experts(50, 40, 5, 2, True, torch.float32, 0)
    with kernels.served_by(by) as using:
        found = decoder_mlp(x, layer, using=using)
        alone = decoder_mlp(x[::2], layer, using=using)
    assert found[1].isnan().all() and torch.equal(found[::2], alone)


def test_weights_in_other_layouts_and_more_tokens_than_few():
    layer = dense(50, 70, torch.float32, 0)
    (x,) = tensors(torch.float32, 1, (40, 50))
    wanted = plain(x, layer)[0].value.float()
    apart = Linear(layer.gate.weight.t().contiguous().t(), layer.gate.bias)
    assert MLP(layer.norm, layer.eps, apart, layer.up, layer.down).lines is None
    # Weights of N(0, 1) make outputs in the hundreds, sums in fp32 of 70 products of as many.
    for given_layer in (layer, MLP(layer.norm, layer.eps, apart, layer.up, layer.down)):
        torch.testing.assert_close(decoder_mlp(x, given_layer), wanted, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(decoder_mlp(x[:2], given_layer), wanted[:2], rtol=1e-4, atol=1e-3)


def test_wrong_arguments():
    layer = dense(4, 6, torch.float32, 0)
    norm, eps, gate, up, down = layer.norm, layer.eps, layer.gate, layer.up, layer.down
    experts = with_experts(4, 6, 3, 2, True, torch.float32, 0)
    for wrong in (
        lambda: MLP(norm, eps, down, up, down),
        lambda: MLP(norm, eps, gate, None, down),
        lambda: MLP(norm.double(), eps, gate, up, down),
        lambda: MLP(norm, eps, Linear(gate.weight, down.bias), up, down),
        lambda: MLP(norm, eps, experts.gate, up, experts.down, experts.choice),
        lambda: MLP(norm, eps, experts.gate, None, experts.down, experts.choice._replace(taken=4)),
    ):
        with pytest.raises(ValueError, match=r"MLP of \(4,\) of torch.float.*: they do not fit each other"):
            wrong()
    for x in (torch.zeros(2, 5), torch.zeros(4), torch.zeros(2, 4).double()):
        with pytest.raises(ValueError, match=r"it must be \[tokens, 4\], torch.float32"):
            decoder_mlp(x, layer)
    with pytest.raises(ValueError, match="no gradients: call it under"):
        decoder_mlp(torch.zeros(2, 4, requires_grad=True), layer)
