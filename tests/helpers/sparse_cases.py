"""Drawn cases of sparse attention, and checks of implementations against a dense masked softmax in float64.

As a script it holds the Triton kernels to that under Triton's interpreter, which has to be on before a kernel is
decorated.
"""

import itertools
import math
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.nn.functional as F

import shardlib as sl
from helpers.dense_attention import bounds, dense_attention
from shardlib.kernels.common import native
from shardlib.sparse import Layout


@dataclass
class Case:
    """Inputs in one dtype, and how they are attended to."""

    tensors: dict[str, torch.Tensor]
    layout: Layout
    settings: dict

    def cotangent(self):
        """A cotangent of the output, which has the shape of q."""
        q = self.tensors["q"]
        drawn = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return drawn.to(q.dtype)

    def __call__(self, function, grad=None, **more):
        """The output and the gradients of everything, of which ``grad`` is the cotangent."""
        grad = self.cotangent() if grad is None else grad
        inputs = {name: x.detach().requires_grad_() for name, x in self.tensors.items()}
        out = function(
            inputs["q"], inputs["k"], inputs["v"], self.layout, bias=inputs.get("bias"), **self.settings, **more
        )
        # As often in models: not contiguous.
        gradients = torch.autograd.grad(out, list(inputs.values()), grad.mT.contiguous().mT)
        return {"out": out.detach()} | dict(zip(inputs, gradients))

    def wide(self):
        return Case({name: x.double() for name, x in self.tensors.items()}, self.layout, self.settings)


def make(
    length=70,
    size=16,
    heads=4,
    key_heads=2,
    batch=2,
    block=16,
    dtype=torch.float32,
    shared=False,
    density=0.5,
    masked=False,
    bias_heads=0,
    seed=0,
    transposed=False,
    layout=None,
    **settings,
):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    if transposed:  # (batch, sequence, heads, size), as a projection makes it
        q, k, v = (normal(batch, length, n, size).transpose(1, 2) for n in (heads, key_heads, key_heads))
    else:
        q, k, v = (normal(batch, n, length, size) for n in (heads, key_heads, key_heads))
    tensors = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    if bias_heads:
        tensors["bias"] = normal(bias_heads, 2 * length - 1)
    if masked:
        settings["key_mask"] = torch.rand(batch, length, generator=generator) < 0.7
    if layout is None:
        side = -(-length // block)
        dense = torch.rand(1 if shared else heads, side, side, generator=generator) < density
        layout = Layout.from_dense(dense, block)
    return Case(tensors, layout, settings)


def check(case, using):
    """The output and all gradients."""
    settings = dict(case.settings)
    if "rng" in settings:
        settings["rng_key"] = settings.pop("rng")
    dtype, wide, grad = case.tensors["q"].dtype, case.wide(), case.cotangent().double()
    wanted = Case(wide.tensors, case.layout, settings)(dense_attention, grad)
    allowed = bounds(wide.tensors, grad, case.layout, dtype, _narrow(using, dtype), **settings)
    found = case(sl.nn.sparse_attention, using=using)
    for part, value in found.items():
        assert value.dtype == case.tensors["q" if part == "out" else part].dtype
        off = (value.double() - wanted[part]).abs()
        assert (off <= allowed[part]).all(), f"{part}: off by up to {(off / allowed[part]).max():.3g} of the bound"


def _narrow(using, dtype):
    """Whether an implementation multiplies 16-bit weights."""
    if using == "triton":
        return dtype in (torch.bfloat16, torch.float16)
    return using == "cpu" and dtype == torch.bfloat16 and native.instruction_set("sparse_attention") == "amx"


def check_padding(using):
    """Values in masked keys and values that are not finite show as in torch's attention with a mask, with a causal mask at
    least in the queries that would see them; and later keys are not looked at.
    """
    for masked, causal, value in itertools.product("kv", (False, True), (math.nan, math.inf)):
        case = make(length=48, heads=2, batch=2, layout=sl.sparse.dense(48, causal=causal))
        seen = torch.ones(2, 48, dtype=torch.bool)
        seen[0, 40] = False
        case.tensors[masked][0, 1, 40] = value  # of one sample and one head of keys
        found = sl.nn.sparse_attention(*case.tensors.values(), case.layout, key_mask=seen, using=using)
        if not causal:
            wanted = F.scaled_dot_product_attention(*case.tensors.values(), seen[:, None, None], enable_gqa=True)
            assert torch.equal(found.isnan(), wanted.isnan())
        elif masked == "k":
            later = sl.nn.sparse_attention(*case.tensors.values(), case.layout, using=using)
            assert later[0, 1, :40].isfinite().all()
        assert found[0, 1, 40:].isnan().all()
        assert found[0, 0].isfinite().all() and found[1].isfinite().all()


def _cases():
    """Cases for the Triton kernels, and again with long lists split into items."""
    yield make(length=130, heads=2, batch=1)
    yield make(length=1)
    yield make(length=50, causal=True, masked=True, bias_heads=4, dropout=0.3, rng=sl.Key(2**64 - 3, 2**20 + 7))
    yield make(
        length=70, size=24, block=32, key_heads=1, batch=1, shared=True, masked=True, bias_heads=1, transposed=True
    )
    yield make(length=192, heads=2, batch=1, block=128, density=0.6, causal=True)  # a tile is smaller than a block
    yield make(length=80, size=20, heads=2, block=64, density=0.9, bias_heads=1)
    yield make(length=40, density=0.0, bias_heads=1)
    yield make(length=130, size=64, batch=1, block=32, masked=True, dtype=torch.float16, dropout=0.2, rng=sl.Key(3))
    yield make(length=130, size=64, batch=1, block=64, causal=True, dtype=torch.bfloat16)
    yield make(length=40, size=200, heads=2, batch=1, block=32)


def _cases_in_parts():
    for scale in (0.0, -0.7):
        yield make(length=40, heads=2, batch=1, masked=True, scale=scale)
    yield make(length=100, heads=2, batch=1, layout=sl.sparse.dense(100, block=32, causal=True))  # causal by itself
    yield make(length=330, batch=1, heads=2, key_heads=1, layout=sl.sparse.bigbird(330), bias_heads=1)
    patterns = sl.sparse.fixed(250, causal=True, heads=4, patterns=2)  # which heads share
    yield make(length=250, batch=1, causal=True, layout=patterns)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in _cases():
        check(case, "triton")
    with patch("shardlib.kernels.sparse_attention.packing.LEAST_STEPS", 1):
        for case in _cases_in_parts():
            check(case, "triton")
    check_padding("triton")
    nothing = make(batch=0, bias_heads=1)(sl.nn.sparse_attention, using="triton")
    assert nothing["out"].shape == (0, 4, 70, 16) and not nothing["bias"].any()
