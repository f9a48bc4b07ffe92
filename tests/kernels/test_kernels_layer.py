"""The operations of a dense transformer layer: every implementation against float64, and every way to a gradient."""

import pytest
import torch
from helpers import kernels, layer_kernels
from hypothesis import given
from hypothesis import strategies as st

from shardlib.common import thresholds
from shardlib.kernels import norm
from shardlib.kernels.dropout import DropoutDraw, dropout
from shardlib.kernels.gelu import gelu
from shardlib.kernels.rotary import rotary
from shardlib.kernels.softmax import softmax
from shardlib.kernels.swiglu import swiglu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
shapes = st.tuples(
    st.lists(st.integers(0, 5), max_size=2).map(tuple), st.one_of(st.integers(1, 40), st.integers(1, 300))
).map(lambda both: (*both[0], both[1]))


@pytest.mark.parametrize("name", layer_kernels.CASES)
@pytest.mark.parametrize("by", ["reference", *kernels.ON_CPU])
@given(
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(layer_kernels.LAYOUTS),
    seed=st.integers(0, 2**30),
)
def test_drawn(by, name, shape, dtype, layout, seed):
    with kernels.served_by(by) as using:
        layer_kernels.check(name, using, shape, dtype, layout, seed)


@pytest.mark.parametrize("by", kernels.ON_CPU)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_is_normed_as_it_is_returned(by, dtype):
    """Rounded first: where columns nearly agree, what rounding takes off is much of what is left of their mean."""
    x, residual, weight = layer_kernels.inputs(
        layer_kernels.CASES["rms norm of a sum"], (50, 2), dtype, "contiguous", 4
    )
    with kernels.served_by(by) as using:
        y, total = norm.add_rms_norm(x, residual, weight, using=using)
        assert torch.equal(total, x + residual)
        assert torch.equal(y, norm.rms_norm(total, weight, using=using))
        layer_kernels.check("layer norm of a sum", using, (4, 4, 2), dtype, "transposed", seed=4)


@pytest.mark.parametrize("name", layer_kernels.CASES)
def test_float64(name):
    layer_kernels.check(name, None, (3, 4, 33), torch.float64)


@pytest.mark.parametrize("name", layer_kernels.CASES)
def test_threads_change_nothing(name):
    values = layer_kernels.inputs(layer_kernels.CASES[name], (301, 517), torch.float32, "contiguous", 1)
    results = []
    run = lambda *v: layer_kernels.CASES[name].kernel(*v, using="cpu")  # noqa: E731
    for threads in (1, 2, 3):
        with kernels.threads(threads):
            results.append(layer_kernels.outputs_and_gradients(run, values, torch.float32, 1))
    with kernels.threads(70), thresholds.small(1):  # more than a call starts
        results.append(layer_kernels.outputs_and_gradients(run, values, torch.float32, 1))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def scalar(function):
    def loss(*values):
        found = function(*values)
        return sum((y.sin() ** 2).sum() for y in ([found] if isinstance(found, torch.Tensor) else found))

    return loss


@pytest.mark.parametrize("name", layer_kernels.CASES)
def test_every_way_to_a_gradient_is_the_same(name):
    values = layer_kernels.inputs(layer_kernels.CASES[name], (3, 21), torch.float32, "contiguous", 4)
    parts = name == "dropout of parts"  # its rows are counted in the function
    batched = [] if parts else [torch.stack([value, value.flip(-1)]) for value in values]
    found = layer_kernels.check_every_way(scalar(layer_kernels.CASES[name].kernel), values, batched)
    assert not any(torch.equal(mine[0], mine[1]) for mine in found)


@pytest.mark.parametrize("name", layer_kernels.CASES)
def test_opcheck(name):
    """The operator's schema, fake and batching rule agree with its results."""
    case = layer_kernels.CASES[name]
    seen = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "shardlib":
                seen.append((func, args))
            return func(*args, **(kwargs or {}))

    values = layer_kernels.inputs(case, (3, 21), torch.float32, "contiguous", 5)
    with Record():
        layer_kernels.outputs_and_gradients(case.kernel, values, torch.float32, 5)
    assert len(seen) == 2
    for operator, arguments in seen:
        plain = [v.detach() if isinstance(v, torch.Tensor) else v for v in arguments]
        torch.library.opcheck(operator, tuple(plain))


def test_wrong_arguments_reach_no_kernel():
    x, v = torch.zeros(3, 4), torch.zeros(4)
    with pytest.raises(ValueError, match=r"bias has shape \(3,\), and rows of x are 4 wide"):
        gelu(x, torch.zeros(3))
    with pytest.raises(ValueError, match="use 'none' or 'tanh'"):
        gelu(x, approximate="fast")
    with pytest.raises(ValueError, match=r"weight has shape \(3,\)"):
        norm.rms_norm(x, torch.zeros(3))
    with pytest.raises(ValueError, match=r"residual is torch.float64 .* they must agree"):
        norm.add_layer_norm(x, x.double(), v)
    with pytest.raises(ValueError, match="starts has 2 indices for the 3 rows of x"):
        dropout(x, DropoutDraw(0.5, 1, 0, torch.zeros(2, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"gate is torch.float32 \(3, 4\), and up torch.float32 \(4, 3\)"):
        swiglu(x, x.T)
    with pytest.raises(ValueError, match=r"give it as \[batch, heads, queries, keys\]"):
        softmax(x)
    with pytest.raises(ValueError, match="give one int64 for each of 1 sequences"):
        softmax(x[None, None], lengths=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"angles must be \[positions, d / 2\]"):
        rotary(x, torch.zeros(3, 3), torch.zeros(3, 3))
    with pytest.raises(ValueError, match="is a constant here: detach it"):
        rotary(x, torch.zeros(3, 2, requires_grad=True), torch.zeros(3, 2))
    with pytest.raises(TypeError, match="float64 is served by plain torch, not by cpu"):
        gelu(x.double(), using="cpu")
    with pytest.raises(ValueError, match="x on cpu, bias on meta"):
        gelu(x, v.to("meta"))  # torch would hand tensors of meta to the fake version


def test_rows_too_wide_for_a_kernel_use_plain_torch_with_one_warning(monkeypatch, caplog):
    from shardlib.kernels.softmax import cpu, reference

    x = torch.randn(1, 1, 2, 11)
    monkeypatch.setattr(cpu, "WIDEST", 10, raising=False)
    for _ in range(2):
        assert torch.equal(softmax(x), reference.forward(x, None, False, 1.0))
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("softmax: rows of 11, and C++") and "takes 10 at most; plain torch serves" in said
    softmax(x[..., :10], using="cpu")
    with pytest.raises(ValueError, match=r"rows of 11, and C.*takes 10 at most; use 'reference'"):
        softmax(x, using="cpu")
