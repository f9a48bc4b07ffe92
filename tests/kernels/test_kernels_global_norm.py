"""Sums of squares: exact ones against fractions, every implementation against the reference."""

import math
from fractions import Fraction

import pytest
import torch
from helpers import kernels
from helpers.step_kernels import BF16, F16, F32, F64, buffer
from hypothesis import given
from hypothesis import strategies as st

from shardlib.kernels.global_norm import sum_of_squares

NAMES = ("reference", *kernels.IMPLEMENTATIONS)


def run(name, x):
    with kernels.served_by(name) as using:
        return sum_of_squares(x, using=using)


@pytest.mark.parametrize("name", NAMES)
@given(
    elements=st.integers(0, 700), dtype=st.sampled_from([F32, BF16, F16]), seed=st.integers(0, 2**30),
    offset=st.integers(0, 40),
)  # fmt: skip
def test_drawn_buffers(name, elements, dtype, seed, offset):
    x = buffer(elements, dtype, seed, offset)
    exact = sum((Fraction(value) ** 2 for value in x.tolist()), Fraction(0))
    found = run(name, x)
    assert found.shape == () and found.dtype == F64
    assert found.item() == pytest.approx(float(exact), rel=1e-14, abs=0)


@pytest.mark.parametrize("name", kernels.IMPLEMENTATIONS)
def test_large_buffers_in_any_number_of_threads(name):
    x = buffer(600_011, F32, 1, 1)
    one = run(name, x)
    torch.testing.assert_close(one, run("reference", x), rtol=1e-13, atol=0)
    with kernels.threads(3):
        assert torch.equal(run(name, x), one)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("position", [0, 40, 99])
def test_the_sum_is_nonfinite_only_if_an_element_is(name, position):
    x = torch.full((100,), 3e38)
    assert run(name, x).item() == pytest.approx(100 * float(x[0]) ** 2)  # too large for fp32
    for bad in (math.nan, math.inf, -math.inf):
        assert not run(name, x.index_fill(0, torch.tensor(position), bad)).isfinite()


def test_strided_tensors_and_float64_use_plain_torch():
    x = torch.rand(6, 4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(sum_of_squares(x.t()), sum_of_squares(x))
    torch.testing.assert_close(sum_of_squares(x.double()), sum_of_squares(x))
    with pytest.raises(TypeError, match="strided tensors are served by plain torch, not by cpu"):
        sum_of_squares(x.t(), using="cpu")
