"""The cross entropy of an output layer by chunks: every implementation against float64, and every way to a gradient."""

import sys
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from helpers import kernels
from helpers.layer_kernels import check_every_way
from helpers.rounding import rounding
from hypothesis import example, given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.common import thresholds
from shardlib.kernels.linear_cross_entropy import Aim, _forward, linear_cross_entropy
from shardlib.nn import functional


def drawn(tokens, words, width, dtype, seed=0, ignored=-100):
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, width, generator=generator).to(dtype) for n in (tokens, words))
    targets = torch.randint(0, words, (tokens,), generator=generator)
    if ignored is not None:
        targets[1::3] = ignored
    return x, weight, targets


def gradients(function, x, weight):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = function(x, weight)
    return [loss, *torch.autograd.grad(3 * loss, (x, weight))]


def bounds(x, weight, targets, dtype, *, ignore_index, label_smoothing, reduction):
    """The largest error of the loss and of both gradients, element by element, of inputs in float64.

    The logits, dz, a chunk's products and their sum are rounded to ``dtype``, then the loss's gradient and the products
    with it. The definition's logits are rounded as well: only those are off that fp32's sums may bring to another number.
    """
    unit = rounding(dtype)
    counts = targets != ignore_index
    doubt = unit.summed * (x.abs() @ weight.abs().T)
    logits, low, high = ((x @ weight.T + d).to(dtype).double() for d in (0, -doubt, doubt))
    doubt, size = high - low, logits.abs()
    onehot = F.one_hot(targets.where(counts, 0), len(weight))
    share = (1 - label_smoothing) * onehot + label_smoothing / len(weight)
    p = logits.softmax(dim=-1)
    terms = 1 + size + size.amax(dim=-1, keepdim=True)  # of the power's exponent
    off = doubt + unit.summed * terms
    p_error = p * (off + (p * off).sum(dim=-1, keepdim=True)) + unit.flushed
    dz = (p - share) * counts[:, None]
    dz_error = unit.stored(dz, p_error + unit.summed * share) * counts[:, None]

    magnitudes = terms + logits.logsumexp(dim=-1, keepdim=True).abs() + share * size
    loss_error = (dz.abs() * doubt + unit.summed * (p * terms + share * magnitudes)).sum(dim=-1) * counts
    mean = 1 / counts.sum().clamp(min=1) if reduction == "mean" else 1

    def scaled(product, error):
        return unit.stored(3 * mean * product, 3 * mean * unit.stored(product, unit.stored(product, error)))

    return (
        mean * loss_error.sum(),
        scaled(dz @ weight, dz_error @ weight.abs() + unit.summed * (dz.abs() @ weight.abs())),
        scaled(dz.T @ x, dz_error.T @ x.abs() + (unit.unit + unit.summed) * (dz.abs().T @ x.abs())),
    )


def check(using, tokens, words, width, dtype, seed=0, smoothing=0.0, reduction="sum", chunk=50, slack=1, ignored=-100):
    """Against float64, of the logits that ``dtype`` holds."""
    x, weight, targets = drawn(tokens, words, width, dtype, seed, ignored)
    options = {"ignore_index": ignored, "label_smoothing": smoothing, "reduction": reduction}
    with thresholds.small(chunk):
        found = gradients(lambda x, w: linear_cross_entropy(x, w, targets, using=using, **options), x, weight)

    def plain(x, weight):
        logits = F.linear(x, weight)
        logits = logits + (logits.detach().to(dtype).double() - logits.detach())
        return F.cross_entropy(logits, targets, **options)

    wanted = gradients(plain, x.double(), weight.double())
    allowed = bounds(x.double(), weight.double(), targets, dtype, **options)
    kinds = (torch.promote_types(dtype, torch.float32), dtype, dtype)
    for part, mine, exact, bound, kind in zip(("loss", "x", "weight"), found, wanted, allowed, kinds):
        assert mine.dtype == kind
        off = (mine.double() - exact).abs()
        assert (off <= slack * bound).all(), f"{part}: off by up to {(off / bound).max():.3g} of the bound"


@pytest.mark.parametrize("by", ["reference", *kernels.ON_CPU])
@given(
    tokens=st.integers(2, 20),
    words=st.integers(1, 70),
    width=st.integers(1, 9),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    smoothing=st.sampled_from((0.0, 0.1)),
    reduction=st.sampled_from(("mean", "sum")),
    chunk=st.sampled_from((1, 100, 10**6)),
    seed=st.integers(0, 2**30),
)
@example(7, 4, 7, torch.bfloat16, 0.1, "mean", 1, 57496006)  # a sum that cancels
def test_drawn(by, tokens, words, width, dtype, smoothing, reduction, chunk, seed):
    with kernels.served_by(by) as using:
        check(using, tokens, words, width, dtype, seed, smoothing, reduction, chunk)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("by", ["reference", *kernels.ON_CPU])
def test_an_ignored_word(by, smoothing, reduction):
    """Padding is often a word of its own."""
    options = {"smoothing": smoothing, "reduction": reduction, "ignored": 0}
    with kernels.served_by(by) as using:
        check(using, 20, 37, 4, torch.float32, **options)


def test_every_way_to_a_gradient_is_the_same():
    x, weight, targets = drawn(7, 11, 5, torch.float32)
    loss = lambda x, weight: linear_cross_entropy(x, weight, targets, label_smoothing=0.1).sin()  # noqa: E731
    check_every_way(loss, (x, weight), (torch.stack([x, 2 * x]), weight), (0, None))
    with torch.no_grad():
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(loss(x, weight), compiled(x, weight))


def test_opcheck():
    x, weight, targets = drawn(4, 5, 3, torch.float32)
    library = torch.ops.shardlib
    for wanted in (True, False):
        torch.library.opcheck(library.linear_cross_entropy.default, (x, weight, targets, -100, 0.1, wanted, None))
    torch.library.opcheck(
        library.linear_cross_entropy_backward.default, (x, weight, targets, -100, 0.1, x, weight, torch.ones(()))
    )


def test_all_logits_never_exist():
    """No storage of more numbers than a chunk and the gradients have."""
    x, weight, targets = drawn(400, 100, 5, torch.float32)
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: sizes.append(t.untyped_storage().nbytes()), found)
            return found

    with thresholds.small(2000), Sizes():
        # The mode sees what the operator itself does only if that is called here.
        _forward(x, weight, Aim(targets, -100, 0.0), True, None)
    assert max(sizes) == 2000 * 4


@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_public_function_is_torchs_for_few_logits_and_many(dtype, reduction, smoothing, ignored):
    x, weight, targets = drawn(6, 5, 3, dtype, ignored=ignored)
    options = {"ignore_index": ignored, "label_smoothing": smoothing, "reduction": reduction}
    wanted = gradients(lambda x, w: F.cross_entropy(F.linear(x, w), targets, **options).sum(), x, weight)
    bound = 1e-12 if dtype == torch.float64 else 1e-6
    for many in (1000, 0):
        with (
            thresholds.small(many),
            patch.object(functional, "chunked_cross_entropy", wraps=linear_cross_entropy) as chunked,
        ):
            found = gradients(lambda x, w: sl.nn.linear_cross_entropy(x, w, targets, **options).sum(), x, weight)
        assert chunked.called == (reduction != "none" and not many)
        torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("many", [1000, 0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_mean_of_no_targets(smoothing, many):
    x, weight, targets = drawn(6, 5, 3, torch.float64)
    targets.fill_(-100)
    options = {"label_smoothing": smoothing}
    wanted = gradients(lambda x, w: F.cross_entropy(F.linear(x, w), targets, **options), x, weight)
    with thresholds.small(many):
        found = gradients(lambda x, w: sl.nn.linear_cross_entropy(x, w, targets, **options), x, weight)
    assert wanted[0].isnan() and not wanted[1].any()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("many", [1000, 0])
def test_autocast_is_that_of_a_product(many):
    x, weight, targets = drawn(6, 5, 3, torch.float32)
    rounded = [value.bfloat16().float() for value in (x, weight)]
    with torch.autocast("cpu", torch.bfloat16), thresholds.small(many):
        found = gradients(lambda x, w: sl.nn.linear_cross_entropy(x, w, targets), x, weight)
    wanted = gradients(lambda x, w: F.cross_entropy(F.linear(x, w).bfloat16().float(), targets), *rounded)
    assert [value.dtype for value in found] == [torch.float32] * 3
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-7)
    assert found[0] != sl.nn.linear_cross_entropy(x, weight, targets)


@pytest.mark.parametrize("using", ["cpu", "reference"])
def test_a_word_that_is_impossible(using):
    x, weight, targets = torch.ones(3, 1), torch.tensor([[1.0], [2.0], [-torch.inf]]), torch.tensor([0, 1, 0])
    wanted = F.cross_entropy(x @ weight.T, targets)
    torch.testing.assert_close(linear_cross_entropy(x, weight, targets, using=using), wanted)


def test_wrong_arguments():
    x, weight, targets = drawn(4, 5, 3, torch.float32, ignored=None)
    with pytest.raises(ValueError, match="use 'mean' or 'sum'"):
        linear_cross_entropy(x, weight, targets, reduction="none")
    with pytest.raises(ValueError, match=r"they must be \[\.\.\., width\] and \[V, width\]"):
        linear_cross_entropy(x, weight.T, targets)
    with pytest.raises(IndexError, match="lies outside the 5 words"):
        linear_cross_entropy(x, weight, targets + 3)
    for function in (linear_cross_entropy, sl.nn.linear_cross_entropy):
        with pytest.raises(ValueError, match=r"label_smoothing=1.5\): give a share of the target, in \[0, 1\]"):
            function(x, weight, targets, label_smoothing=1.5)


if __name__ == "__main__":
    torch.set_num_threads(1)
    check("triton", 5, 37, 4, torch.float32, smoothing=0.1)
    check("triton", 5, 37, 4, torch.float32, smoothing=0.1, ignored=0)
    check("triton", 3, 5000, 4, torch.float32, reduction="mean", chunk=10**6)
    # The interpreter's cast to bf16 truncates.
    check("triton", 6, 20, 4, torch.bfloat16, slack=2)
    assert sys.argv[1]
