"""A user's own operation with a kernel of its own, y = x·σ(s·x), in a loss at every ZeRO stage."""

import pytest
import torch
from helpers.stages import in_halves, train_stages
from helpers.trees import assert_close
from oracle import one_device

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


TX = sl.optim.adamw(1e-3, eps=1e-5, weight_decay=0.01)


def train(mesh, folder, half):
    return train_stages(mesh, model, sl.chain(), TX, folder, half)


def test_it_trains_like_one_device_and_sends_what_the_plan_says(tmp_path):
    _, params, batches = model()
    expected, _, final = one_device.train(loss_fn, params, batches)
    for half, _, losses, trained in in_halves(train, model, sl.chain(), TX, tmp_path):
        assert losses == pytest.approx(expected[2 * half :][:2], rel=1e-10)
        if half == 1:
            assert_close(trained, final, 1e-10)


def test_all_derivatives_are_right():
    x = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: swish(x, 1.5)[0], x)
    assert torch.autograd.gradgradcheck(lambda x: swish(x, 1.5)[0], x)
