"""Attention to a cache against one sequence at a time in float64, for rows of a cache in any order."""

import pytest
import torch
from helpers import kernels
from hypothesis import given
from hypothesis import strategies as st

from shardlib.kernels.cached_attention import cached_attention

# For values of size 1: the result's rounding, and in 16 bits that of the odds. Values are drawn from N(0, 1), up to 4.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9, torch.float64: 1e-12}


def drawn(number, group, kv_heads, size, room, dtype, seed):
    """q, k, v, keys, values, rows and starts; what a row does not hold yet is NaN."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(number + 2, generator=generator)[:number]
    starts = torch.randint(0, room, (number,), generator=generator)
    shapes = [
        (number, group * kv_heads, size),
        *[(number, kv_heads, size)] * 2,
        *[(number + 2, kv_heads, room, size)] * 2,
    ]
    q, k, v, keys, values = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    )
    for row, start in zip(rows, starts):
        keys[row, :, start:], values[row, :, start:] = torch.nan, torch.nan
    return q, k, v, keys, values, rows, starts


def plain(q, k, v, keys, values, rows, starts, window):
    """Sequence by sequence and head by head."""
    y = torch.zeros_like(q, dtype=torch.float64)
    for i, (row, start) in enumerate(zip(rows.tolist(), starts.tolist())):
        for head in range(q.shape[1]):
            g = head // (q.shape[1] // k.shape[1])
            seen = slice(max(0, start + 1 - window) if window else 0, start)
            own_keys = torch.cat([keys[row, g, seen], k[i, g][None]])[-window if window else None :].double()
            own_values = torch.cat([values[row, g, seen], v[i, g][None]])[-window if window else None :].double()
            odds = (own_keys @ q[i, head].double() / q.shape[2] ** 0.5).softmax(0)
            y[i, head] = odds @ own_values
    return y


def check(using, number, group, kv_heads, size, room, window, dtype, seed):
    given = drawn(number, group, kv_heads, size, room, dtype, seed)
    wanted = plain(*given, window)
    keys, values = given[3].clone(), given[4].clone()
    found = cached_attention(*given, window=window, using=using)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=4 * TOLERANCE[dtype])
    for row, start, k, v in zip(given[5], given[6], given[1], given[2]):
        keys[row, :, start], values[row, :, start] = k, v
    for stored, expected in ((given[3], keys), (given[4], values)):  # and nothing else was written
        torch.testing.assert_close(stored, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("by", ["reference", *kernels.ON_CPU])
@given(
    number=st.integers(0, 4),
    group=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    size=st.integers(1, 40),
    room=st.integers(1, 40),
    window=st.none() | st.integers(1, 45),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**30),
)
def test_drawn(by, number, group, kv_heads, size, room, window, dtype, seed):
    case = (number, group, kv_heads, size, room, window, dtype, seed)
    with kernels.served_by(by, dtype) as using:
        check(using, *case)


def test_a_sequence_has_the_same_bits_among_others():
    given = drawn(4, 2, 2, 24, 33, torch.float32, 0)
    whole = cached_attention(*given, using="cpu")
    for i in range(4):
        part = [x[i : i + 1] if place in (0, 1, 2, 5, 6) else x for place, x in enumerate(given)]
        assert torch.equal(cached_attention(*part, using="cpu"), whole[i : i + 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(2, 3, 4)}, "they do not fit"),
        ({6: torch.tensor([0, 5])}, "room for 5 tokens each"),
        ({5: torch.tensor([0, 9])}, "the cache has 4 rows"),
        ({1: torch.zeros(2, 2, 4).double()}, "cast them"),
        ({3: torch.zeros(4, 2, 4, 5).mT}, "so they must be contiguous"),
    ],
)
def test_wrong_arguments(change, message):
    given = [*(torch.zeros(2, heads, 4) for heads in (4, 2, 2)), *(torch.zeros(4, 2, 5, 4) for _ in range(2))]
    given += [torch.tensor([0, 1]), torch.tensor([0, 4])]
    for place, value in change.items():
        given[place] = value
    with pytest.raises(ValueError, match=message):
        cached_attention(*given)
    with pytest.raises(ValueError, match="window=0: a token sees itself"):
        cached_attention(
            *[torch.zeros(1, 1, 1)] * 3, *[torch.zeros(1, 1, 1, 1)] * 2, *[torch.tensor([0])] * 2, window=0
        )
