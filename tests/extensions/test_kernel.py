"""A user's own operation with a C++ kernel, y = x·σ(s·x), in a loss at every ZeRO stage."""

import ctypes
import functools
import subprocess
import tempfile

import torch
from helpers.stages import check_like_one_device

import shardlib as sl
from shardlib.kernels.common import differentiable

SOURCE = """
#include <cmath>
static double gate(double x) { return 1 / (1 + std::exp(-x)); }
extern "C" void swish(const double* x, double* y, double s, long n) {
    for (long i = 0; i < n; i++) y[i] = x[i] * gate(s * x[i]);
}
extern "C" void swish_backward(const double* x, const double* dy, double* dx, double s, long n) {
    for (long i = 0; i < n; i++) dx[i] = dy[i] * gate(s * x[i]) * (1 + s * x[i] * gate(-s * x[i]));
}
"""


@functools.cache
def kernels():
    path = f"{tempfile.mkdtemp()}/swish.so"
    subprocess.run(["g++", "-O3", "-shared", "-fPIC", "-xc++", "-", "-o", path], input=SOURCE, text=True, check=True)
    return ctypes.CDLL(path)


def launch(kernel, x, slope, *incoming):
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, *incoming, out)]
    kernel(*pointers, ctypes.c_double(slope), ctypes.c_long(x.numel()))
    return [out]


def forward(x: torch.Tensor, slope: float) -> list[torch.Tensor]:
    return launch(kernels().swish, x, slope)


def backward(x: torch.Tensor, slope: float, dy: torch.Tensor) -> list[torch.Tensor]:
    return launch(kernels().swish_backward, x, slope, dy)


def plain_backward(x, slope, dy):
    gate = torch.sigmoid(slope * x)
    return [dy * gate * (1 + slope * x * (1 - gate))]


def fake(x, *rest):
    return [torch.empty(x.shape, dtype=x.dtype)]


passes = {"forward": forward, "forward_fake": fake, "backward": backward, "backward_fake": fake}
swish = differentiable("tests::swish", **passes, backward_reference=plain_backward)


def loss_fn(params, x):
    for layer in params:
        (x,) = swish(x @ layer["w"] + layer["b"], 1.5)
    return x.square().mean()


def model():
    draw = functools.partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return loss_fn, [{"w": draw(5, 5), "b": draw(5)} for _ in "ab"], [draw(8, 5) for _ in range(4)]


def test_it_trains_like_one_device_and_sends_what_the_plan_says(tmp_path, pool):
    check_like_one_device(model, sl.chain(), tmp_path, pool)


def test_all_derivatives_are_right():
    x = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: swish(x, 1.5)[0], x)
    assert torch.autograd.gradgradcheck(lambda x: swish(x, 1.5)[0], x)
    assert torch.allclose(swish(x, 1.5)[0], x * torch.sigmoid(1.5 * x))
