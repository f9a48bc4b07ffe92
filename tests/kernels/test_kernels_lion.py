"""Lion in one pass over mixed dtypes: by hand, and every implementation against the reference."""

import pytest
import torch
from helpers import kernels, step_kernels
from helpers.interpreter import interpret
from helpers.step_kernels import BF16, DTYPES, F64
from hypothesis import given
from hypothesis import strategies as st

from shardlib.kernels import lion

FACTORS = lion.factors_at(lr=0.5, b1=0.75, b2=0.5, weight_decay=0.25)


def test_an_example_by_hand():
    param, grad, mu = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([8.0, -8.0, -12.0]), torch.tensor([4.0, 0.0, 2.0])
    copy = torch.empty(3, dtype=BF16)
    lion.lion_(param, grad, mu, FACTORS, copy=copy, scale=torch.tensor(0.5, dtype=F64))
    # β1·m + (1−β1)·g is 4, −1 and 0.
    assert param.tolist() == copy.tolist() == [1 * 0.875 - 0.5, 2 * 0.875 + 0.5, 3 * 0.875]
    assert mu.tolist() == [4, -2, -2]


@pytest.mark.parametrize("name", kernels.IMPLEMENTATIONS)
@given(
    elements=st.one_of(st.integers(0, 700), st.just(5003)), dtypes=st.sampled_from(DTYPES), seed=st.integers(0, 2**30),
    offset=st.integers(0, 40), scale=st.sampled_from([None, 1 / 3, 1e-20, 1e20]),
    spoiled=st.booleans(), elsewhere=st.booleans(),
)  # fmt: skip
def test_drawn_buffers(name, elements, dtypes, seed, offset, scale, spoiled, elsewhere):
    with kernels.served_by(name) as using:
        step_kernels.check_lion(using, elements, dtypes, seed, offset, scale, spoiled, elsewhere)


def test_triton_is_the_reference():
    interpret("lion", step_kernels.__file__)


def test_wrong_arguments_reach_no_kernel():
    param, grad, mu = (torch.zeros(16) for _ in range(3))
    with pytest.raises(ValueError, match=r"grad has shape \(15,\), param \(16,\)"):
        lion.lion_(param, grad[1:], mu, FACTORS)
    with pytest.raises(TypeError, match=r"mu is torch.bfloat16 beside param of torch.float32.*cast it"):
        lion.lion_(param, grad, mu.bfloat16(), FACTORS)
    with pytest.raises(TypeError, match=r"scale is torch.float32 on cpu: make it float64 on cpu"):
        lion.lion_(param, grad, mu, FACTORS, scale=torch.tensor(1.0))
