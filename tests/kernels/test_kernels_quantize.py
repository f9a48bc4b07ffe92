"""Blockwise quantisation: its definition, and every implementation against the reference."""

import math
from fractions import Fraction

import pytest
import torch
from helpers import kernels
from hypothesis import given
from hypothesis import strategies as st

from shardlib.kernels import quantize
from shardlib.kernels.quantize import Blockwise

forms = st.builds(Blockwise, st.sampled_from((4, 8)), st.sampled_from((16, 32, 128, 1024, 4096)))
sizes = st.one_of(st.integers(0, 40), st.integers(0, 6000))


def single(value):
    """Rounded to fp32."""
    return torch.tensor(value, dtype=torch.float64).float().item()


@given(form=forms, elements=st.integers(0, 700), seed=st.integers(0, 2**30))
def test_the_reference_is_the_definition(form, elements, seed):
    """Element by element, in exact fractions where the definition rounds."""
    x, residual = kernels.values(elements, seed), kernels.values(elements, seed + 1)
    c = (x + residual).tolist()
    values, scales = quantize.quantize(x, form, residual, using="reference")
    for j in range(form.scales(elements)):
        block = range(j * form.block, min((j + 1) * form.block, elements))
        scale = single(max(abs(c[i]) for i in block) / form.largest)
        assert scales[j] == scale
        for i in block:
            # Python's round is to nearest even as well; the quotient is rounded to fp32 first.
            q = round(Fraction(single(c[i] / scale))) if scale else 0
            q = max(-form.largest, min(form.largest, q))
            stored = values[i] if form.bits == 8 else (int(values[i // 2]) >> (i % 2 * 4) & 15 ^ 8) - 8
            assert stored == q
            assert residual[i] == single(c[i] - single(q * scale))
    assert len(values) == form.bytes(elements) and values.dtype == form.dtype


def test_examples_by_hand():
    x = torch.tensor([7.0, -7.0, 0.5, 1.5, 2.5, -0.5, -0.0])  # the scale is 1: halves go to even
    values, scales = quantize.quantize(x, Blockwise(4))
    assert scales.tolist() == [1.0] and values.tolist() == [0x97, 0x20, 0x02, 0x00]
    x = torch.cat([torch.tensor([-254.0, 1.0, 3.0, 5.0]).repeat(4), torch.zeros(16), torch.tensor([1e-45])])
    values, scales = quantize.quantize(x, Blockwise(8, 16))
    assert values[:4].tolist() == [-127, 0, 2, 2] and scales.tolist() == [2.0, 0.0, 0.0]
    assert quantize.dequantize(values, scales, Blockwise(8, 16), 33).tolist() == [-254.0, 0, 4, 4] * 4 + [0.0] * 17


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("elements, block", [(0, 128), (1, 16), (2, 128), (5003, 16), (5003, 128), (9001, 4096)])
@pytest.mark.parametrize("name", kernels.IMPLEMENTATIONS)
def test_every_implementation_is_the_reference(name, elements, block, bits, dtype):
    with kernels.served_by(name) as using:
        kernels.check_quantize(using, elements, Blockwise(bits, block), dtype, seed=3)


@pytest.mark.parametrize("name", kernels.IMPLEMENTATIONS)
@given(form=forms, elements=sizes, seed=st.integers(0, 2**30), ranks=st.integers(1, 5))
def test_drawn_sizes(name, form, elements, seed, ranks):
    with kernels.served_by(name) as using:
        kernels.check_quantize(using, elements, form, torch.float32, seed, ranks)


@pytest.mark.parametrize("name", kernels.IMPLEMENTATIONS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_elements_show_only_in_their_scale(name, bits, bad):
    form, x, residual = Blockwise(bits), kernels.values(1000, 1), kernels.values(1000, 2)
    clean = residual.clone()
    values, scales = quantize.quantize(x, form, clean, using="reference")
    x[650] = bad
    left = residual.clone()
    with kernels.served_by(name) as using:
        found = quantize.quantize(x, form, left, using=using)
    assert not found[1][5].isfinite() and torch.equal(found[1][[0, 1, 2, 3, 4, 6, 7]], scales[[0, 1, 2, 3, 4, 6, 7]])
    inside = slice(640 * bits // 8, 768 * bits // 8)
    assert not found[0][inside].any()
    values[inside] = 0
    clean[640:768] = residual[640:768]
    assert torch.equal(found[0], values) and torch.equal(left, clean)


@pytest.mark.parametrize("bits", [4, 8])
def test_threads_change_nothing(bits):
    form, x = Blockwise(bits), kernels.values(2**20 + 77, 1)

    def run():
        residual = kernels.values(len(x), 2)
        values, scales = quantize.quantize(x, form, residual, using="cpu")
        return values, scales, residual, quantize.dequantize(values, scales, form, len(x), using="cpu")

    kernels.assert_threads_change_nothing(run, 1, 2, 3)


@given(form=forms, elements=sizes, seed=st.integers(0, 2**30))
def test_at_most_half_a_step_is_lost(form, elements, seed):
    x = kernels.values(elements, seed)
    values, scales = quantize.quantize(x, form)
    lost = (quantize.dequantize(values, scales, form, elements) - x).abs()
    half = (scales.repeat_interleave(form.block)[:elements] / 2) * (1 + 1e-5)
    denormal = scales.repeat_interleave(form.block)[:elements] < 1e-38  # where steps are too few to count on
    assert bool(((lost <= half) | denormal).all())


def test_output_buffers_are_filled():
    x, form = kernels.values(1000, 1), Blockwise(4)
    values, scales = quantize.quantize(x, form)
    out = torch.empty_like(values), torch.empty_like(scales)
    assert quantize.quantize(x, form, out=out) is out
    assert torch.equal(out[0], values) and torch.equal(out[1], scales)
    twice = values.repeat(2, 1), scales.repeat(2, 1)
    wanted = quantize.dequantize_sum_quantize(*twice, form, 1000, form)
    assert quantize.dequantize_sum_quantize(*twice, form, 1000, form, out=out) is out
    assert torch.equal(out[0], wanted[0]) and torch.equal(out[1], wanted[1])
    back = torch.empty(1000)
    assert quantize.dequantize(values, scales, form, 1000, out=back) is back
    assert torch.equal(back, quantize.dequantize(values, scales, form, 1000))


def test_wrong_arguments_reach_no_kernel():
    x, form = torch.zeros(16), Blockwise(8, 16)
    with pytest.raises(ValueError, match=r"out_values has shape \(15,\), not \(16,\)"):
        quantize.quantize(x, form, out=(torch.zeros(15, dtype=torch.int8), torch.zeros(1)))
    with pytest.raises(ValueError, match=r"residual has shape \(15,\), not \(16,\)"):
        quantize.quantize(x, form, torch.zeros(15))
    with pytest.raises(ValueError, match="x on cpu, residual on meta"):
        quantize.quantize(x, form, x.to("meta"))
    with pytest.raises(TypeError, match=r"x is torch.float64"):
        quantize.quantize(x.double(), form)
    with pytest.raises(TypeError, match=r"values is torch.uint8, not one of \(torch.int8,\)"):
        quantize.dequantize(torch.zeros(16, dtype=torch.uint8), torch.zeros(1), form, 16)
    with pytest.raises(ValueError, match="bits=3: values have 4 or 8 bits"):
        Blockwise(3)
    for block in (8, 100, 8192):
        with pytest.raises(ValueError, match="power of two from 16 to 4096"):
            Blockwise(8, block)
    values, scales = quantize.quantize(x, form)
    with pytest.raises(ValueError, match="blocks of 16 and of 128"):
        quantize.dequantize_sum_quantize(values[None], scales[None], form, 16, Blockwise(8))
