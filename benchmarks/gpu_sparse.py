"""Sparse attention on one GPU: check the Triton kernels, then measure them, in under eight minutes.

    python -m benchmarks.gpu_sparse [--out benchmarks/results]

Checks compare with plain torch in float64. Measurements interleave our kernels, dense flash attention and compiled
FlexAttention with the same blocks, round by round, with device events, and report medians. ``--tiny`` is a smoke test
of the script itself that also runs on a CPU; its timings mean nothing and are not written.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import shardlib as sl
from benchmarks.gpu import Rows, seconds, write
from shardlib.kernels.sparse_attention import triton
from shardlib.kernels.sparse_attention.options import Blocks, Options
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not args.tiny:
        raise SystemExit("no CUDA device: nothing to measure (--tiny tries the script on the CPU)")
    checked = checks(device, (16, 64) if args.tiny else (16, 64, 80, 128, 256))
    for row in checked:
        print(f"{row['check']:55s} {row['result']}", flush=True)
    measured = measurements(device, args.tiny)
    for row in measured:
        print(row)
    if not args.tiny:
        write(args.out, device, "benchmarks.gpu_sparse", checked, {"-sparse": measured})


def using(device: torch.device) -> str:
    return "triton" if device.type == "cuda" else "cpu"


def checks(device: torch.device, sizes: tuple[int, ...]) -> Rows:
    """Output and gradients, and the same bits twice."""
    rows = []
    for dtype in _TOLERANCES:
        for size in sizes:
            for options in ("plain", "causal, masked", "bias, dropout"):
                error, repeats = check(device, dtype, size, options)
                good = error <= _TOLERANCES[dtype] and repeats
                result = f"{'ok' if good else 'WRONG'} ({error:.1e}{'' if repeats else ', other bits the second time'})"
                rows.append({"check": f"{dtype}, size {size}, {options}", "result": result})
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
        out = sl.sparse_attention(q, k, v, layout, bias=bias[0] if bias else None, using=implementation, **given)
        return [out.detach(), *torch.autograd.grad(out, values, grad.to(out.dtype))]

    wanted = run([value.double() for value in inputs], "reference")
    found, again = (run(inputs, using(device)) for _ in range(2))
    error = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, wanted))
    return error, all(torch.equal(a, b) for a, b in zip(found, again))


def measurements(device: torch.device, tiny: bool) -> Rows:
    """Milliseconds, and operations on the layout's own blocks per second; of dense attention, on all."""
    rows = []
    ceiling = matmul_rate(device, tiny)
    for length in (512,) if tiny else (16384, 65536, 131072):
        inputs = [torch.randn(1, _HEADS, length, _SIZE, device=device).bfloat16().requires_grad_() for _ in range(3)]
        grad = torch.randn_like(inputs[0])
        for name, make in _LAYOUTS.items():
            layout = make(length).to(device)
            times = timings(attentions(layout, length, device), inputs, grad, tiny)
            share = computed(inputs, layout)
            for (provider, which), taken in times.items():
                median = statistics.median(taken)
                density = 1.0 if provider == "flash, dense" else layout.density
                rate = _PASSES[which] * density * length**2 * _HEADS * _SIZE / median
                ours = statistics.median(times["shardlib", which])
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
        "shardlib": lambda q, k, v: sl.sparse_attention(q, k, v, layout, using=using(device)),
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


def timings(
    attentions: dict[str, Callable[..., torch.Tensor]], inputs: list[torch.Tensor], grad: torch.Tensor, tiny: bool
) -> dict[tuple[str, str], list[float]]:
    """Seconds of every provider and pass, taking turns."""
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    constants = [x.detach() for x in inputs]
    same = [attentions[name](*constants) for name in ("shardlib", "FlexAttention")]
    torch.testing.assert_close(*same, rtol=0.02, atol=0.02)
    for name, attention in attentions.items():

        def forward(attention: Callable[..., torch.Tensor] = attention) -> None:
            attention(*constants)

        def both(attention: Callable[..., torch.Tensor] = attention) -> None:
            torch.autograd.grad(attention(*inputs), inputs, grad)

        calls[name, "forward"] = forward
        if inputs[0].is_cuda or name != "FlexAttention":  # which has no backward on a CPU
            calls[name, "forward + backward"] = both
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for number in range(2 if tiny else 13):
        for key, call in calls.items():
            taken = seconds(call, inputs[0].device)
            if number >= (0 if tiny else 3):
                times[key].append(taken)
    return times


def computed(inputs: list[torch.Tensor], layout: Layout) -> float:
    """The share of all pairs of positions that our kernels compute."""
    q, k, _ = inputs
    return triton.work(q, k, Blocks(layout.row_offsets, layout.columns), Options(layout.block, _SIZE**-0.5))


def matmul_rate(device: torch.device, tiny: bool) -> float:
    """Operations per second of a large product in bf16: the ceiling."""
    size = 256 if tiny else 8192
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    taken = [seconds(lambda: a @ b, device) for _ in range(2 if tiny else 20)]
    return 2 * size**3 / statistics.median(taken)


if __name__ == "__main__":
    main()
