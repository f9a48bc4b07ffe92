"""Products by expert against those of all rows with every matrix in float64, and every way to a gradient."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from helpers.kernels import CUT, WITH_AMX, served_by
from helpers.layer_kernels import check_every_way, outputs_and_gradients
from helpers.rounding import rounding
from hypothesis import example, given
from hypothesis import strategies as st

from shardlib.kernels.grouped_matmul import cuda, grouped_matmul, reference

# Without AMX, torch's products serve bf16 too; what serves a GPU runs on a CPU.
NAMES = ("avx512", "amx", CUT, "cuda", "reference")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def drawn(counts, inner, outer, dtype, seed=0, spare=0):
    """x with ``spare`` rows of no expert, weights, and offsets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts) + spare, inner, generator=generator).to(dtype)
    weight = torch.randn(len(counts), outer, inner, generator=generator).to(dtype)
    return x, weight, torch.tensor(counts).cumsum(0)


def masked(offsets):
    """All rows times every matrix, plus its bias if there is one, of which an expert's own rows are kept."""

    def product(x, weight, bias=None):
        experts = torch.searchsorted(offsets, torch.arange(len(x)), right=True)
        biases = weight.new_zeros(weight.shape[:2]) if bias is None else bias
        return sum((x @ w.t() + b) * (experts == expert)[:, None] for expert, (w, b) in enumerate(zip(weight, biases)))

    return product


def computed(name, x, weight, offsets, seed=0, bias=()):
    with served_by(name) if name in (*WITH_AMX, CUT) else nullcontext(name) as using:
        return outputs_and_gradients(
            lambda x, w, *b: grouped_matmul(x, w, offsets, *b, using=using), (x, weight, *bias), x.dtype, seed
        )


def check(name, counts, inner, outer, dtype, seed=0, spare=0, laid_out=lambda x, weight: (x, weight), biased=False):
    """Against float64; ``laid_out`` lays the inputs out in memory."""
    x, weight, offsets = drawn(counts, inner, outer, dtype, seed, spare)
    bias = (torch.randn(len(counts), outer, generator=torch.Generator().manual_seed(seed)).to(dtype),) * biased
    found = computed(name, *laid_out(x, weight), offsets, seed, bias)
    doubles = (x.double(), weight.double(), *(b.double() for b in bias))
    wanted = outputs_and_gradients(masked(offsets), doubles, dtype, seed)
    # The magnitudes that are summed: of products of absolute values, whose cotangents are absolute too.
    generator = torch.Generator().manual_seed(seed + 1)
    dy = torch.randn(wanted[0].shape, generator=generator).to(dtype).double().abs()
    leaves = [value.abs().requires_grad_() for value in doubles]
    size = masked(offsets)(*leaves)
    sizes = [size, *torch.autograd.grad(size, leaves, dy)]
    unit = rounding(dtype)
    bounds = [unit.stored(exact, unit.summed * summed) for exact, summed in zip(wanted, sizes, strict=True)]
    if bias and name == "cuda":  # torch's call of all products takes no bias: what is added to is rounded
        bounds[0] = bounds[0] + unit.stored(masked(offsets)(*doubles[:2]), 0 * sizes[0])
    for mine, exact, bound in zip(found, wanted, bounds, strict=True):
        assert mine.dtype == dtype and mine.shape == exact.shape and mine.is_contiguous()
        assert ((mine.double() - exact).abs() <= bound).all()
    for expert, count in enumerate(counts):
        assert count or not any(gradient[expert].any() for gradient in found[2:])
    assert not found[0][offsets[-1] :].any() and not found[1][offsets[-1] :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("inner", [6, 7])
def test_a_product_does_not_depend_on_the_experts_before_it(inner, dtype):
    """Rows of these sizes begin anywhere in memory, by which products of a few may be rounded."""
    x, weight, offsets = drawn([5], inner, 4, dtype)
    dy = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    forward, backward = reference.forward(x, weight, offsets, None), reference.backward(x, weight, offsets, dy)
    for before in range(1, 9):
        spans, weights = torch.tensor([before, before + 5]), weight.expand(2, -1, -1)
        rows, dys = (torch.cat([each[:1].expand(before, -1), each]) for each in (x, dy))
        dx, dweight = reference.backward(rows, weights, spans, dys)
        assert reference.forward(rows, weights, spans, None)[before:].equal(forward)
        assert dx[before:].equal(backward[0]) and dweight[1].equal(backward[1][0])


def cut(x, weight):
    """Rows that begin anywhere, at unequal distances from the next matrix's."""
    wide = torch.cat([x[:, :1], x, x], -1)[:, 1 : 1 + x.shape[1]]
    return wide, torch.cat([weight[:, :1], weight], 1)[:, 1:]


def turned(x, weight):
    return x, weight.transpose(1, 2).contiguous().transpose(1, 2)


def sparse(x, weight):
    """Every other number."""
    return torch.stack([x, x], -1)[..., 0], torch.stack([weight, weight], -1)[..., 0]


LAYOUTS = (lambda x, weight: (x, weight), cut, turned, sparse)


@pytest.mark.parametrize("name", NAMES)
@given(
    counts=st.lists(st.one_of(st.just(0), st.integers(0, 70)), min_size=1, max_size=5),
    inner=st.integers(1, 70),
    outer=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES[:3]),
    spare=st.sampled_from((0, 0, 3)),
    seed=st.integers(0, 2**30),
    layout=st.sampled_from(LAYOUTS),
    biased=st.booleans(),
)
@example([0, 0, 0], 3, 5, torch.float32, 0, 0, cut, True)  # no row at all
@example([0, 9, 0], 17, 5, torch.bfloat16, 0, 0, turned, False)  # one expert has all
@example([4, 0, 5], 17, 33, torch.bfloat16, 3, 0, sparse, True)
@example([1], 1, 1, torch.bfloat16, 0, 0, cut, False)
@example([2, 0, 3], 16, 24, torch.bfloat16, 2, 0, sparse, True)  # rows of multiples of 16 bytes
@example([32, 33, 16, 17], 32, 48, torch.bfloat16, 1, 0, LAYOUTS[0], True)  # of whole tiles, and one more row
def test_drawn(name, counts, inner, outer, dtype, spare, seed, layout, biased):
    check(name, counts, inner, outer, dtype, seed, spare, layout, biased)


@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    inner=st.integers(1, 20),
    outer=st.integers(1, 20),
    spare=st.sampled_from((0, 3)),
    seed=st.integers(0, 2**30),
    biased=st.booleans(),
)
def test_float64(counts, inner, outer, spare, seed, biased):
    check(None, counts, inner, outer, torch.float64, seed, spare, biased=biased)


@pytest.mark.parametrize("layout", (cut, turned))
@pytest.mark.parametrize(
    ("counts", "inner", "outer"),
    [
        (
            [5, 0, 1060],
            2060,
            260,
        ),  # sums that are cut, for more rows than keep partial ones; several blocks of matrices
        ([2060, 3], 33, 1060),  # the same of gradients
    ],
)
def test_products_of_several_blocks(counts, inner, outer, layout):
    check("amx", counts, inner, outer, torch.bfloat16, laid_out=layout)


def test_threads_change_nothing():
    x, weight, offsets = drawn([300, 0, 5, 40], 70, 200, torch.bfloat16)
    one, three = (computed(name, x, weight, offsets) for name in ("amx", CUT))
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_that_is_no_memory_of_its_own(dtype):
    """That of a sum is one number, expanded."""
    x, weight, offsets = drawn([2, 3], 16, 8, dtype)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    found = torch.autograd.grad(grouped_matmul(*leaves, offsets).sum(), leaves)
    wanted = torch.autograd.grad(grouped_matmul(*leaves, offsets), leaves, torch.ones(5, 8, dtype=dtype))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))


def test_a_gpu_multiplies_all_experts_in_one_call(monkeypatch):
    x, weight, offsets = drawn([3, 0, 2], 16, 8, torch.bfloat16, spare=2)
    assert cuda.grouped(x, weight)
    for one, other in ((x[:, :12], weight[:, :, :12]), (x, weight[:, :7]), (x[:0], weight), (x.half(), weight.half())):
        assert not cuda.grouped(one, other)
    wanted = computed("reference", x, weight, offsets)
    monkeypatch.setattr(torch, "mm", None)
    torch.testing.assert_close(computed("cuda", x, weight, offsets), wanted)
    monkeypatch.delattr(F, "grouped_mm")
    assert not cuda.grouped(x, weight) and "has no F.grouped_mm" in cuda.load(x.device)


def test_numbers_without_end_stay_in_their_rows():
    """What is padded in a tile is 0, whatever lies behind a row or a matrix."""
    x, weight, offsets = (value.abs() for value in drawn([3, 2], 7, 5, torch.bfloat16, spare=1))
    wanted = grouped_matmul(x, weight, offsets)
    x[2], weight[1] = torch.inf, torch.nan
    found = grouped_matmul(x, weight, offsets)
    assert torch.equal(found[:2], wanted[:2]) and found[2].isinf().all() and found[3:5].isnan().all()
    assert not found[5].any()


def test_every_way_to_a_gradient_is_the_same():
    x, weight, offsets = drawn([2, 0, 3], 7, 5, torch.float32)

    def loss(x, weight):
        return grouped_matmul(x, weight, offsets).sin().square().sum()

    check_every_way(loss, (x, weight), (torch.stack([x, 2 * x]), weight), (0, None))


def test_autocast_is_that_of_a_product():
    x, weight, offsets = drawn([2, 3], 8, 4, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = grouped_matmul(x, weight, offsets)
        biased = grouped_matmul(x, weight, offsets, torch.zeros(2, 4))
    assert found.dtype == biased.dtype == torch.bfloat16
    assert torch.equal(found, grouped_matmul(x.bfloat16(), weight.bfloat16(), offsets)) and torch.equal(found, biased)


def test_opcheck():
    x, weight, offsets = drawn([2, 0, 3], 7, 5, torch.float32)
    library = torch.ops.shardlib
    torch.library.opcheck(library.grouped_matmul.default, (x, weight, offsets, None, None))
    dy = torch.randn(5, 5)
    torch.library.opcheck(library.grouped_matmul_backward.default, (x, weight, offsets, None, None, dy))


def test_wrong_arguments():
    x, weight, offsets = drawn([2, 3], 7, 5, torch.float32)
    for wrong in ((x[:, :6], weight, offsets), (x, weight[0], offsets), (x, weight, offsets[:1])):
        with pytest.raises(ValueError, match=r"\[rows, inner\], \[experts, outer, inner\] and \[experts\]"):
            grouped_matmul(*wrong)
    with pytest.raises(ValueError, match=r"x is torch.float32, and weight torch.float64: they must agree"):
        grouped_matmul(x, weight.double(), offsets)
    with pytest.raises(ValueError, match=r"weight torch.float32, bias torch.float64: they must agree"):
        grouped_matmul(x, weight, offsets, torch.zeros(2, 5).double())
    with pytest.raises(ValueError, match=r"bias is \(5,\), and weight \(2, 5, 7\): it must be \[experts, outer\]"):
        grouped_matmul(x, weight, offsets, torch.zeros(5))
    for ends in ([3, 2], [2, 6], [-1, 5]):
        with pytest.raises(ValueError, match=r"must not fall, and lie in 0 to the 5 rows of x"):
            grouped_matmul(x, weight, torch.tensor(ends))
