"""Checksums distinguish tensors of the same sum, and depend on nothing but the values."""

import numpy as np
import pytest
import torch

from shardlib.sharded import checksum as module
from shardlib.sharded.checksum import checksum, checksums

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.complex64,
]


def drawn(dtype, count=20_000):
    """More than a row of words, and no whole number of rows."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(1, 100, (count,), generator=generator).to(dtype)


def swapped(x, i, j):
    y = x.clone()
    y[i], y[j] = x[j], x[i]
    return y


def signs_flipped(x, *positions):
    y = x.clone()
    for position in positions:
        y[position] = -y[position]
    return y


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_order_is_seen(dtype):
    x = drawn(dtype)
    values = x.to(torch.complex128)
    for i, j in ((0, 1), (0, len(x) - 1), (3, 4096 + 3), (len(x) - 2, len(x) - 1), (17, 4096 * 2 + 17)):
        j = next(k for k in range(j - 2, j + 3) if 0 <= k < len(x) and values[k] != values[i])
        assert checksum(swapped(x, i, j)) != checksum(x)
    rows = x.view(torch.uint8).view(len(x), -1)
    for moved in (rows.flip(0), rows.roll(4096, 0)):  # also whole rows of words in another order
        assert checksum(moved.reshape(-1).view(dtype)) != checksum(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_signs_flipped_in_pairs_are_seen(dtype):
    x = drawn(dtype)
    seen = {checksum(x)}
    for pair in ((0, 1), (0, 2), (5, 4096 + 5), (1, len(x) - 1), (0, 4096 * 4)):
        seen.add(checksum(signs_flipped(x, *pair)))
    assert len(seen) == 6
    assert checksum(-x) not in seen


def test_a_bit_anywhere_is_seen():
    x = torch.zeros(5000, dtype=torch.uint8)
    seen = {checksum(x)}
    for position in range(0, 5000, 7):
        y = x.clone()
        y[position] = 128
        seen.add(checksum(y))
    assert len(seen) == 1 + len(range(0, 5000, 7))


def test_dtype_and_shape_count():
    x = torch.arange(12, dtype=torch.int32)
    same_bits = [x, x.view(3, 4), x.view(4, 3), x.view(torch.float32), x.view(torch.int64), x.view(torch.uint8)]
    assert len({checksum(y) for y in same_bits}) == len(same_bits)
    assert checksum(torch.zeros(3)) != checksum(torch.zeros(4))  # padding is no value
    assert checksum(torch.zeros(0, 3)) != checksum(torch.zeros(3, 0))


def test_memory_does_not_count():
    x = drawn(torch.bfloat16)
    assert checksum(torch.cat([x[:1], x])[1:]) == checksum(x)  # two bytes into a word
    assert checksum(x.view(100, 200).T.contiguous().T) == checksum(x.view(100, 200))
    lazy = drawn(torch.complex64, 3).mul(1j).conj()
    assert lazy.is_conj() and checksum(lazy) == checksum(lazy.resolve_conj())
    assert checksum(torch.ones(2, requires_grad=True)) == checksum(torch.ones(2))
    assert checksum(torch.ones(4, 128)[:1, 0]) == checksum(torch.ones(1))  # contiguous, with the stride 128


def test_how_many_rows_are_summed_at_a_time_does_not_count(monkeypatch):
    x = drawn(torch.float32, 100_000)
    found = checksum(x)
    for rows in (1, 3, 1000):
        monkeypatch.setattr(module, "_ROWS", {"cpu": rows})
        assert checksum(x) == found


def test_it_is_the_weighted_sum_of_its_description():
    """The oracle uses Python's integers, so that other implementations and platforms must give the same numbers."""
    x = drawn(torch.int32, 9)
    weights = [w % 2**64 for w in module._weights(torch.device("cpu"))[:9].tolist()]
    wanted = sum(int(value) * weight for value, weight in zip(x, weights)) % 2**64
    words = torch.zeros(1, module._WORDS, dtype=torch.int32)
    words[0, :9] = x
    assert module._row_sums(words).item() % 2**64 == wanted
    assert len(set(weights)) == 9 and all(w > 2**40 for w in weights)


def test_leaves_of_a_tree():
    tree = {"x": torch.ones(2), "n": 3, "name": "a", "array": np.arange(3), "other": object(), "none": None}
    found = checksums(tree)
    assert set(found) == {"x", "n", "name", "array"} and found["n"] == "3"
    assert found["array"] == checksum(torch.arange(3))
    assert checksums({"x": torch.ones(2)}, bits=False) == {"x": "float32 [2]"}
