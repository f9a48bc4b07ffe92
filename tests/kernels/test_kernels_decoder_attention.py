"""The first half of a decoder's layer against loops over sequences and heads in float64."""

import dataclasses

import pytest
import torch
from helpers import kernels, spread
from hypothesis import given
from hypothesis import strategies as st

from shardlib.kernels.decoder_attention import Heads, Seats, decoder_attention
from shardlib.kernels.thin_matmul import Linear, QuantizedMatrix

# Of epsilon, for each rounding. Sums round too where they are no finer than what they return, and so does float64's oracle.
ROUNDINGS = {torch.float32: 8, torch.bfloat16: 2, torch.float16: 2, torch.float64: 16}
BY = ["reference", *kernels.ON_CPU, "amx"]


def tensors(dtype, seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def drawn(tokens, width, half, kv_heads, group, room, dtype, seed, *, biases=True, norms=True, window=None):
    """The arguments; what a row of the cache does not hold yet is NaN."""
    size, narrow = 2 * half, 2 * half * kv_heads
    outputs = (group * narrow, narrow, narrow, width)
    shapes = [(out, into) for out, into in zip(outputs, (width, width, width, outputs[0]))]
    weights = [weight / weight.shape[1] ** 0.5 for weight in tensors(torch.float64, seed, *shapes)]
    added = tensors(dtype, seed + 1, *[(out,) for out in outputs]) if biases else [None] * 4
    norm, q_norm, k_norm, x = tensors(dtype, seed + 2, (width,), (size,), (size,), (tokens, width))
    linears = [Linear(weight.to(dtype), bias) for weight, bias in zip(weights, added)]
    heads = {"q_norm": q_norm, "k_norm": k_norm} if norms else {}
    layer = Heads(norm, 1e-5, *linears, size=size, window=window, **heads)
    generator = torch.Generator().manual_seed(seed + 3)
    rows = torch.randperm(tokens + 2, generator=generator)[:tokens]
    starts = torch.randint(0, room, (tokens,), generator=generator)
    theta = torch.randn(tokens, half, generator=generator, dtype=torch.float64)
    keys, values = tensors(dtype, seed + 4, *[(tokens + 2, kv_heads, room, size)] * 2)
    for row, start in zip(rows, starts):
        keys[row, :, start:], values[row, :, start:] = torch.nan, torch.nan
    return [x, layer, theta.cos().to(dtype), theta.sin().to(dtype), keys, values, Seats(rows, starts)]


def plain(x, layer, cos, sin, keys, values, seats):
    """One sequence and head at a time, and the keys and values that are stored."""
    rows, stored = [], []
    for i, (row, start) in enumerate(zip(seats.rows.tolist(), seats.starts.tolist())):
        token = spread.exact(x[i])
        n = spread.normed(token, layer.norm, layer.eps)
        q, k, v = (
            spread.linear(n, each.weight, each.bias).view(-1, layer.size) for each in (layer.q, layer.k, layer.v)
        )
        q, k = (
            [turned(head if norm is None else spread.normed(head, norm, layer.eps), cos[i], sin[i]) for head in heads]
            for heads, norm in ((q, layer.q_norm), (k, layer.k_norm))
        )
        v = list(v)
        stored.append((k, v))
        seen = slice(max(0, start + 1 - layer.window) if layer.window else 0, start)
        heads = []
        for head, query in enumerate(q):
            g = head // (len(q) // len(k))
            past_keys = spread.joined([spread.exact(keys[row, g, seen]), k[g][None]])
            past_values = spread.joined([spread.exact(values[row, g, seen]), v[g][None]])
            scores = spread.product(past_keys, query)
            odds = spread.softmax(scores * spread.exact(torch.tensor(layer.size**-0.5, dtype=torch.float64)))
            heads.append(spread.product(past_values.mT, odds))
        rows.append(token + spread.linear(spread.joined(heads), layer.o.weight, layer.o.bias))
    return (spread.stacked(rows) if rows else spread.exact(x)), stored


def turned(head, cos, sin):
    """A head by its position: its first half and its second one are pairs."""
    half = len(cos)
    cos, sin, minus = spread.exact(cos), spread.exact(sin), spread.exact(-sin)
    return spread.joined([head[:half] * cos + head[half:] * minus, head[:half] * sin + head[half:] * cos])


def check(using, given_):
    x, *_, keys, values, seats = given_
    wanted, stored = plain(*given_)
    before = keys.clone(), values.clone()
    found = decoder_attention(*given_, using=using)
    assert found.dtype == x.dtype
    roundings = ROUNDINGS[x.dtype] * torch.finfo(x.dtype).eps
    spread.assert_near(found, wanted, roundings)
    for row, start, both in zip(seats.rows.tolist(), seats.starts.tolist(), stored):
        for cache, old, new in zip((keys, values), before, both):
            spread.assert_near(cache[row, :, start], spread.stacked(new), roundings)
            old[row, :, start] = cache[row, :, start]
    for cache, old in zip((keys, values), before):  # and nothing else was written
        torch.testing.assert_close(cache, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("by", BY)
@given(
    tokens=st.integers(0, 6),
    width=st.integers(2, 50),
    half=st.integers(1, 20),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    room=st.integers(1, 30),
    dtype=st.sampled_from(list(ROUNDINGS)),
    seed=st.integers(0, 2**30),
    biases=st.booleans(),
    norms=st.booleans(),
    window=st.none() | st.integers(1, 35),
)
def test_drawn(by, tokens, width, half, kv_heads, group, room, dtype, seed, biases, norms, window):
    given_ = drawn(tokens, width, half, kv_heads, group, room, dtype, seed, biases=biases, norms=norms, window=window)
    with kernels.served_by(by, dtype) as using:
        check(using, given_)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_has_the_same_bits_among_others(dtype):
    x, layer, cos, sin, keys, values, seats = drawn(20, 50, 12, 2, 2, 33, dtype, 0)
    whole = decoder_attention(x, layer, cos, sin, keys, values, seats, using="cpu")
    for first, count in ((0, 1), (5, 7), (2, 18)):
        part = slice(first, first + count)
        own = Seats(seats.rows[part], seats.starts[part])
        assert torch.equal(
            decoder_attention(x[part], layer, cos[part], sin[part], keys, values, own, using="cpu"), whole[part]
        )
    with kernels.threads(3), kernels.thresholds.small(32):
        assert torch.equal(decoder_attention(x, layer, cos, sin, keys, values, seats, using="cpu"), whole)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_weights_are_what_they_stand_for(bits):
    x, layer, *others = drawn(3, 48, 16, 1, 2, 9, torch.float32, 0)
    small, whole = (
        {
            name: Linear(matrix if kept else matrix.dense(), getattr(layer, name).bias)
            for name in "qkvo"
            for matrix in [QuantizedMatrix.of(getattr(layer, name).weight, bits, 16)]
        }
        for kept in (True, False)
    )
    found, wanted = (
        decoder_attention(x, dataclasses.replace(layer, **linears), *others, using="cpu") for linears in (small, whole)
    )
    # Sums of the same numbers in fp32, in another order: four products one after the other, and a softmax.
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.equal(found, decoder_attention(x, layer, *others, using="cpu"))


def test_more_sequences_than_few():
    given_ = drawn(40, 12, 3, 1, 2, 5, torch.float32, 0)
    check(None, given_)


def test_wrong_arguments():
    given_ = drawn(2, 6, 2, 1, 2, 5, torch.float32, 0)
    x, layer, cos, sin, keys, values, seats = given_
    changes = [
        (0, torch.zeros(2, 5)),
        (0, torch.zeros(2, 6).double()),
        (2, torch.zeros(2, 3)),
        (4, torch.zeros(4, 2, 5, 4)),
        (5, torch.zeros(4, 1, 4, 5).mT),
        (6, Seats(seats.rows, torch.tensor([0, 5]))),
        (6, Seats(torch.tensor([0, 4]), seats.starts)),
        (6, Seats(torch.tensor([0, -1]), seats.starts)),
        (6, Seats(seats.rows[:1], seats.starts[:1])),
    ]
    for place, value in changes:
        with pytest.raises(ValueError, match="they do not fit"):
            decoder_attention(*[value if i == place else part for i, part in enumerate(given_)])
    both = torch.zeros(4, 2, 5, 4)
    with pytest.raises(ValueError, match="they do not fit"):  # more heads of keys than the layer has
        decoder_attention(x, layer, cos, sin, both, both, seats)
    with pytest.raises(ValueError, match="no gradients: call it under"):
        decoder_attention(x.requires_grad_(), layer, cos, sin, keys, values, seats)
    for change in ({"size": 3}, {"q": layer.o}, {"q_norm": layer.norm}, {"norm": layer.norm.double()}, {"size": 8}):
        with pytest.raises(ValueError, match=r"Heads of \(6,\) of torch.float.*they do not fit each other"):
            dataclasses.replace(layer, **change)
