"""Products with quantised matrices against products in float64 with what the values stand for."""

import pytest
import torch
import torch.nn.functional as F
from helpers import kernels
from hypothesis import example, given
from hypothesis import strategies as st

from shardlib.kernels.quantize import dequantize
from shardlib.kernels.quantized_matmul import QuantizedMatrix, quantized_matmul

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
        found = quantized_matmul(x, matrix, given_bias, using=using)
        assert found.dtype == dtype and found.shape == (rows, outputs)
        wanted = F.linear(x.double(), values, None if given_bias is None else bias.double())
        scale = F.linear(x.double().abs(), values.abs()) + 1  # of what is summed
        assert ((found.double() - wanted).abs() <= TOLERANCE[dtype] * scale).all()


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
    if by == "reference" or dtype == torch.float64:
        check(None if dtype == torch.float64 else by, rows, inputs, outputs, bits, block, dtype, seed)
        return
    with kernels.served_by(by) as using:
        check(using, rows, inputs, outputs, bits, block, dtype, seed)


def test_a_row_has_the_same_bits_among_others():
    x, weight, bias = drawn(70, 1040, 13, torch.float32, 0)
    matrix = QuantizedMatrix.of(weight)
    whole = quantized_matmul(x, matrix, bias, using="cpu")
    for first, count in ((0, 1), (3, 2), (5, 4), (60, 9)):
        part = quantized_matmul(x[first : first + count], matrix, bias, using="cpu")
        assert torch.equal(part, whole[first : first + count])
    with kernels.threads(3):
        assert torch.equal(quantized_matmul(x, matrix, bias, using="cpu"), whole)


def test_linear_takes_it_in_place_of_a_weight():
    x, weight, bias = drawn(3, 32, 5, torch.float32, 0)
    matrix = QuantizedMatrix.of(weight, 8)
    x = x.expand(2, 3, 32)
    torch.testing.assert_close(F.linear(x, matrix, bias), F.linear(x, matrix.dense(), bias))
    assert F.linear(x[0, 0], matrix).shape == (5,)
    with pytest.raises(TypeError, match=r"matmul of a QuantizedMatrix: F.linear alone takes it"):
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
        quantized_matmul(torch.randn(2, 16), matrix)
    with pytest.raises(ValueError, match=r"x is torch.bfloat16, and weight torch.float32: they must agree"):
        quantized_matmul(torch.randn(2, 32).bfloat16(), matrix)
    with pytest.raises(ValueError, match=r"bias \(3,\) and weight \(4, 32\)"):
        quantized_matmul(torch.randn(2, 32), matrix, torch.zeros(3))
