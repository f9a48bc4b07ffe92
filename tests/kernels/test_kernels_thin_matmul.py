"""Products of few rows against products in float64 with what the weights stand for."""

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from helpers import kernels
from hypothesis import example, given
from hypothesis import strategies as st

from shardlib.kernels.grouped_matmul import grouped_matmul
from shardlib.kernels.quantize import dequantize
from shardlib.kernels.thin_matmul import QuantizedMatrix, grouped_thin_matmul, thin_matmul

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-9, torch.float64: 1e-12}


def drawn(rows, inputs, outputs, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((rows, inputs), (outputs, inputs), (outputs,))
    return [torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def check(using, rows, inputs, outputs, bits, block, dtype, seed=0):
    x, weight, bias = drawn(rows, inputs, outputs, dtype, seed)
    matrix = QuantizedMatrix.of(weight, bits, block)
    values = dequantize(matrix.values, matrix.scales, matrix.form, weight.numel()).view(weight.shape).double()
    assert torch.equal(matrix.dense(), values.to(dtype))
    largest = weight.double().abs().amax()
    assert ((values - weight.double()).abs() <= largest / (2**bits - 2) * 1.01 + largest * TOLERANCE[dtype]).all()
    for given_bias in (None, bias):
        found = thin_matmul(x, matrix, given_bias, using=using)
        assert found.dtype == dtype and found.shape == (rows, outputs)
        wanted = F.linear(x.double(), values, None if given_bias is None else bias.double())
        scale = F.linear(x.double().abs(), values.abs()) + 1  # of what is summed
        # Torch rounds weights, their product, and its sum with the bias, each by half an ulp.
        if given_bias is not None:
            scale = 1.5 * scale + 0.5 * bias.double().abs()
        assert ((found.double() - wanted).abs() <= TOLERANCE[dtype] * scale).all()


def check_plain(using, rows, inputs, outputs, dtype, seed):
    x, weight, bias = drawn(rows, inputs, outputs, dtype, seed)
    for given_bias in (None, bias):
        found = thin_matmul(x, weight, given_bias, using=using)
        assert found.dtype == dtype and found.shape == (rows, outputs)
        wanted = F.linear(x.double(), weight.double(), None if given_bias is None else bias.double())
        scale = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())  # of what is summed
        assert ((found.double() - wanted).abs() <= TOLERANCE[dtype] * scale).all()


@pytest.mark.parametrize("by", ["reference", *kernels.ON_CPU, "amx"])
@given(
    rows=st.integers(0, 35),
    inputs=st.integers(1, 100) | st.sampled_from([512, 1040]),
    outputs=st.integers(1, 70),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**30),
)
@example(rows=17, inputs=33, outputs=33, dtype=torch.bfloat16, seed=0)
def test_plain_weights(by, rows, inputs, outputs, dtype, seed):
    with kernels.served_by(by, dtype) as using:
        check_plain(using, rows, inputs, outputs, dtype, seed)


@pytest.mark.parametrize("by", [*kernels.INSTRUCTION_SETS, "amx"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_with_a_plain_weight_has_the_same_bits_among_others(by, dtype):
    x, weight, bias = drawn(32, 531, 50, dtype, 0)
    with kernels.served_by(by) as using:
        whole = thin_matmul(x, weight, bias, using=using)
        for first, count in ((0, 1), (3, 2), (5, 7), (16, 16), (14, 18)):
            assert torch.equal(
                thin_matmul(x[first : first + count], weight, bias, using=using), whole[first : first + count]
            )
        with kernels.threads(3):
            assert torch.equal(thin_matmul(x, weight, bias, using=using), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_weights_that_are_not_contiguous(dtype):
    x, weight, bias = drawn(6, 40, 24, dtype, 0)
    wanted = thin_matmul(x, weight, bias, using="cpu")
    apart = torch.stack([x, x], 1)[:, 0]
    assert torch.equal(thin_matmul(apart, weight, bias, using="cpu"), wanted)
    assert torch.equal(thin_matmul(x.view(2, 3, 40), weight, bias, using="cpu").flatten(0, 1), wanted)
    torch.testing.assert_close(thin_matmul(x, weight.t().contiguous().t(), bias, using="cpu"), wanted)


@pytest.mark.parametrize("by", [*kernels.INSTRUCTION_SETS, "amx"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("special", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_in_its_column(by, dtype, special):
    """Also the first number of a row, which lies behind the last one of the row before."""
    x, weight, _ = drawn(5, 19, 19, dtype, 0)
    with kernels.served_by(by) as using:
        whole = thin_matmul(x, weight, using=using)
        weight[9, 0] = special
        found = thin_matmul(x, weight, using=using)
    assert not found[:, 9].isfinite().any()
    others = torch.arange(19) != 9
    assert torch.equal(found[:, others], whole[:, others])


@pytest.mark.parametrize("by", ["reference", *kernels.ON_CPU])
@given(
    rows=st.integers(0, 70),
    inputs=st.integers(1, 12).map(lambda n: 16 * n) | st.sampled_from([1024, 1040, 2048]),
    outputs=st.integers(1, 11),
    bits=st.sampled_from([8, 4]),
    block=st.sampled_from([16, 64, 128, 4096]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**30),
)
@example(rows=65, inputs=2048, outputs=9, bits=4, block=4096, dtype=torch.float32, seed=0)
def test_drawn(by, rows, inputs, outputs, bits, block, dtype, seed):
    with kernels.served_by(by, dtype) as using:
        check(using, rows, inputs, outputs, bits, block, dtype, seed)


@pytest.mark.parametrize("by", ["reference", *kernels.ON_CPU])
@given(
    counts=st.lists(st.integers(0, 5) | st.just(33), min_size=1, max_size=5),
    rest=st.integers(0, 3),
    inputs=st.integers(1, 4).map(lambda n: 16 * n) | st.just(1040),
    outputs=st.integers(1, 35),
    bits=st.sampled_from([8, 4]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**30),
)
@example(counts=[2, 0, 3], rest=1, inputs=48, outputs=17, bits=8, dtype=torch.float32, seed=0)
@example(counts=[0, 33, 1], rest=2, inputs=16, outputs=5, bits=4, dtype=torch.bfloat16, seed=0)
def test_each_expert_multiplies_its_own_rows(by, counts, rest, inputs, outputs, bits, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x, weight = (
        torch.randn(*size, generator=generator).to(dtype)
        for size in ((sum(counts) + rest, inputs), (len(counts), outputs, inputs))
    )
    matrix, ends = QuantizedMatrix.of(weight, bits), torch.tensor(counts).cumsum(0)
    if dtype == torch.float64:
        by = "reference"
    with nullcontext(by) if by == "reference" else kernels.served_by(by) as using:
        found = grouped_thin_matmul(x, matrix, ends, using=using)
    assert found.dtype == dtype and found.shape == (len(x), outputs)
    values, starts = matrix.dense().double(), [0, *ends.tolist()]
    for expert, (first, end) in enumerate(pairwise(starts)):
        rows = x[first:end].double()
        scale = F.linear(rows.abs(), values[expert].abs()) + 1
        assert ((found[first:end].double() - F.linear(rows, values[expert])).abs() <= TOLERANCE[dtype] * scale).all()
    assert not found[ends[-1] :].any()
    assert torch.equal(grouped_matmul(x, matrix, ends), grouped_thin_matmul(x, matrix, ends))


def test_a_row_has_the_same_bits_among_others():
    x, weight, bias = drawn(32, 1040, 13, torch.float32, 0)
    matrix = QuantizedMatrix.of(weight)
    whole = thin_matmul(x, matrix, bias, using="cpu")
    for first, count in ((0, 1), (3, 2), (5, 4), (20, 9)):
        part = thin_matmul(x[first : first + count], matrix, bias, using="cpu")
        assert torch.equal(part, whole[first : first + count])
    with kernels.threads(3):
        assert torch.equal(thin_matmul(x, matrix, bias, using="cpu"), whole)


def test_linear_takes_it_in_place_of_a_weight():
    x, weight, bias = drawn(3, 32, 5, torch.float32, 0)
    matrix = QuantizedMatrix.of(weight, 8)
    x = x.expand(2, 3, 32)
    torch.testing.assert_close(F.linear(x, matrix, bias), F.linear(x, matrix.dense(), bias))
    assert F.linear(x[0, 0], matrix).shape == (5,)
    with pytest.raises(TypeError, match=r"matmul of a QuantizedMatrix: F.linear alone takes it, and product"):
        torch.matmul(x, matrix)


def test_bytes_in_memory():
    weight = torch.randn(256, 512)
    assert [QuantizedMatrix.of(weight, bits).nbytes for bits in (8, 4)] == [
        weight.numel() * bits // 8 + weight.numel() // 128 * 4 for bits in (8, 4)
    ]


def test_wrong_arguments():
    matrix = QuantizedMatrix.of(torch.randn(4, 32))
    with pytest.raises(ValueError, match=r"weight \(4, 24\) is not quantised: take a matrix whose inputs"):
        QuantizedMatrix.of(torch.randn(4, 24))
    with pytest.raises(ValueError, match=r"weight \(32,\) is not quantised"):
        QuantizedMatrix.of(torch.randn(32))
    with pytest.raises(ValueError, match=r"x \(2, 16\) and weight \(4, 32\): they must be"):
        thin_matmul(torch.randn(2, 16), matrix)
    with pytest.raises(ValueError, match=r"x is torch.bfloat16, and weight torch.float32: they must agree"):
        thin_matmul(torch.randn(2, 32).bfloat16(), matrix)
    with pytest.raises(ValueError, match=r"bias \(3,\), torch.float32, and weight \(4, 32\)"):
        thin_matmul(torch.randn(2, 32), matrix, torch.zeros(3))
    experts, ends = QuantizedMatrix.of(torch.randn(2, 4, 32)), torch.tensor([1, 2])
    with pytest.raises(
        ValueError, match=r"x \(2, 16\), torch.float32, weight \(2, 4, 32\), torch.float32, and offsets"
    ):
        grouped_thin_matmul(torch.randn(2, 16), experts, ends)
    with pytest.raises(ValueError, match=r"offsets \(1,\): they must be \[rows, inputs\]"):
        grouped_thin_matmul(torch.randn(2, 32), experts, ends[:1])
    with pytest.raises(ValueError, match=r"offsets are \[1, 3\]: they must not fall, and lie in 0 to the 2 rows"):
        grouped_thin_matmul(torch.randn(2, 32), experts, torch.tensor([1, 3]))
    with pytest.raises(ValueError, match=r"no gradients: call it under torch.no_grad.., or keep the weights plain"):
        grouped_thin_matmul(torch.randn(2, 32, requires_grad=True), experts, ends)
    with pytest.raises(ValueError, match=r"no gradients: call it under torch.no_grad"):
        thin_matmul(torch.randn(2, 32), torch.randn(4, 32, requires_grad=True))
    with pytest.raises(ValueError, match=r"they must be \[..., inputs\] and \[outputs, inputs\]"):
        thin_matmul(torch.randn(2, 32), torch.randn(1, 4, 32))
