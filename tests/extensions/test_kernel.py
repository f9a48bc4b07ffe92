"""A user's own operation with a kernel of its own, y = x·σ(s·x), in a loss at every ZeRO stage."""

import torch
from helpers.stages import check_like_one_device

import shardlib as sl
from shardlib.kernels.common import differentiable


def forward(x: torch.Tensor, slope: float) -> list[torch.Tensor]:
    return [x * torch.sigmoid(slope * x)]  # a Triton, CUDA or C++ kernel would be launched here


def backward(x: torch.Tensor, slope: float, dy: torch.Tensor) -> list[torch.Tensor]:
    gate = torch.sigmoid(slope * x)
    return [dy * gate * (1 + slope * x * (1 - gate))]


def alike(x: torch.Tensor, *rest) -> list[torch.Tensor]:
    return [torch.empty_like(x)]


swish = differentiable(
    "tests::swish",
    forward=forward,
    forward_fake=alike,
    backward=backward,
    backward_fake=alike,
    backward_reference=backward,
)


def loss_fn(params, x):
    for layer in params:
        (x,) = swish(x @ layer["w"] + layer["b"], 1.5)
    return x.square().mean()


def model():
    generator = torch.Generator().manual_seed(0)
    sizes = {"w": (5, 5), "b": (5,)}
    params = [{n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in sizes.items()} for _ in "ab"]
    return loss_fn, params, [torch.randn(8, 5, generator=generator, dtype=torch.float64) for _ in range(4)]


def test_it_trains_like_one_device_and_sends_what_the_plan_says(tmp_path):
    check_like_one_device(model, sl.chain(), tmp_path)


def test_all_derivatives_are_right():
    x = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: swish(x, 1.5)[0], x)
    assert torch.autograd.gradgradcheck(lambda x: swish(x, 1.5)[0], x)
