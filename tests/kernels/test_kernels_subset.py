"""Tokens by their positions and back: every implementation against loops, and every way to a gradient."""

import sys

import pytest
import torch
from helpers import kernels
from helpers.layer_kernels import check_every_way, outputs_and_gradients
from hypothesis import given
from hypothesis import strategies as st

from shardlib.kernels.subset import put, take

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def drawn(batch, length, taken, columns, dtype, seed):
    """x, rows, and positions in any order."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.rand(batch, length, generator=generator).argsort(1)[:, : min(taken, length)].contiguous()
    x = torch.randn(batch, length, columns, generator=generator).to(dtype)
    return x, torch.randn(*index.shape, columns, generator=generator).to(dtype), index


def both(index, using):
    return lambda x, rows: (take(x, index, using=using), put(x, index, rows, using=using))


def plain(x, rows, index):
    taken = [torch.stack([x[b, i] for i in line]) if line else x[b, :0] for b, line in enumerate(index.tolist())]
    merged = []
    for b, line in enumerate(index.tolist()):
        tokens = [rows[b, line.index(i)] if i in line else x[b, i] for i in range(x.shape[1])]
        merged.append(torch.stack(tokens) if tokens else x[b])
    first, second = (torch.stack(taken), torch.stack(merged)) if taken else (x[:, : index.shape[1]], x)
    return first + 0 * rows.sum(), second + 0 * rows.sum()


def check(using, batch, length, taken, columns, dtype, seed=0):
    x, rows, index = drawn(batch, length, taken, columns, dtype, seed)
    found = outputs_and_gradients(both(index, using), (x, rows), dtype, seed)
    wanted = outputs_and_gradients(lambda x, rows: plain(x, rows, index), (x, rows), dtype, seed)
    for mine, exact in zip(found, wanted, strict=True):
        assert mine.dtype == dtype and mine.is_contiguous()
        assert torch.equal(mine, exact)


@pytest.mark.parametrize("by", ["reference", *kernels.ON_CPU])
@given(
    batch=st.integers(0, 4),
    length=st.integers(1, 12),
    taken=st.integers(0, 12),
    columns=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**30),
)
def test_drawn(by, batch, length, taken, columns, dtype, seed):
    with kernels.served_by(by) as using:
        check(using, batch, length, taken, columns, dtype, seed)


def test_each_undoes_the_other():
    x, rows, index = drawn(3, 9, 4, 5, torch.float32, 1)
    assert torch.equal(take(put(x, index, rows), index), rows) and torch.equal(put(x, index, take(x, index)), x)


def test_threads_change_nothing():
    x, rows, index = drawn(3, 301, 100, 517, torch.float32, 1)
    run = lambda: outputs_and_gradients(both(index, "cpu"), (x, rows), torch.float32, 1)  # noqa: E731
    kernels.assert_threads_change_nothing(run, 1, 3, 70, smallest=1)


def test_every_way_to_a_gradient_is_the_same():
    x, rows, index = drawn(2, 7, 3, 21, torch.float32, 3)
    loss = lambda x, rows: take(x, index).sin().sum() + put(x, index, rows).cos().sum()  # noqa: E731
    check_every_way(loss, (x, rows), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 3), (2, 1), (2, 1, 3)), "must be"),
        (((2, 3, 4), (3, 1), (3, 1, 4)), "must be"),
        (((2, 3, 4), (2, 1), (2, 2, 4)), "must be"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    x, index, rows = torch.ones(shapes[0]), torch.zeros(shapes[1], dtype=torch.int64), torch.ones(shapes[2])
    with pytest.raises(ValueError, match=message):
        put(x, index, rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert sys.argv[1]
    for case in ((2, 9, 4, 5), (1, 3, 3, 70), (3, 5, 0, 4), (2, 4, 1, 2500)):
        check("triton", *case, torch.float32)
    check("triton", 2, 5, 2, 9, torch.float16)
