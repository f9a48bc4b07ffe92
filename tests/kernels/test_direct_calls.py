"""Kernels are called at once where nothing but autograd looks on, and as operators where something does."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shardlib as sl


@pytest.fixture
def leaves():
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for shape in ((3, 8), (8,), (8,))]


def test_no_operator_stands_between_a_call_and_its_kernel(leaves):
    assert type(sl.nn.layer_norm(*leaves).grad_fn).__name__ == "DirectBackward"


def test_a_profiler_sees_operators(leaves):
    with torch.profiler.profile() as profile:
        torch.autograd.grad(sl.nn.layer_norm(*leaves).sum(), leaves)
    assert {"shardlib::norm", "shardlib::norm_backward"} <= {event.key for event in profile.key_averages()}


class Seen(TorchDispatchMode):
    """The names of operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_operators(leaves):
    with Seen() as forward:
        y = sl.nn.layer_norm(*leaves)
    with Seen() as backward:
        torch.autograd.grad(y.sum(), leaves)
    assert "shardlib::norm" in forward.names and "shardlib::norm_backward" in backward.names


def test_tensors_that_are_negated_when_read(leaves):
    x, *weights = leaves
    flipped = x.detach().neg().conj_physical()._neg_view().requires_grad_()
    assert flipped.is_neg()
    cotangent = torch.randn(3, 8)
    turned = cotangent.neg()._neg_view()
    expected = torch.autograd.grad(torch.nn.functional.layer_norm(x, (8,), *weights), leaves, cotangent)
    y = sl.nn.layer_norm(flipped, *weights)
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (8,), *weights))
    for found, wanted in zip(torch.autograd.grad(y, [flipped, *weights], turned), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_kernels_compute_outside_of_autocast(leaves):
    plain = sl.nn.layer_norm(*leaves)
    with torch.autocast("cpu", torch.bfloat16):
        y = sl.nn.layer_norm(*leaves)
        gradients = torch.autograd.grad(y.sum(), leaves)
    assert torch.equal(y, plain)
    for found, wanted in zip(gradients, torch.autograd.grad(plain.sum(), leaves), strict=True):
        assert torch.equal(found, wanted)
