"""Sparse attention on one GPU: the Triton kernels against plain torch in float64, and their speed against dense flash
attention and compiled FlexAttention with the same blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import shardlib as sl
from benchmarks.gpu_timing import Rows, Timing
from shardlib.kernels.sparse_attention import triton
from shardlib.kernels.sparse_attention.arguments import Blocks, Options
from shardlib.sparse import Layout

_LAYOUTS: dict[str, Callable[[int], Layout]] = {"Fixed": sl.sparse.fixed, "BigBird": sl.sparse.bigbird}
_HEADS, _SIZE = 8, 64
_FLEX_BLOCK = 128  # what FlexAttention is made for
# Times as fast as the other, forward and backward together; the second where a layout's density is below 5 %.
_TARGETS = {"FlexAttention": 2.0, "flash, dense": 6.0}
# Operations on a head of one number for a pair of positions; backward computes the scores again.
_PASSES = {"forward": 4, "forward + backward": 14}
# Of the largest number, for results and gradients: some roundings of the dtype.
_TOLERANCES = {torch.float32: 2**-17, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def using(device: torch.device) -> str:
    return "triton" if device.type == "cuda" else "cpu"


def checks(device: torch.device) -> Rows:
    """Output and gradients, and the same bits twice."""
    rows, sizes = [], (16, 64, 80, 128, 256) if device.type == "cuda" else (16, 64)
    for dtype in _TOLERANCES:
        for size in sizes:
            for options in ("plain", "causal, masked", "bias, dropout"):
                error, repeats = check(device, dtype, size, options)
                good = error <= _TOLERANCES[dtype] and repeats
                result = f"{'ok' if good else 'WRONG'} ({error:.1e}{'' if repeats else ', other bits the second time'})"
                rows.append({"check": f"sparse attention, {str(dtype)[6:]}, size {size}, {options}", "result": result})
    return rows


def check(device: torch.device, dtype: torch.dtype, size: int, options: str) -> tuple[float, bool]:
    """The largest error over the largest number, and whether two runs agree bit by bit."""
    length = 1100  # not a multiple of the block, and rows and columns long enough to be cut into parts
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    inputs = [normal(2, heads, length, size).to(dtype) for heads in (4, 2, 2)]
    given: dict[str, Any] = {"causal": options == "causal, masked"}
    if given["causal"]:
        given["key_mask"] = normal(2, length) > -1
    if options == "bias, dropout":
        given |= {"dropout": 0.1, "rng": sl.Key(1)}
        inputs.append(normal(4, 2 * length - 1))
    grad = normal(2, 4, length, size).to(dtype)
    layout = sl.sparse.bigbird(length, causal=given["causal"]).to(device)

    def run(values: list[torch.Tensor], implementation: str) -> list[torch.Tensor]:
        values = [value.detach().requires_grad_() for value in values]
        q, k, v, *bias = values
        out = sl.nn.sparse_attention(q, k, v, layout, bias=bias[0] if bias else None, using=implementation, **given)
        return [out.detach(), *torch.autograd.grad(out, values, grad.to(out.dtype))]

    wanted = run([value.double() for value in inputs], "reference")
    found, again = (run(inputs, using(device)) for _ in range(2))
    error = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, wanted))
    return error, all(torch.equal(a, b) for a, b in zip(found, again))


def measurements(timing: Timing) -> Rows:
    """Milliseconds, and operations on the layout's own blocks per second; of dense attention, on all."""
    rows, device = [], timing.device
    ceiling = timing.product_rate()
    for length in (512,) if timing.tiny else (16384, 65536, 131072):
        inputs = [torch.randn(1, _HEADS, length, _SIZE, device=device).bfloat16().requires_grad_() for _ in range(3)]
        grad = torch.randn_like(inputs[0])
        for name, make in _LAYOUTS.items():
            layout = make(length).to(device)
            calls = attentions_of(layout, inputs, grad)
            medians = timing.medians(
                f"sparse attention: {name}, {length}", {": ".join(key): calls[key] for key in calls}
            )
            share = computed(inputs, layout)
            for provider, which in calls:
                median, ours = medians[f"{provider}: {which}"], medians[f"shardlib: {which}"]
                density = 1.0 if provider == "flash, dense" else layout.density
                rate = _PASSES[which] * density * length**2 * _HEADS * _SIZE / median
                rows.append(
                    {
                        "layout": name,
                        "tokens": str(length),
                        "density": f"{layout.density:.2%}",
                        "computed by shardlib": f"{share:.2%}",
                        "pass": which,
                        "provider": provider,
                        "ms": f"{median * 1e3:.3f}",
                        "TFLOP/s": f"{rate / 1e12:.1f}",
                        "of a product's": f"{rate / ceiling:.1%}",
                        "over shardlib": f"{median / ours:.2f}",
                        "target": verdict(provider, which, layout.density, median / ours),
                    }
                )
    return rows


def verdict(provider: str, which: str, density: float, ratio: float) -> str:
    target = _TARGETS.get(provider)
    if target is None or which == "forward" or (provider == "flash, dense" and density >= 0.05):
        return ""
    return f"≥ {target:g}: {'met' if ratio >= target else 'missed'}"


def attentions(layout: Layout, length: int, device: torch.device) -> dict[str, Callable[..., torch.Tensor]]:
    mask = coarse_mask(layout, length)
    on_gpu = device.type == "cuda"
    flex = torch.compile(flex_attention, dynamic=False) if on_gpu else flex_attention
    backend = SDPBackend.FLASH_ATTENTION if on_gpu else SDPBackend.MATH

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return {
        "shardlib": lambda q, k, v: sl.nn.sparse_attention(q, k, v, layout, using=using(device)),
        "flash, dense": dense,
        "FlexAttention": lambda q, k, v: flex(q, k, v, block_mask=mask),
    }


def coarse_mask(layout: Layout, length: int) -> BlockMask:
    """The layout in blocks of 128, which a mask cuts down to its own; those that it fills are not masked."""
    seen, block = layout.to_dense(), layout.block
    side = _FLEX_BLOCK // block
    parts = seen.view(layout.heads, layout.size // side, side, layout.size // side, side)
    full = parts.all(4).all(2)
    partial = parts.any(4).any(2) & ~full

    def mask_mod(sample: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return seen[head % len(seen), query // block, key // block]

    def lists(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
        return blocks.sum(dim=-1).int()[None], order[None].contiguous()

    sizes = (length, length)
    return BlockMask.from_kv_blocks(
        *lists(partial), *lists(full), BLOCK_SIZE=_FLEX_BLOCK, mask_mod=mask_mod, seq_lengths=sizes
    )


def attentions_of(
    layout: Layout, inputs: list[torch.Tensor], grad: torch.Tensor
) -> dict[tuple[str, str], Callable[[], Any]]:
    """By provider and pass. Ours and FlexAttention's are seen to agree first."""
    functions = attentions(layout, inputs[0].shape[2], inputs[0].device)
    constants = [x.detach() for x in inputs]
    same = [functions[name](*constants) for name in ("shardlib", "FlexAttention")]
    torch.testing.assert_close(*same, rtol=0.02, atol=0.02)
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, attention in functions.items():
        calls[name, "forward"] = lambda attention=attention: attention(*constants)
        if inputs[0].is_cuda or name != "FlexAttention":  # which has no backward on a CPU
            calls[name, "forward + backward"] = lambda attention=attention: torch.autograd.grad(
                attention(*inputs), inputs, grad
            )
    return calls


def computed(inputs: list[torch.Tensor], layout: Layout) -> float:
    """The share of all pairs of positions that our kernels compute."""
    q, k, _ = inputs
    return triton.work(q, k, Blocks(layout.row_offsets, layout.columns), Options(layout.block, _SIZE**-0.5))
