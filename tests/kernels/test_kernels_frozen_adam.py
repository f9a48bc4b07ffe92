"""Steps with a frozen variance: their definition by hand, and every implementation against the reference."""

import pytest
import torch
from helpers import kernels, step_kernels
from helpers.interpreter import interpret
from helpers.step_kernels import BF16, F16, F32, F64
from hypothesis import given
from hypothesis import strategies as st

from shardlib.kernels import frozen_adam

LR = torch.tensor(0.5, dtype=F64)


def test_examples_by_hand():
    param, mu, nu = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 7.0]), torch.tensor([4.0, 0.0])
    copy = torch.empty(2, dtype=BF16)
    frozen_adam.frozen_step_(param, mu, nu, lr=LR, eps=1.0, weight_decay=0.25, copy=copy)
    assert mu.tolist() == [3, 0] and nu.tolist() == [4, 0]
    assert param.tolist() == copy.tolist() == [1 - 0.5 * (3 / (2 + 1) + 0.25 * 1), 2 - 0.5 * 0.25 * 2]

    grad, mu = torch.tensor([16.0, 8.0]), torch.tensor([4.0, 5.0])
    frozen_adam.local_momentum_(grad, mu, b1=0.75, scale=torch.tensor(0.5, dtype=F64))
    assert grad.tolist() == [0.75 * 4 + 0.25 * 8, 0.75 * 5 + 0.25 * 4] and mu.tolist() == [4, 5]

    grad, mu, moved = torch.tensor([16.0, 8.0]), torch.tensor([4.0, 5.0]), torch.tensor([0.25, 0.5])
    scale = torch.tensor(0.5, dtype=F64)
    frozen_adam.local_step_(grad, mu, nu, moved, lr=LR, b1=0.5, eps=1.0, scale=scale)
    assert mu.tolist() == [0.5 * 4 + 0.5 * 8, 0] and moved.tolist() == [0.25 - 0.5 * 6 / 3, 0.5]

    mu, before, fresh = torch.tensor([8.0, 5.0]), torch.tensor([2.0, 4.0]), torch.tensor([16.0, 8.0])
    spread = torch.tensor(2.0, dtype=F64)
    frozen_adam.fresh_step_(mu, before, nu, fresh, spread=spread, b1=0.5, b2=0.75, eps=1.0)
    assert mu.tolist() == [4, 0] and torch.equal(before, torch.tensor([4 / 3, 0]))
    # The gradients that lead from 2 to 4, and from 4 to 0.
    assert fresh.tolist() == [0.75 * 16 + 0.25 * 6**2, 0.75 * 8 + 0.25 * 4**2]


@pytest.mark.parametrize("dtype", [F32, F64])
def test_frozen_move_is_what_the_step_adds(dtype):
    tensors = [torch.rand(1000, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(3)]
    tensors[2][::7] = 0
    param, mu, nu = (tensor.clone() for tensor in tensors)
    options = {"lr": LR, "eps": 1e-8, "weight_decay": 0.1}
    frozen_adam.frozen_step_(param, mu, nu, **options)
    by = frozen_adam.frozen_move(*tensors, **options)
    assert torch.equal(tensors[0] + by, param) and torch.equal(tensors[1], mu)


@pytest.mark.parametrize("name", kernels.IMPLEMENTATIONS)
@given(
    elements=st.one_of(st.integers(0, 700), st.just(5003)), narrow=st.sampled_from([None, BF16, F16]),
    seed=st.integers(0, 2**30), offset=st.integers(0, 40), scale=st.sampled_from([None, 1 / 3, 1e-20, 1e20]),
    spoiled=st.booleans(),
)  # fmt: skip
def test_drawn_buffers(name, elements, narrow, seed, offset, scale, spoiled):
    with kernels.served_by(name) as using:
        step_kernels.check_frozen_adam(using, elements, narrow, seed, offset, scale, spoiled)


def test_triton_is_the_reference():
    interpret("frozen_adam", step_kernels.__file__)


def test_wrong_arguments_reach_no_kernel():
    param, mu, nu = (torch.zeros(16) for _ in range(3))
    options = {"lr": LR, "eps": 1e-8, "weight_decay": 0.1}
    with pytest.raises(ValueError, match=r"nu has shape \(15,\), mu \(16,\)"):
        frozen_adam.frozen_step_(param, mu, nu[1:], **options)
    with pytest.raises(TypeError, match=r"copy is torch.float32 beside mu of torch.float32.*cast it"):
        frozen_adam.frozen_step_(param, mu, nu, copy=param, **options)
    with pytest.raises(ValueError, match="move them to one device"):
        frozen_adam.frozen_step_(param.to("meta"), mu, nu, **options)
    with pytest.raises(TypeError, match="or strided tensors are served by plain torch, not by cpu"):
        frozen_adam.frozen_step_(*(torch.zeros(32)[::2] for _ in range(3)), using="cpu", **options)
