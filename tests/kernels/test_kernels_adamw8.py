"""AdamW with moments in 8 bits: the maps after their description, and every implementation against the reference."""

import pytest
import torch
from helpers import kernels, step_kernels
from helpers.step_kernels import BF16, DTYPES, F32, F64
from hypothesis import given
from hypothesis import strategies as st

from shardlib.kernels import adamw, adamw8
from shardlib.kernels.adamw8 import BLOCK, SIGNED, UNSIGNED

NUMBERS = {"count": 3.0, "lr": 0.01, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
FACTORS = adamw.factors_at(**NUMBERS)
ON_CPU = pytest.mark.parametrize("name", kernels.ON_CPU)
MAPS = pytest.mark.parametrize("coding", [SIGNED, UNSIGNED])


def numbers(coding):
    """The numbers of all 256 codes, in the order of the codes."""
    return coding.decode(torch.arange(256, dtype=torch.uint8), torch.ones(1))


def described(bits):
    """The numbers of all codes by the paper: a decimal exponent, and a linear fraction in the remaining bits."""
    found = [0.0]
    for exponent in range(bits - 1, -1, -1):
        fractions = 2 ** (bits - 1 - exponent)
        found += [10.0**-exponent * (0.1 + 0.9 * (k + 1) / fractions) for k in range(fractions)]
    return torch.tensor(found, dtype=F64)


@MAPS
def test_the_map_is_the_papers(coding):
    found, wanted = numbers(coding), described(coding.bits)
    # The numbers are in fp32, after a power of ten and a product: a few roundings of 2⁻²⁴ each.
    torch.testing.assert_close(found[: len(wanted)].double(), wanted, rtol=2e-6, atol=0)
    assert {0.0, 1.0} <= set(found.tolist())
    assert (wanted.diff() > 0).all() and (found[: len(wanted)].diff() > 0).all()
    assert found[found > 0].min() < 1.01 * 10.0 ** (1 - coding.bits)
    if coding is SIGNED:
        assert torch.equal(found[128:], -found[:128]) and -1.0 in found


@MAPS
def test_the_nearest_number_is_taken(coding):
    """Numbers fill whole blocks, whose largest magnitude is 1."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(64, BLOCK, generator=generator).pow(torch.randint(1, 12, (64, 1), generator=generator))
    x[:, 0] = 1.0
    if coding is SIGNED:
        x[:, 1:] *= torch.randint(0, 2, (64, BLOCK - 1), generator=generator) * 2 - 1
    codes, scales = coding.encode(x.view(-1))
    found, all_numbers = coding.decode(codes, scales).view_as(x), numbers(coding)
    nearest = (x[..., None] - all_numbers).abs().amin(-1)
    if coding is UNSIGNED:  # what is above zero stays there
        all_numbers = all_numbers[1:]
        nearest = torch.where(x > 0, (x[..., None] - all_numbers).abs().amin(-1), nearest)
        assert ((found > 0) == (x > 0)).all()
    # Codes are borders in fp32: at a tie either neighbour may be taken, whose distances differ by rounding.
    torch.testing.assert_close((found - x).abs(), nearest, rtol=1e-3, atol=1e-7)
    assert torch.equal(scales, torch.ones(64))


@MAPS
def test_coding_again_changes_nothing(coding):
    x = torch.randn(5003, generator=torch.Generator().manual_seed(4))
    x[512:768] = 0
    x = x if coding is SIGNED else x.square()
    codes, scales = coding.encode(x)
    again, their_scales = coding.encode(coding.decode(codes, scales))
    assert torch.equal(again, codes) and torch.equal(their_scales, scales)


def test_small_numbers_are_kept_as_well_as_large_ones():
    """To half a gap, 0.9 / 64 of the decade above 0.01; as many evenly spaced codes are further off by much."""
    x = torch.logspace(-2, 0, BLOCK)
    assert ((UNSIGNED.decode(*UNSIGNED.encode(x)) - x).abs() / x).max() < 0.9 / 64 / 2 / 0.1
    assert ((x * 255).round().div(255) - x).abs().div(x).max() > 0.15


def test_an_example_by_hand():
    param, grad = torch.tensor([1.0, 1.0]), torch.tensor([4.0, -2.0])
    state = [torch.zeros(2, dtype=torch.uint8), torch.zeros(1), torch.zeros(2, dtype=torch.uint8), torch.zeros(1)]
    copy = torch.empty(2, dtype=BF16)
    factors = adamw.factors_at(**NUMBERS | {"count": 1.0})
    adamw8.adamw8_(param, grad, *state, factors, copy=copy, scale=torch.tensor(0.5, dtype=F64))
    # The first step's m̂ is the gradient, 2 and −1, and √v̂ its magnitude.
    torch.testing.assert_close(param, torch.tensor([1 - 0.001 - 0.01, 1 - 0.001 + 0.01]))
    assert torch.equal(copy, param.bfloat16())
    mu, mu_scale, nu, nu_scale = state
    torch.testing.assert_close((mu_scale, nu_scale), (torch.tensor([0.2]), torch.tensor([0.004])))
    # Half of the largest lies 4/9 of the way up the highest decade: of its 64 codes after 63, the 28th. A quarter: 1/6 of
    # 128 after 127.
    assert mu.tolist() == [127, 128 + 63 + 28] and nu.tolist() == [255, 127 + 21]


@pytest.mark.parametrize("dtypes", DTYPES)
@ON_CPU
def test_every_implementation_is_the_reference(name, dtypes):
    with kernels.served_by(name) as using:
        step_kernels.check_adamw8(using, 5003, dtypes, seed=3)


@ON_CPU
@given(
    elements=st.integers(0, 700), dtypes=st.sampled_from(DTYPES), seed=st.integers(0, 2**30),
    offset=st.integers(0, 40), scale=st.sampled_from([None, 1 / 3, 1e-20]),
    spoiled=st.booleans(),
)  # fmt: skip
def test_drawn_buffers(name, elements, dtypes, seed, offset, scale, spoiled):
    with kernels.served_by(name) as using:
        step_kernels.check_adamw8(using, elements, dtypes, seed, offset, scale, spoiled)


def test_threads_change_nothing():
    grad, start = (step_kernels.buffer(2**18 + 77, F32, seed, 3) for seed in range(2))
    before = [start, *SIGNED.encode(start), *UNSIGNED.encode(start.abs())]

    def run():
        param, *state = (tensor.clone() for tensor in before)
        adamw8.adamw8_(param, grad, *state, FACTORS, using="cpu")
        return param, *state

    kernels.assert_threads_change_nothing(run, 1, 3)


def test_a_small_variance_beside_a_large_one_is_not_lost():
    """If it became zero, the next step without a gradient would divide the momentum by eps."""
    state = [*SIGNED.encode(torch.tensor([1.0, 1e-5])), *UNSIGNED.encode(torch.tensor([1.0, 1e-10]))]
    param = torch.zeros(2)
    adamw8.adamw8_(param, torch.zeros(2), *state, FACTORS)
    assert param.abs().max() < 0.1


def test_wrong_arguments_reach_no_kernel():
    param, grad = torch.zeros(300), torch.zeros(300)
    mu, scales = torch.zeros(300, dtype=torch.uint8), torch.zeros(2)
    with pytest.raises(ValueError, match=r"mu_scales has shape \(1,\), not \(2,\)"):
        adamw8.adamw8_(param, grad, mu, scales[:1], mu, scales, FACTORS)
    with pytest.raises(TypeError, match=r"nu is torch.float32, not one of \(torch.uint8,\): cast it"):
        adamw8.adamw8_(param, grad, mu, scales, param, scales, FACTORS)
    with pytest.raises(TypeError, match="float64 or strided tensors are served by plain torch, not by cpu"):
        adamw8.adamw8_(param.double(), grad.double(), mu, scales, mu, scales, FACTORS, using="cpu")
