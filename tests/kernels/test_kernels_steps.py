"""Optimizers' steps in one pass: definitions, and every implementation against the reference, which is held to torch's."""

import math
import time

import pytest
import torch
from helpers import kernels, step_kernels
from helpers.step_kernels import BF16, DTYPES, F16, F32, F64
from hypothesis import given
from hypothesis import strategies as st

from shardlib.kernels import adamw, frozen_adam, lion

NUMBERS = {"count": 3.0, "lr": 0.01, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
FACTORS = adamw.factors_at(**NUMBERS)
LION = lion.factors_at(lr=0.5, b1=0.75, b2=0.5, weight_decay=0.25)
LR = torch.tensor(0.5, dtype=F64)


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


def test_threads_change_nothing():
    grad, *start = (step_kernels.buffer(2**19 + 77, F32, seed, 3) for seed in range(4))

    def run():
        param, mu, nu, copy = (*(tensor.clone() for tensor in start), torch.empty(len(grad), dtype=BF16))
        adamw.adamw_(param, grad, mu, nu.abs_(), FACTORS, copy=copy, using="cpu")
        return param, mu, nu, copy

    kernels.assert_threads_change_nothing(run, 1, 3)


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


def test_lion_by_hand():
    param, grad, mu = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([8.0, -8.0, -12.0]), torch.tensor([4.0, 0.0, 2.0])
    copy = torch.empty(3, dtype=BF16)
    lion.lion_(param, grad, mu, LION, copy=copy, scale=torch.tensor(0.5, dtype=F64))
    # β1·m + (1−β1)·g is 4, −1 and 0.
    assert param.tolist() == copy.tolist() == [1 * 0.875 - 0.5, 2 * 0.875 + 0.5, 3 * 0.875]
    assert mu.tolist() == [4, -2, -2]


@pytest.mark.parametrize("name", kernels.IMPLEMENTATIONS)
@given(
    elements=st.one_of(st.integers(0, 700), st.just(5003)), dtypes=st.sampled_from(DTYPES), seed=st.integers(0, 2**30),
    offset=st.integers(0, 40), scale=st.sampled_from([None, 1 / 3, 1e-20, 1e20]),
    spoiled=st.booleans(), elsewhere=st.booleans(),
)  # fmt: skip
def test_lions_drawn_buffers(name, elements, dtypes, seed, offset, scale, spoiled, elsewhere):
    with kernels.served_by(name) as using:
        step_kernels.check_lion(using, elements, dtypes, seed, offset, scale, spoiled, elsewhere)


def test_frozen_steps_by_hand():
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
def test_drawn_buffers_of_frozen_steps(name, elements, narrow, seed, offset, scale, spoiled):
    with kernels.served_by(name) as using:
        step_kernels.check_frozen_adam(using, elements, narrow, seed, offset, scale, spoiled)


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
    with pytest.raises(TypeError, match=r"mu is torch.bfloat16, param torch.float32: cast it"):
        adamw.adamw_(param, grad, mu.bfloat16(), nu, FACTORS)
    with pytest.raises(TypeError, match=r"copy is torch.float32"):
        adamw.adamw_(param, grad, mu, nu, FACTORS, copy=torch.zeros(16))
    with pytest.raises(TypeError, match=r"scale is torch.float32: make it float64"):
        adamw.adamw_(param, grad, mu, nu, FACTORS, scale=torch.tensor(1.0))
    with pytest.raises(ValueError, match="move them to one device"):
        adamw.adamw_(param, grad.to("meta"), mu, nu, FACTORS)
    with pytest.raises(ValueError, match=r"grad has shape \(15,\), param \(16,\)"):
        lion.lion_(param, grad[1:], mu, LION)
    options = {"lr": LR, "eps": 1e-8, "weight_decay": 0.1}
    with pytest.raises(TypeError, match=r"copy is torch.float32, param torch.float32: cast it"):
        frozen_adam.frozen_step_(param, mu, nu, copy=param, **options)
    with pytest.raises(TypeError, match="or strided tensors are served by plain torch, not by cpu"):
        frozen_adam.frozen_step_(*(torch.zeros(32)[::2] for _ in range(3)), using="cpu", **options)
