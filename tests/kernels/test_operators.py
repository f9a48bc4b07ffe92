"""Every way to ask for a gradient of an operation made by `shardlib.kernels.common.differentiable`."""

import inspect
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from shardlib.kernels.common import differentiable, opaque
from shardlib.kernels.common.records import layout_of

calls: list[str] = []


def scaled_square(x: torch.Tensor, weight: torch.Tensor | None, index: torch.Tensor, power: int) -> list[torch.Tensor]:
    """y = w[index] · x^power per row; and x^(power − 1), for the backward alone."""
    calls.append("forward")
    factor = torch.ones(len(x)) if weight is None else weight[index]
    lower = x ** (power - 1)
    return [(factor[:, None] * lower * x).contiguous(), lower.contiguous()]


def backward(
    x: torch.Tensor, weight: torch.Tensor | None, index: torch.Tensor, power: int, lower: torch.Tensor, dy: torch.Tensor
) -> list[torch.Tensor]:
    assert dy.is_contiguous()
    calls.append("backward")
    return reference(x, weight, index, power, lower, dy)


def reference(x, weight, index, power, lower, dy):
    calls.append("reference")
    if weight is None:
        return [dy * power * x ** (power - 1)]
    dw = torch.zeros_like(weight).index_add(0, index, (dy * x**power).sum(1))
    return [dy * weight[index][:, None] * power * x ** (power - 1), dw]


_scaled = differentiable(
    "test_scaled_power",
    forward=scaled_square,
    forward_fake=lambda x, weight, index, power: [x.new_empty(x.shape), x.new_empty(x.shape)],
    backward=backward,
    backward_fake=lambda x, weight, *_: [v.new_empty(v.shape) for v in (x, weight) if v is not None],
    backward_reference=reference,
    keep=lambda inputs, outputs: (*inputs, outputs[-1]),
    backward_only=1,
)


def op(x, weight, index, power=3):
    return _scaled(x, weight, index, power)[0]


def plain(x, weight, index, power=3):
    return weight[index][:, None] * x**power


def loss(function):
    return lambda x, weight, index: (function(x, weight, index).sin() ** 2).sum()


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    calls.clear()
    return torch.randn(4, 3, dtype=torch.float64), torch.randn(2, dtype=torch.float64), torch.tensor([0, 1, 1, 0])


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_autograd(inputs):
    x, weight, index = inputs
    x.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: op(x, w, index), (x, weight))
    assert torch.autograd.gradgradcheck(lambda x, w: op(x, w, index), (x, weight))
    assert len(_scaled(x, weight, index, 3)) == 1  # the output for the backward alone is not returned


def test_the_first_derivative_runs_the_kernels(inputs):
    x, weight, index = inputs
    torch.func.grad(loss(op), (0, 1))(x, weight, index)
    assert calls == [
        "forward",
        "backward",
        "reference",
    ]  # the reference, as torch.func.grad sets up a second derivative


def test_func_grad(inputs):
    close(torch.func.grad(loss(op), (0, 1))(*inputs), torch.func.grad(loss(plain), (0, 1))(*inputs))


def test_func_hessian(inputs):
    def second(function):
        return torch.func.jacrev(torch.func.grad(loss(function), (0, 1)), (0, 1))(*inputs)

    close(second(op), second(plain))


@pytest.mark.parametrize("dims", [(0, None, None), (0, 1, None), (None, 0, None), (2, 0, 1)])
def test_vmap_of_grad(inputs, dims):
    batched = [
        value if dim is None else torch.stack([value, value.flip(0), value.flip(-1)], dim)
        for value, dim in zip(inputs, dims)
    ]
    found, wanted = (
        torch.func.vmap(torch.func.grad(loss(function), (0, 1)), dims)(*batched) for function in (op, plain)
    )
    close(found, wanted)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_break(inputs, dynamic):
    x, weight, index = inputs
    compiled = torch.compile(loss(op), fullgraph=True, dynamic=dynamic, backend="aot_eager")
    with torch.no_grad():
        close(compiled(x, weight, index), loss(plain)(x, weight, index))
    x.requires_grad_(), weight.requires_grad_()
    found, wanted = (torch.autograd.grad(f(x, weight, index), (x, weight)) for f in (compiled, loss(plain)))
    close(found, wanted)


def test_a_call_that_would_lose_the_gradient_is_refused(inputs):
    """torch (2.13) drops the autograd.Function in a compiled torch.func.grad, and would return zeros."""
    compiled = torch.compile(torch.func.grad(loss(op)), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"compile the loss and differentiate it by torch\.autograd\.grad"):
        compiled(*inputs)
    with pytest.raises(RuntimeError, match="loses this operation's gradient"):
        torch.ops.shardlib.test_scaled_power(inputs[0].requires_grad_(), None, inputs[2], 2)


def test_opcheck(inputs):
    x, weight, index = inputs
    library = torch.ops.shardlib
    for value in (weight, None):
        torch.library.opcheck(library.test_scaled_power.default, (x, value, index, 3))
        torch.library.opcheck(library.test_scaled_power_backward.default, (x, value, index, 3, x**2, x))


def test_missing_inputs_and_gradients_with_stride_zero(inputs):
    x, _, index = inputs
    x.requires_grad_()
    (found,) = torch.autograd.grad(op(x, None, index).sum(), x)  # sum's gradient is one number, expanded
    close(found, 3 * x.detach() ** 2)


@pytest.mark.parametrize("stage", [0, 3])
def test_handles_are_gathered_before_a_kernel_sees_them(stage):
    """Stage 3 passes handles, which an autograd.Function would take for tensors."""
    params = {"weight": torch.arange(1.0, 5), "up": torch.randn(3, 3)}
    params = {name: value.double() for name, value in params.items()}
    batch = torch.randn(4, 3, dtype=torch.float64)

    def run(function, mesh):
        sharded = sl.shard(params, mesh, sl.zero(stage))

        def loss_fn(params, batch):
            return loss(function)(F.linear(batch, params["up"]), params["weight"], torch.arange(4))

        value, grads = sl.value_and_grad(loss_fn)(sharded, batch)
        return value, sl.unshard(grads)

    for found, wanted in zip(*(sl.simulate(lambda mesh, f=f: run(f, mesh), mesh={"data": 2}) for f in (op, plain))):
        close(found, wanted)


def test_derivatives_without_grad_mode(inputs):
    """Under no_grad, torch.func.grad and forward mode are still right."""
    x, weight, index = (value.detach() for value in inputs)
    wanted = torch.func.grad(loss(plain))(x, weight, index)
    with torch.no_grad():
        torch.testing.assert_close(op(x, weight, index), plain(x, weight, index))
        torch.testing.assert_close(torch.func.grad(loss(op))(x, weight, index), wanted)
        with torch.autograd.forward_ad.dual_level():
            moving = torch.autograd.forward_ad.make_dual(x, x.cos())
            found, wanted = (
                torch.autograd.forward_ad.unpack_dual(f(moving, weight, index)).tangent for f in (op, plain)
            )
            torch.testing.assert_close(found, wanted)


def test_operators_of_a_user_have_a_namespace_of_their_own():
    def half(x: torch.Tensor) -> list[torch.Tensor]:
        return [x / 2]

    opaque("tests::half", half, lambda x: [torch.empty_like(x)])
    assert torch.ops.tests.half(torch.ones(1))[0].item() == 0.5
    assert not hasattr(torch.ops.shardlib, "half")


# Records among an operator's parameters: the operator takes their fields, the function the records.


class Pair(NamedTuple):
    low: int
    high: int


class Odd(NamedTuple):
    alone: int


class Call(NamedTuple):
    first: int
    pair: Pair
    odd: Odd
    last: int | None


class Sizes(NamedTuple):
    width: int
    height: int


def given_records(name: str, call: Call, between: bool, sizes: Sizes, end: float) -> list[int]:
    return [name, call, between, sizes, end]


def test_fields_replace_their_record():
    layout = layout_of(given_records)
    spread = layout.spread(given_records)
    found = spread("x", 1, 2, 3, 4, None, True, 6, 7, 0.5)
    assert found == ["x", Call(1, Pair(2, 3), Odd(4), None), True, Sizes(6, 7), 0.5]
    assert [type(value) for value in (found[1], *found[1][1:3], found[3])] == [Call, Pair, Odd, Sizes]
    signature = inspect.signature(spread)
    assert [parameter.annotation for parameter in signature.parameters.values()] == [
        str, int, int, int, int, int | None, bool, int, int, float,
    ]  # fmt: skip
    assert signature.return_annotation == list[int]


def test_fakes_take_records_too():
    fake = layout_of(given_records).spread(lambda name, call, *rest: (call.pair.high, rest))
    assert fake("x", 1, 2, 3, 4, None, True, 6, 7, 0.5) == (3, (True, Sizes(6, 7), 0.5))


def test_a_function_without_records_stays_as_it_is():
    def plain(x: int) -> int:
        return x

    assert layout_of(plain).spread(plain) is plain
