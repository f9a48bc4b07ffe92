"""1-bit compression: its definition, and every implementation against the reference."""

import math

import pytest
import torch
from helpers import kernels
from hypothesis import given
from hypothesis import strategies as st

from shardlib.kernels import onebit
from shardlib.kernels.onebit import Segments


@st.composite
def drawn_segments(draw):
    padding = draw(st.integers(0, 70))
    if draw(st.booleans()):
        block, elements = 8 * draw(st.integers(1, 40)), draw(st.integers(0, 3000))
        return Segments.blocks(block, elements, elements + padding)
    sizes = draw(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 3000)), max_size=8))
    offsets = [sum(sizes[:position]) for position in range(len(sizes) + 1)]
    return Segments(offsets, offsets[-1] + padding)


def plainly(x, residual, segments):
    """Element by element, in Python's float64 rounded to fp32 where the definition does."""
    c = (x.float() + residual).tolist()
    bits, left = [1] * (8 * segments.bytes), [0.0] * segments.length
    scales = []
    for a, b in zip(segments.offsets.tolist(), segments.offsets.tolist()[1:]):
        root = math.sqrt(math.fsum(v * v for v in c[a:b]) / (b - a)) if b > a else 0.0
        scale = torch.tensor(root, dtype=torch.float32).item()
        scales.append(scale)
        for i in range(a, b):
            bits[i] = int(c[i] >= 0)
            left[i] = c[i] - scale if bits[i] else c[i] + scale
    packed = [sum(bits[8 * byte + position] << position for position in range(8)) for byte in range(segments.bytes)]
    return torch.tensor(packed, dtype=torch.uint8), torch.tensor(scales), torch.tensor(left)


@given(segments=drawn_segments(), seed=st.integers(0, 2**30))
def test_the_reference_is_the_definition(segments, seed):
    x, residual = kernels.values(segments.length, seed), kernels.values(segments.length, seed + 1)
    wanted = plainly(x, residual, segments)
    bits, scales = onebit.compress(x, residual, segments, using="reference")
    assert torch.equal(bits, wanted[0])
    torch.testing.assert_close(scales, wanted[1], rtol=1.2e-7, atol=0)
    torch.testing.assert_close(residual, wanted[2], rtol=1e-6, atol=1e-6 * max([0.0, *scales.tolist()]))


def test_an_example_by_hand():
    x, residual = torch.tensor([3.0, -4.0, -0.0, 0.0, 6.0, -8.0, 9.0]), torch.zeros(7)
    segments = Segments([0, 2, 4, 4, 6], 7)
    bits, scales = onebit.compress(x, residual, segments)
    assert bits.tolist() == [0b11011101]  # 3, −0 and 0, 6, the padding, and the bit beyond the buffer
    torch.testing.assert_close(scales, torch.tensor([12.5**0.5, 0.0, 0.0, 50**0.5]))
    torch.testing.assert_close(
        residual, torch.tensor([3 - 12.5**0.5, 12.5**0.5 - 4, 0, 0, 6 - 50**0.5, 50**0.5 - 8, 0])
    )
    sent = onebit.decompress(bits, scales, segments)
    torch.testing.assert_close(sent, torch.tensor([12.5**0.5, -(12.5**0.5), 0, 0, 50**0.5, -(50**0.5), 0]))


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("segments", kernels.SEGMENTS)
@pytest.mark.parametrize("name", kernels.IMPLEMENTATIONS)
def test_every_implementation_is_the_reference(name, segments, dtype):
    with kernels.served_by(name) as using:
        kernels.check_onebit(using, kernels.SEGMENTS[segments], dtype, seed=3)


@pytest.mark.parametrize("name", kernels.IMPLEMENTATIONS)
@given(segments=drawn_segments(), seed=st.integers(0, 2**30), ranks=st.integers(1, 5))
def test_drawn_segments(name, segments, seed, ranks):
    with kernels.served_by(name) as using:
        kernels.check_onebit(using, segments, torch.float32, seed, ranks)


@pytest.mark.pairwise
@pytest.mark.parametrize("name", kernels.IMPLEMENTATIONS)
@pytest.mark.parametrize("segments", ["tensors", "blocks", "odd blocks", "across spans"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_nonfinite_elements_show_only_in_their_scale(name, segments, bad):
    segments = kernels.SEGMENTS[segments]
    x, residual = kernels.values(segments.length, 1), kernels.values(segments.length, 2)
    clean = residual.clone()
    scales = onebit.compress(x, clean, segments, using="reference")[1]
    position = 4000
    x[position] = residual[position] = bad  # 3e38 + 3e38 overflows
    before, wrong = residual.clone(), int(torch.searchsorted(segments.offsets, position, right=True)) - 1
    with kernels.served_by(name) as using:
        found = onebit.compress(x, residual, segments, using=using)[1]
    assert not found[wrong].isfinite()
    others = torch.arange(segments.count) != wrong
    torch.testing.assert_close(found[others], scales[others], rtol=1.2e-7, atol=0)
    inside = slice(*segments.offsets[wrong : wrong + 2].tolist())
    torch.testing.assert_close(residual[inside], before[inside], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "segments", [Segments([0, 2**21, 2**21 + 5, 3 * 2**20 - 3], 3 * 2**20), Segments.blocks(128, 2**21)]
)
def test_threads_change_nothing(segments):
    x, residual = kernels.values(segments.length, 1), kernels.values(segments.length, 2)

    def run():
        left = residual.clone()
        bits, scales = onebit.compress(x, left, segments, using="cpu")
        return bits, scales, left, onebit.average(bits.expand(2, -1), scales.expand(2, -1), segments, using="cpu")

    kernels.assert_threads_change_nothing(run, 1, 2, 3)


@given(segments=drawn_segments(), ranks=st.integers(1, 5), seed=st.integers(0, 2**30))
def test_an_all_reduce_by_chunks(segments, ranks, seed):
    """Two phases over ranks' parts of the buffer, against plain torch on the whole one."""
    unit = segments.block or 8
    chunk = -(-segments.length // (ranks * unit)) * unit
    if segments.block is None:
        segments = Segments(segments.offsets, ranks * chunk)
    else:
        segments = Segments.blocks(segments.block, segments.elements, ranks * chunk)
    x = [kernels.values(segments.length, seed + r) for r in range(ranks)]
    residuals = [torch.zeros(segments.length) for _ in range(ranks)]
    sent = [onebit.compress(a, e, segments) for a, e in zip(x, residuals)]
    bits, scales = (torch.stack(parts) for parts in zip(*sent))
    mean = torch.stack([onebit.decompress(b, s, segments) for b, s in sent]).double().mean(0)

    out_bits, out_scales, left = [], [], torch.zeros(segments.length)
    for r in range(ranks):
        start, stop = r * chunk, (r + 1) * chunk
        chunk_segments = segments.between(start, stop)
        theirs = scales[:, segments.scales_of(start, stop)]
        got = onebit.average_compress(bits[:, start // 8 : stop // 8], theirs, left[start:stop], chunk_segments)
        assert got[1].shape == (chunk_segments.count,) == theirs.shape[1:]
        for j, (a, b) in enumerate(zip(chunk_segments.offsets.tolist(), chunk_segments.offsets.tolist()[1:])):
            root = mean[start + a : start + b].square().mean().sqrt() if b > a else torch.tensor(0.0)
            torch.testing.assert_close(got[1][j], root.float(), rtol=1e-5, atol=0)
        out_bits.append(got[0])
        out_scales.append(got[1])
    result = onebit.decompress(torch.cat(out_bits), torch.cat(out_scales), segments.split(ranks))
    torch.testing.assert_close(
        result + left, mean.float(), rtol=1e-5, atol=1e-6 * max([0.0, *torch.cat(out_scales).tolist()])
    )


@pytest.mark.parametrize("segments", ["tensors", "blocks"])
def test_sent_values_and_the_residual_add_up_to_the_input(segments):
    segments = kernels.SEGMENTS[segments]
    residual, sent, true = torch.zeros(segments.length), 0.0, 0.0
    for step in range(20):
        x = torch.randn(segments.length, generator=torch.Generator().manual_seed(step))
        x[segments.elements :] = 0
        sent = sent + onebit.decompress(*onebit.compress(x, residual, segments), segments).double()
        true = true + x.double()
    torch.testing.assert_close(sent + residual, true, rtol=0, atol=1e-4)


def test_float64_uses_plain_torch():
    segments = Segments([0, 3, 10])
    x, residual = torch.randn(10, dtype=torch.float64), torch.zeros(10, dtype=torch.float64)
    bits, scales = onebit.compress(x, residual, segments)
    assert scales.dtype == torch.float64
    sent = onebit.decompress(bits, scales, segments)
    torch.testing.assert_close(sent + residual, x, rtol=1e-14, atol=1e-14)


def test_wrong_arguments_reach_no_kernel():
    segments = Segments([0, 16])
    x = torch.zeros(16)
    with pytest.raises(ValueError, match=r"residual has shape \(15,\), not \(16,\)"):
        onebit.compress(x, torch.zeros(15), segments)
    with pytest.raises(TypeError, match=r"x is torch.int64.*cast it"):
        onebit.compress(x.long(), x, segments)
    with pytest.raises(ValueError, match="must be contiguous"):
        onebit.compress(x, torch.zeros(32)[::2], segments)
    with pytest.raises(TypeError, match="keep the residual in float64"):
        onebit.compress(x.double(), x, segments)
    with pytest.raises(TypeError, match="served by plain torch, not by cpu"):
        onebit.compress(x.double(), x.double(), segments, using="cpu")
    with pytest.raises(TypeError, match=r"out is torch.float64, not one of \(torch.float32,\)"):
        onebit.decompress(torch.zeros(2, dtype=torch.uint8), torch.zeros(1), segments, out=x.double())
    with pytest.raises(ValueError, match="x on cpu, residual on meta: move them to one device"):
        onebit.compress(x, x.to("meta"), segments)
    with pytest.raises(ValueError, match="ascend from 0"):
        Segments([0, 5, 3])
    with pytest.raises(ValueError, match="multiple of 8"):
        Segments.blocks(12, 24)
    with pytest.raises(ValueError, match="pad the buffer"):
        Segments([0, 5], 4)
    with pytest.raises(ValueError, match="cuts a block of 16"):
        Segments.blocks(16, 64).between(8, 64)
    with pytest.raises(ValueError, match="cut blocks of 16"):
        Segments.blocks(16, 48).split(2)
