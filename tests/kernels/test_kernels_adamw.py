"""AdamW in one pass over mixed dtypes: every implementation against the reference, and the reference against torch's."""

import math
import time

import pytest
import torch
from helpers import kernels, step_kernels
from helpers.interpreter import interpret
from helpers.step_kernels import BF16, DTYPES, F16, F32, F64
from hypothesis import given
from hypothesis import strategies as st

from shardlib.kernels import adamw

NUMBERS = {"count": 3.0, "lr": 0.01, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
FACTORS = adamw.factors_at(**NUMBERS)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_reference_is_torchs_fused_step(dtype, scale):
    generator = torch.Generator().manual_seed(17)
    param, grad, mu, nu = (torch.rand(1000, generator=generator).to(dtype) for _ in range(4))
    theirs = [tensor.clone() for tensor in (param, grad * (scale or 1), mu, nu)]
    given = None if scale is None else torch.tensor(scale, dtype=F64)
    adamw.adamw_(param, grad, mu, nu, FACTORS, scale=given, using="reference")
    torch._fused_adamw_(
        *([tensor] for tensor in theirs), [], [torch.tensor(3.0)], lr=0.01, beta1=0.9, beta2=0.999, weight_decay=0.1,
        eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    for ours, wanted in zip((param, mu, nu), (theirs[0], theirs[2], theirs[3])):
        torch.testing.assert_close(ours, wanted, rtol=1e-6 if dtype == F32 else 1e-14, atol=0)


def test_an_example_by_hand():
    param, mu, nu, copy = torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([0.0]), torch.empty(1, dtype=BF16)
    grad = torch.tensor([4.0], dtype=BF16)
    factors = adamw.factors_at(**NUMBERS | {"count": 1.0})
    adamw.adamw_(param, grad, mu, nu, factors, copy=copy, scale=torch.tensor(0.5, dtype=F64))
    # The first step's m̂ and √v̂ are the gradient, 2.
    torch.testing.assert_close(mu, torch.tensor([0.2]))
    torch.testing.assert_close(nu, torch.tensor([0.004]))
    torch.testing.assert_close(param, torch.tensor([1 - 0.001 - 0.01]))
    assert torch.equal(copy, param.bfloat16())


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("name", kernels.IMPLEMENTATIONS)
def test_every_implementation_is_the_reference(name, dtypes, elsewhere):
    with kernels.served_by(name) as using:
        step_kernels.check_adamw(using, 5003, dtypes, seed=3, elsewhere=elsewhere)


@pytest.mark.parametrize("name", kernels.IMPLEMENTATIONS)
@given(
    elements=st.integers(0, 700), dtypes=st.sampled_from(DTYPES), seed=st.integers(0, 2**30),
    offset=st.integers(0, 40), scale=st.sampled_from([None, 1 / 3, 1e-20, 1e20]),
    spoiled=st.booleans(), elsewhere=st.booleans(),
)  # fmt: skip
def test_drawn_buffers(name, elements, dtypes, seed, offset, scale, spoiled, elsewhere):
    with kernels.served_by(name) as using:
        step_kernels.check_adamw(using, elements, dtypes, seed, offset, scale, spoiled, elsewhere)


@pytest.mark.parametrize("name", kernels.IMPLEMENTATIONS)
@given(
    elements=st.integers(0, 700), count=st.sampled_from([None, 1.0, 50.0]), seed=st.integers(0, 2**30),
    offset=st.integers(0, 40), scale=st.sampled_from([None, 1 / 3]),
)  # fmt: skip
def test_directions_of_drawn_buffers(name, elements, count, seed, offset, scale):
    with kernels.served_by(name) as using:
        step_kernels.check_direction(using, elements, count, seed, offset, scale)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_step_follows_the_direction(dtype):
    tensors = [torch.rand(1000, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(4)]
    param, grad, mu, nu = (tensor.clone() for tensor in tensors)
    adamw.adam_direction_(
        param, grad, mu, nu, adamw.direction_at(**{k: number for k, number in NUMBERS.items() if k != "lr"})
    )
    adamw.adamw_(*tensors, FACTORS)
    tolerance = 1e-6 if dtype == F32 else 1e-14
    torch.testing.assert_close(param - 0.01 * grad, tensors[0], rtol=tolerance, atol=tolerance)
    assert torch.equal(mu, tensors[2]) and torch.equal(nu, tensors[3])


def test_triton_is_the_reference():
    interpret("adamw", step_kernels.__file__)


def test_threads_change_nothing():
    grad, *start = (step_kernels.buffer(2**19 + 77, F32, seed, 3) for seed in range(4))
    results = []
    for threads in (1, 3):
        param, mu, nu, copy = (*(tensor.clone() for tensor in start), torch.empty(len(grad), dtype=BF16))
        with kernels.threads(threads):
            adamw.adamw_(param, grad, mu, nu.abs_(), FACTORS, copy=copy, using="cpu")
        results.append((param, mu, nu, copy))
    for one, three in zip(*results):
        torch.testing.assert_close(one, three, rtol=0, atol=0, equal_nan=True)


def test_all_halves_are_rounded_as_torch_rounds_them():
    """Every fp16 number as a gradient, and every kind of fp32 number as a copy."""
    bits = torch.arange(2**16, dtype=torch.int32)
    every = bits.to(torch.int16).view(F16)
    near = torch.cat([(bits << 16 | low).view(F32) for low in (0, 0x0FFF, 0x1000, 0x1001, 0x8000, 0xF000)])
    still = NUMBERS | {"lr": 0.0, "weight_decay": 0.0}
    normal = near.isfinite() & ((near == 0) | (near.abs() >= 2**-126))
    for name in kernels.IMPLEMENTATIONS:
        with kernels.served_by(name) as using:
            mu = torch.zeros(2**16)
            adamw.adamw_(mu.clone(), every, mu, mu.clone(), adamw.factors_at(**still | {"b1": 0.0}), using=using)
            torch.testing.assert_close(mu, every.float(), rtol=0, atol=0, equal_nan=True)
            for dtype in (F16, BF16):
                param, copy = near[normal].clone(), torch.empty(int(normal.sum()), dtype=dtype)
                zero = torch.zeros_like(param)
                adamw.adamw_(param, zero, zero.clone(), zero.clone(), adamw.factors_at(**still), copy=copy, using=using)
                assert torch.equal(copy, near[normal].to(dtype))


def test_denormals_become_zero_and_cost_nothing():
    def run(size: float) -> tuple[float, torch.Tensor]:
        mu = torch.full((2**20,), size)
        param, grad, nu = torch.ones_like(mu), torch.zeros_like(mu), mu.clone()
        seconds = []
        for _ in range(5):
            begin = time.perf_counter()
            adamw.adamw_(param, grad, mu, nu, FACTORS, using="cpu")
            seconds.append(time.perf_counter() - begin)
        return min(seconds), mu

    usual, _ = run(1e-3)
    slow, mu = run(1e-41)
    assert torch.equal(mu, torch.zeros_like(mu))
    assert slow < 4 * usual
    assert (torch.tensor(1e-41) * 0.5).item() > 0  # outside the kernel they are as they were


def test_nonfinite_values_do_not_spread():
    for name in kernels.IMPLEMENTATIONS:
        with kernels.served_by(name) as using:
            param, grad, mu, nu = torch.ones(100), torch.ones(100), torch.zeros(100), torch.zeros(100)
            copy = torch.empty(100, dtype=BF16)
            grad[3], grad[70] = math.nan, math.inf
            adamw.adamw_(param, grad, mu, nu, FACTORS, copy=copy, using=using)
            assert copy.isnan().nonzero().flatten().tolist() == [3, 70]
            assert torch.equal(copy.isnan(), param.isnan())


def test_strided_tensors_and_float64_use_plain_torch():
    tensors = [torch.rand(6, 4, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    strided = [tensor.t().contiguous().t() for tensor in tensors]
    adamw.adamw_(*tensors, FACTORS)
    adamw.adamw_(*strided, FACTORS)
    torch.testing.assert_close(strided, tensors)
    with pytest.raises(TypeError, match="float32 or strided tensors are served by plain torch, not by cpu"):
        adamw.adamw_(*strided, FACTORS, using="cpu")


def test_wrong_arguments_reach_no_kernel():
    param, grad, mu, nu = (torch.zeros(16) for _ in range(4))
    with pytest.raises(ValueError, match=r"grad has shape \(15,\), param \(16,\)"):
        adamw.adamw_(param, torch.zeros(15), mu, nu, FACTORS)
    with pytest.raises(TypeError, match=r"mu is torch.bfloat16 beside param of torch.float32.*cast it"):
        adamw.adamw_(param, grad, mu.bfloat16(), nu, FACTORS)
    with pytest.raises(TypeError, match=r"copy is torch.float32"):
        adamw.adamw_(param, grad, mu, nu, FACTORS, copy=torch.zeros(16))
    with pytest.raises(TypeError, match=r"scale is torch.float32 on cpu: make it float64 on cpu"):
        adamw.adamw_(param, grad, mu, nu, FACTORS, scale=torch.tensor(1.0))
    with pytest.raises(ValueError, match="move them to one device"):
        adamw.adamw_(param, grad.to("meta"), mu, nu, FACTORS)
