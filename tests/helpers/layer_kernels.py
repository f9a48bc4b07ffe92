"""The operations of a dense transformer layer in plain torch, and comparison of kernels with them in float64.

As a script, `python layer_kernels.py CASE...` holds the Triton kernels to that under Triton's interpreter.
"""

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from helpers.counter import spread
from shardlib.common import thresholds
from shardlib.kernels.dropout import DropoutDraw, dropout
from shardlib.kernels.gelu import gelu
from shardlib.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from shardlib.kernels.rotary import angles, rotary
from shardlib.kernels.softmax import softmax
from shardlib.kernels.swiglu import swiglu

Tensors = Sequence[torch.Tensor]
# A result is rounded once to its dtype; sums and functions in fp32 are good to some units in the last place.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}


class Case(NamedTuple):
    """One way to call an operation.

    Attributes:
        kinds: of its inputs: "x" is like x, "v" a vector of one number per column.
        kernel: of the inputs and ``using=``.
        plain: the same in float64; also gets what its inputs' dtype is.
    """

    kinds: str
    kernel: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
    plain: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To what ``dtype`` can hold; gradients pass unchanged."""
    return x + (x.detach().to(dtype).double() - x.detach())


def plain_norm(x, weight, bias, centred):
    if centred:
        return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-3)
    return x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight


def norm_case(kinds: str, centred: bool) -> Case:
    def unpack(inputs):
        inputs = list(inputs)
        x, residual = inputs.pop(0), inputs.pop(0) if kinds.startswith("xx") else None
        return x, residual, inputs[0], inputs[1] if len(inputs) > 1 else None

    def kernel(*inputs, using=None):
        x, residual, weight, bias = unpack(inputs)
        vectors, options = (weight, bias) if centred else (weight,), {"eps": 1e-3, "using": using}
        if residual is None:
            return (layer_norm if centred else rms_norm)(x, *vectors, **options)
        return (add_layer_norm if centred else add_rms_norm)(x, residual, *vectors, **options)

    def plain(*inputs, dtype):
        x, residual, weight, bias = unpack(inputs)
        if residual is None:
            return plain_norm(x, weight, bias, centred)
        total = rounded(x + residual, dtype)
        return plain_norm(total, weight, bias, centred), total

    return Case(kinds, kernel, plain)


def mask(draw: DropoutDraw, shape: torch.Size) -> torch.Tensor:
    """Dropout's factors, drawn in numpy."""
    count = np.prod(shape, dtype=np.int64)
    if draw.starts is None:
        index = np.arange(count, dtype=np.uint64) + np.uint64(draw.start)
    else:
        index = (draw.starts.numpy().reshape(-1, 1) + np.arange(shape[-1])).ravel().astype(np.uint64)

    def mix(x):
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
        return x ^ (x >> np.uint32(16))

    seed = spread(draw.seed)
    low, high = index.astype(np.uint32), (index >> np.uint64(32)).astype(np.uint32)
    bits = mix(mix(low ^ np.uint32(seed % 2**32)) ^ mix(high ^ np.uint32(seed >> 32))) >> np.uint32(8)
    return torch.from_numpy((bits >= int(draw.p * 2**24)).astype(np.float64)).reshape(shape) / (1 - draw.p)


def dropout_case(kinds: str, starts: bool = False) -> Case:
    def unpack(inputs):
        inputs = list(inputs)
        x, residual = inputs.pop(0), inputs.pop(0) if kinds.startswith("xx") else None
        draw = DropoutDraw(0.3, 2**63 + 12345678901, 2**34 - 50)  # the lower half of the index wraps around
        if starts:
            rows = x.shape[:-1].numel()
            draw = draw._replace(starts=torch.arange(rows).flip(0) * (2**31 - 7))
        return x, residual, inputs[0] if inputs else None, draw

    def kernel(*inputs, using=None):
        x, residual, bias, draw = unpack(inputs)
        return dropout(x, draw, bias=bias, residual=residual, using=using)

    def plain(*inputs, dtype):
        x, residual, bias, draw = unpack(inputs)
        y = (x if bias is None else x + bias) * mask(draw, x.shape)
        return y if residual is None else y + residual

    return Case(kinds, kernel, plain)


def gelu_case(kinds: str, approximate: str) -> Case:
    def plain(x, bias=None, *, dtype):
        return F.gelu(x if bias is None else x + bias, approximate=approximate)

    return Case(kinds, lambda *inputs, using=None: gelu(*inputs, approximate=approximate, using=using), plain)


def scores(x: torch.Tensor) -> torch.Tensor:
    """As ``[batch, heads, queries, keys]``: a dimension of heads, and as many queries as there are."""
    while x.dim() < 3:
        x = x[None]
    return x[:, None]


def softmax_case(lengths: bool, causal: bool) -> Case:
    def known(x):
        return (torch.arange(len(x)) * 3 + 2) % (x.shape[-1] + 1) if lengths else None

    def kernel(x, using=None):
        x = scores(x)
        return softmax(x, lengths=known(x), causal=causal, scale=0.7, using=using)

    def plain(x, dtype):
        x = scores(x)
        keys = torch.arange(x.shape[-1])
        seen = torch.ones(x.shape, dtype=torch.bool)
        if causal:
            seen &= keys <= torch.arange(x.shape[-2])[:, None]
        if lengths:
            seen &= keys < known(x)[:, None, None, None]
        # From the definition; where a row sees nothing, 0 / 1.
        powers = torch.where(seen, (0.7 * x).exp(), 0)
        total = powers.sum(-1, keepdim=True)
        return rounded(powers / torch.where(total == 0, 1, total), dtype)

    return Case("x", kernel, plain)


def rotary_case(interleaved: bool) -> Case:
    def table(x):
        return angles(torch.arange(x.shape[-2]) * 3, (x.shape[-1] - x.shape[-1] // 5) // 2 * 2)

    def kernel(x, using=None):
        x = x if x.dim() > 1 else x[None]
        return rotary(x, *table(x), interleaved=interleaved, using=using)

    def plain(x, dtype):
        """A complex number for each pair, times e^iθ."""
        x = x if x.dim() > 1 else x[None]
        cos, sin = table(x)
        width = 2 * cos.shape[1]
        pairs = x[..., :width].unflatten(-1, (-1, 2) if interleaved else (2, -1))
        pairs = pairs if interleaved else pairs.transpose(-1, -2)
        turned = torch.complex(pairs[..., 0], pairs[..., 1]) * torch.complex(cos.double(), sin.double())
        found = torch.stack([turned.real, turned.imag], -1)
        found = (found if interleaved else found.transpose(-1, -2)).flatten(-2)
        return torch.cat([found, x[..., width:]], -1)

    return Case("x", kernel, plain)


CASES = {
    "softmax": softmax_case(False, False),
    "softmax causal": softmax_case(False, True),
    "softmax of lengths": softmax_case(True, True),
    "rotary": rotary_case(False),
    "rotary interleaved": rotary_case(True),
    "gelu": gelu_case("x", "none"),
    "gelu with bias": gelu_case("xv", "none"),
    "gelu tanh with bias": gelu_case("xv", "tanh"),
    "layer norm": norm_case("xvv", True),
    "layer norm without bias": norm_case("xv", True),
    "layer norm of a sum": norm_case("xxvv", True),
    "rms norm": norm_case("xv", False),
    "rms norm of a sum": norm_case("xxv", False),
    "swiglu": Case("xx", swiglu, lambda gate, up, dtype: F.silu(gate) * up),
    "dropout": dropout_case("x"),
    "dropout with bias": dropout_case("xv"),
    "dropout with bias onto a residual": dropout_case("xxv"),
    "dropout of parts": dropout_case("xx", starts=True),
}

LAYOUTS = ("contiguous", "transposed", "half")


def inputs(case: Case, shape: tuple[int, ...], dtype: torch.dtype, layout: str, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def like_x() -> torch.Tensor:
        if layout == "transposed":
            return torch.randn(shape[::-1], generator=generator).to(dtype).permute(*reversed(range(len(shape))))
        wide = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator).to(dtype)
        return wide.chunk(2, -1)[1] if layout == "half" else wide[..., : shape[-1]].contiguous()

    return [like_x() if kind == "x" else torch.randn(shape[-1], generator=generator).to(dtype) for kind in case.kinds]


def outputs_and_gradients(function: Callable, values: Tensors, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """The outputs and gradients of ``function``, with cotangents drawn in ``dtype``."""
    values = [value.detach().requires_grad_() for value in values]
    found = function(*values)
    found = [found] if isinstance(found, torch.Tensor) else list(found)
    generator = torch.Generator().manual_seed(seed + 1)
    cotangents = [torch.randn(y.shape, generator=generator).to(dtype).to(y.dtype) for y in found]
    return [*found, *torch.autograd.grad(found, values, cotangents)]


def check_every_way(loss: Callable, values: Tensors, batched: Tensors = (), dims: tuple = (), **compiles) -> Tensors:
    """Gradients of a loss are the same however they are asked for; those of a batch, whose first element ``values`` are.

    ``compiles``: the tolerance of compiled ones, by default torch's.
    """
    torch._dynamo.reset()  # the loss is one function to the compiler, whatever it closes over
    everything = tuple(range(len(values)))
    leaves = [value.clone().requires_grad_() for value in values]
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(torch.func.grad(loss, everything)(*values), wanted, rtol=0, atol=0)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves), wanted, **compiles)
    if not batched:
        return ()
    found = torch.func.vmap(torch.func.grad(loss, everything), dims or 0)(*batched)
    torch.testing.assert_close([mine[0] for mine in found], list(wanted), rtol=0, atol=0)
    return found


def check(
    name: str, using: str | None, shape: tuple[int, ...], dtype: torch.dtype, layout: str = "contiguous", seed: int = 0
) -> None:
    """Outputs and gradients against float64."""
    case = CASES[name]
    values = inputs(case, shape, dtype, layout, seed)
    found = outputs_and_gradients(lambda *v: case.kernel(*v, using=using), values, dtype, seed)
    doubles = [value.double() for value in values]
    wanted = outputs_and_gradients(lambda *v: case.plain(*v, dtype=dtype), doubles, dtype, seed)
    bound = TOLERANCES[dtype]
    for mine, exact in zip(found, wanted, strict=True):
        assert mine.dtype == dtype and mine.shape == exact.shape
        scale = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
        torch.testing.assert_close(mine.double(), exact, rtol=bound, atol=bound * scale if mine.dim() == 1 else bound)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in CASES:
        if name.startswith(sys.argv[1]):
            for shape, dtype, layout in (
                ((2, 3, 37), torch.float32, "contiguous"),
                ((35, 130), torch.float32, "half"),
                ((3, 9), torch.bfloat16, "transposed"),
                ((0, 5), torch.float32, "contiguous"),
                *[((3, 9000), torch.float32, "contiguous")] * ("norm" in name),  # too wide for a program, either way
            ):
                check(name, "triton", shape, dtype, layout, seed=7)
            with thresholds.small(1):  # one program sums all rows
                check(name, "triton", (35, 130), torch.float32, "contiguous", seed=7)
