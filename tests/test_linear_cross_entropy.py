"""The cross entropy of an output layer by chunks: every implementation against float64, and every way to a gradient."""

import sys
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from helpers import kernels
from helpers.dense import TOLERANCES
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib import functional
from shardlib.kernels.linear_cross_entropy import linear_cross_entropy, op


def drawn(tokens, words, width, dtype, seed=0, ignored=True):
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, width, generator=generator).to(dtype) for n in (tokens, words))
    targets = torch.randint(0, words, (tokens,), generator=generator)
    if ignored:
        targets[1::3] = -100
    return x, weight, targets


def gradients(function, x, weight):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = function(x, weight)
    return [loss, *torch.autograd.grad(3 * loss, (x, weight))]


def check(using, tokens, words, width, dtype, seed=0, smoothing=0.0, reduction="sum", chunk=50, slack=1):
    """Against float64, of the logits that ``dtype`` holds."""
    x, weight, targets = drawn(tokens, words, width, dtype, seed)
    options = {"label_smoothing": smoothing, "reduction": reduction}
    with patch.dict(op._CHUNK, cpu=chunk):
        found = gradients(lambda x, w: linear_cross_entropy(x, w, targets, using=using, **options), x, weight)

    def plain(x, weight):
        logits = F.linear(x, weight)
        logits = logits + (logits.detach().to(dtype).double() - logits.detach())
        return F.cross_entropy(logits, targets, **options)

    wanted = gradients(plain, x.double(), weight.double())
    for mine, exact, kind in zip(found, wanted, (torch.promote_types(dtype, torch.float32), dtype, dtype)):
        assert mine.dtype == kind
        bound = slack * TOLERANCES[dtype] * max(1.0, exact.abs().max().item())
        torch.testing.assert_close(mine.double(), exact, rtol=0, atol=bound)


@pytest.mark.parametrize("by", ["reference", *kernels.INSTRUCTION_SETS])
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
def test_drawn(by, tokens, words, width, dtype, smoothing, reduction, chunk, seed):
    if by == "reference":
        check(by, tokens, words, width, dtype, seed, smoothing, reduction, chunk)
        return
    with kernels.served_by(by) as using:
        check(using, tokens, words, width, dtype, seed, smoothing, reduction, chunk)


def test_triton():
    kernels.interpret("linear_cross_entropy", __file__)


def loss(x, weight, targets):
    return linear_cross_entropy(x, weight, targets, label_smoothing=0.1).sin()


def test_every_way_to_a_gradient_is_the_same():
    torch._dynamo.reset()
    x, weight, targets = drawn(7, 11, 5, torch.float32)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    wanted = torch.autograd.grad(loss(*leaves, targets), leaves)
    torch.testing.assert_close(torch.func.grad(loss, (0, 1))(x, weight, targets), wanted, rtol=0, atol=0)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves, targets), leaves), wanted)
    found = torch.func.vmap(torch.func.grad(loss, (0, 1)), (0, None, None))(torch.stack([x, 2 * x]), weight, targets)
    torch.testing.assert_close([found[0][0], found[1][0]], list(wanted), rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(loss(x, weight, targets), compiled(x, weight, targets))


def test_second_derivatives():
    x, weight, targets = drawn(4, 5, 3, torch.float64)
    assert torch.autograd.gradcheck(lambda *v: loss(*v, targets), (x.requires_grad_(), weight.requires_grad_()))
    assert torch.autograd.gradgradcheck(lambda *v: loss(*v, targets), (x, weight))


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

    with patch.dict(op._CHUNK, cpu=2000), Sizes():
        # The mode sees what the operator itself does only if that is called here.
        op._forward(x, weight, targets, -100, 0.0, True, None)
    assert max(sizes) == 2000 * 4


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_many_logits_are_not_kept(reduction):
    x, weight, targets = drawn(6, 5, 3, torch.float64)
    wanted = gradients(lambda x, w: sl.linear_cross_entropy(x, w, targets, reduction=reduction).sum(), x, weight)
    with (
        patch.object(functional, "_MANY", 0),
        patch.object(functional, "chunked_cross_entropy", wraps=linear_cross_entropy) as chunked,
    ):
        found = gradients(lambda x, w: sl.linear_cross_entropy(x, w, targets, reduction=reduction).sum(), x, weight)
    assert chunked.called == (reduction != "none")
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_wrong_arguments():
    x, weight, targets = drawn(4, 5, 3, torch.float32, ignored=False)
    with pytest.raises(ValueError, match="use 'mean' or 'sum'"):
        linear_cross_entropy(x, weight, targets, reduction="none")
    with pytest.raises(ValueError, match=r"they must be \[\.\.\., width\], \[V, width\]"):
        linear_cross_entropy(x, weight.T, targets)
    with pytest.raises(IndexError, match="lies outside the 5 words"):
        linear_cross_entropy(x, weight, targets + 3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    check("triton", 5, 37, 4, torch.float32, smoothing=0.1)
    check("triton", 3, 5000, 4, torch.float32, reduction="mean", chunk=10**6)
    # The interpreter's cast to bf16 truncates.
    check("triton", 6, 20, 4, torch.bfloat16, slack=2)
    assert sys.argv[1]
