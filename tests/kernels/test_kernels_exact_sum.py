"""Exact sums: digits against fractions, in every order and division."""

import math
from fractions import Fraction

import pytest
import torch
from helpers import kernels
from helpers.step_kernels import BF16, F16, F32, buffer
from hypothesis import given
from hypothesis import strategies as st

from shardlib.kernels.exact_sum import digits, digits_of_squares

NAMES = ("reference", *kernels.ON_CPU)


def run(name, x):
    with kernels.served_by(name) as using:
        return digits_of_squares(x, using=using)


def exactly(numbers):
    return float(sum(map(Fraction, numbers), Fraction(0)))


NUMBERS = st.lists(st.floats(allow_nan=False, allow_infinity=False, width=64), max_size=40)


@given(NUMBERS, st.data())
def test_sums_are_rounded_once(numbers, data):
    try:
        wanted = exactly(numbers)
    except OverflowError:
        wanted = math.inf if sum(map(Fraction, numbers)) > 0 else -math.inf
    cut = data.draw(st.integers(0, len(numbers)))
    x = torch.tensor(numbers, dtype=torch.float64)
    shuffled = x[torch.tensor(data.draw(st.permutations(range(len(numbers)))), dtype=torch.int64)]
    for sums in (
        digits.total(x),
        digits.total(shuffled[:cut]) + digits.total(shuffled[cut:]),
        digits.of_each(x).sum(0),
    ):
        assert digits.rounded(sums).item() == wanted


@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 2), st.integers(0, 2**30))
def test_sums_along_a_dimension(rows, columns, dim, seed):
    grid = torch.randn(rows, columns, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = digits.rounded(digits.along(grid, dim))
    wanted = [exactly(row.tolist()) for row in grid.movedim(dim, -1).flatten(0, 1)]
    assert found.flatten().tolist() == wanted and found.shape == grid.sum(dim).shape


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        ([math.inf, 1.0], math.inf),
        ([-math.inf, 1e300], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan], math.nan),
    ],
)
def test_what_is_not_finite_stays(numbers, wanted):
    found = digits.rounded(digits.total(torch.tensor(numbers, dtype=torch.float64))).item()
    assert found == wanted or (math.isnan(found) and math.isnan(wanted))


@pytest.mark.parametrize("name", NAMES)
@given(
    elements=st.integers(0, 700), dtype=st.sampled_from([F32, BF16, F16]), seed=st.integers(0, 2**30),
    offset=st.integers(0, 40), cut=st.integers(0, 700),
)  # fmt: skip
def test_squares_of_drawn_buffers(name, elements, dtype, seed, offset, cut):
    x = buffer(elements, dtype, seed, offset)
    wanted = exactly(Fraction(value) ** 2 for value in x.tolist())
    assert digits.rounded(run(name, x)).item() == wanted
    assert digits.rounded(run(name, x[:cut]) + run(name, x[cut:])).item() == wanted


@pytest.mark.parametrize("name", kernels.ON_CPU)
def test_large_buffers_in_any_number_of_threads(name):
    x = buffer(600_011, F32, 1, 1)
    x[:100_000] = 3e38  # the squares of one exponent fill 64 bits
    one = run(name, x)
    assert torch.equal(digits.rounded(one), digits.rounded(run("reference", x)))
    with kernels.threads(3):
        assert torch.equal(run(name, x), one)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("position", [0, 40, 99])
def test_the_sum_is_nonfinite_only_if_an_element_is(name, position):
    x = torch.tensor([3e38, 1e-45]).repeat(50)
    assert digits.rounded(run(name, x)).item() == exactly(Fraction(value) ** 2 for value in x.tolist())
    for bad in (math.nan, math.inf, -math.inf):
        assert not digits.rounded(run(name, x.index_fill(0, torch.tensor(position), bad))).isfinite()


def test_strided_tensors_and_float64_use_plain_torch():
    x = torch.rand(6, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(digits.rounded(digits_of_squares(x.t())), digits.rounded(digits_of_squares(x)))
    assert torch.equal(digits.rounded(digits_of_squares(x.double())), digits.rounded(digits_of_squares(x)))
    with pytest.raises(TypeError, match="strided tensors are served by plain torch, not by cpu"):
        digits_of_squares(x.t(), using="cpu")
