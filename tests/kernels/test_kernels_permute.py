"""Rows by assignment and back: every implementation against loops, and every way to a gradient."""

import sys

import pytest
import torch
from helpers import kernels
from helpers.layer_kernels import TOLERANCES, check_every_way, outputs_and_gradients
from hypothesis import given
from hypothesis import strategies as st

from shardlib.kernels.permute import permute, unpermute

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def drawn(tokens, k, columns, dtype, seed, spare=0):
    """x, rows, weights, and positions of which some are no rows; ``spare`` rows have no assignment for certain."""
    generator = torch.Generator().manual_seed(seed)
    count = tokens * k + spare
    order = torch.randperm(count, generator=generator)[: tokens * k].view(tokens, k)
    dropped = torch.rand(tokens, k, generator=generator) < 0.2
    positions = order.where(~dropped, torch.where(order % 2 == 0, -1, count + order))
    x, rows = (torch.randn(n, columns, generator=generator).to(dtype) for n in (tokens, count))
    return x, rows, torch.rand(tokens, k, generator=generator), positions


def plain_permute(x, positions, count):
    rows = [(x * 0).sum(0)] * count
    for token, line in enumerate(positions.tolist()):
        for p in line:
            if 0 <= p < count:
                rows[p] = x[token]
    return torch.stack(rows) if count else x[:0] + (x * 0).sum(0)


def plain_unpermute(rows, positions, weights=None):
    nothing = (rows * 0).sum(0) + (0 if weights is None else (weights * 0).sum())
    sums = []
    for token, line in enumerate(positions.tolist()):
        total = nothing
        for j, p in enumerate(line):
            if 0 <= p < len(rows):
                total = total + rows[p] * (1 if weights is None else weights[token, j])
        sums.append(total)
    return torch.stack(sums) if sums else rows[:0] + nothing


def functions(positions, count, weighted, **using):
    """The three ways to call, with the loop that each is held to; weights are an input if ``weighted``."""
    if weighted:
        return lambda r, w: unpermute(r, positions, w, **using), lambda r, w: plain_unpermute(r, positions, w)
    return (
        lambda x, r: (permute(x, positions, count, **using), unpermute(r, positions, **using)),
        lambda x, r: (plain_permute(x, positions, count), plain_unpermute(r, positions)),
    )


def check(using, tokens, k, columns, dtype, seed=0, spare=0):
    x, rows, weights, positions = drawn(tokens, k, columns, dtype, seed, spare)
    bound = TOLERANCES[dtype]
    for inputs, weighted in (((x, rows), False), ((rows, weights), True), ((rows, weights.to(dtype)), True)):
        kernel, plain = functions(positions, len(rows), weighted, using=using)
        found = outputs_and_gradients(kernel, inputs, dtype, seed)
        wanted = outputs_and_gradients(plain, [value.double() for value in inputs], dtype, seed)
        for mine, exact, like in zip(found, wanted, [*[inputs[0]] * (len(found) - 2), *inputs], strict=True):
            assert mine.dtype == like.dtype and mine.is_contiguous()
            near = bound * max(1, columns**0.5)
            torch.testing.assert_close(mine.double(), exact, rtol=bound, atol=near)
        if weighted:  # what was dropped has no gradient, and a row of no token neither
            inside = (positions >= 0) & (positions < len(rows))
            assert not found[2][~inside].any()
            without = torch.ones(len(rows), dtype=torch.bool).index_fill(0, positions[inside], False)
            assert not found[1][without].any()
        elif dtype == torch.float32:
            assert torch.equal(found[0].double(), wanted[0])


@pytest.mark.parametrize("by", ["reference", *kernels.ON_CPU])
@given(
    tokens=st.integers(0, 12),
    k=st.integers(1, 4),
    columns=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    spare=st.integers(0, 3),
    seed=st.integers(0, 2**30),
)
def test_drawn(by, tokens, k, columns, dtype, spare, seed):
    with kernels.served_by(by) as using:
        check(using, tokens, k, columns, dtype, seed, spare)


@pytest.mark.parametrize("by", ["reference", "cpu"])
def test_rows_are_added_in_order_of_assignments(by):
    rows, positions = torch.tensor([[1e8], [1.0], [-1e8]]), torch.tensor([[0, 1, 2], [0, 2, 1], [1, 0, 2]])
    weights = torch.ones(3, 3)
    for given_weights in (None, weights):
        sums = [
            unpermute(rows, line[None], None if given_weights is None else weights[:1], using=by) for line in positions
        ]
        assert torch.cat(sums).flatten().tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("by", ["reference", "cpu"])
def test_what_was_dropped_spoils_nothing(by):
    """NaN in the weight of a dropped assignment, and in a row without one."""
    rows, positions = torch.tensor([[torch.nan], [2.0]]), torch.tensor([[1, -1]])
    weights = torch.tensor([[0.5, torch.nan]], requires_grad=True)
    y = unpermute(rows.requires_grad_(), positions, weights, using=by)
    y.sum().backward()
    assert y.item() == 1 and weights.grad.tolist() == [[2.0, 0.0]] and rows.grad.tolist() == [[0.0], [0.5]]


def test_threads_change_nothing():
    x, rows, weights, positions = drawn(301, 2, 517, torch.float32, 1)
    for inputs, weighted in (((x, rows), False), ((rows, weights), True)):
        kernel, _ = functions(positions, len(rows), weighted, using="cpu")
        run = lambda kernel=kernel, inputs=inputs: outputs_and_gradients(kernel, inputs, torch.float32, 1)  # noqa: E731
        kernels.assert_threads_change_nothing(run, 1, 3, 70, smallest=1)


@pytest.mark.parametrize("weighted", [False, True])
def test_every_way_to_a_gradient_is_the_same(weighted):
    x, rows, weights, positions = drawn(4, 2, 21, torch.float32, 3)
    inputs = (rows, weights) if weighted else (x, rows)
    kernel, _ = functions(positions, len(rows), weighted)

    def loss(*values):
        found = kernel(*values)
        return sum((y.sin() ** 2).sum() for y in ([found] if isinstance(found, torch.Tensor) else found))

    check_every_way(loss, inputs, [torch.stack([value, 2 * value]) for value in inputs])


def test_opcheck():
    x, rows, weights, positions = drawn(4, 2, 3, torch.float32, 3)
    library = torch.ops.shardlib
    for name, arguments in {
        "permute": (x, positions, len(rows), None),
        "permute_backward": (positions, None, rows),
        "unpermute": (rows, positions, None),
        "unpermute_backward": (positions, len(rows), None, x),
        "unpermute_weighted": (rows, positions, weights, None),
        "unpermute_weighted_backward": (rows, positions, weights, None, x),
    }.items():
        torch.library.opcheck(getattr(library, name).default, arguments)


def test_wrong_arguments():
    x, rows, weights, positions = drawn(4, 2, 3, torch.float32, 3)
    with pytest.raises(ValueError, match=r"x \(3, 3\) and positions \(4, 2\): they must be \[tokens, columns\]"):
        permute(x[:3], positions)
    with pytest.raises(ValueError, match=r"rows \(8, 3, 1\) and positions \(4, 2\): they must be \[rows, columns\]"):
        unpermute(rows[..., None], positions)
    with pytest.raises(ValueError, match=r"weights \(4, 1\) and positions \(4, 2\): both must be \[tokens, k\]"):
        unpermute(rows, positions, weights[:, :1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert sys.argv[1]
    for tokens, k, columns, spare in ((7, 2, 37, 3), (0, 2, 5, 2), (3, 1, 1, 0), (2, 3, 2100, 1)):
        check("triton", tokens, k, columns, torch.float32, spare=spare)
    check("triton", 5, 2, 9, torch.float16)
