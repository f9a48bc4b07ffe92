"""Sparse attention: on one core against gathered blocks in plain torch and dense attention, on a GPU against dense flash
attention and compiled FlexAttention with the same blocks.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import shardlib as sl
from benchmarks.harness import rates, tables
from benchmarks.harness.case import CPU, CUDA, Case, Checks, Result, Setting
from benchmarks.harness.timing import Calls, Times, interleave, medians, one_thread, processor, ratio
from benchmarks.peers.sparse_attention import Attention, Gathered, flash, flex
from shardlib.kernels.common.dispatch import choose
from shardlib.kernels.sparse_attention import ComputedBlocks, Options, triton
from shardlib.sparse import Layout

_LENGTHS = {CPU: (8192, 16384, 32768), CUDA: (16384, 65536, 131072)}
_HEADS = {CPU: 2, CUDA: 8}
_SIZE, _BLOCK = 64, 16
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_FORWARD, _BOTH = "forward", "forward + backward"
_LAYOUTS: dict[str, Callable[[int], Layout]] = {
    "Fixed": sl.sparse.fixed,
    "Variable": sl.sparse.variable,
    "BigBird": sl.sparse.bigbird,
    "BSLongformer": sl.sparse.longformer,
    "LocalSlidingWindow": partial(sl.sparse.sliding_window, causal=False),
}
_SHORT = 8192  # for longer sequences, calls that take seconds have one round
_DENSEST = "Fixed"  # with a quarter of all blocks it takes seconds
# Bytes of gathered blocks that autograd may save; if it would be more, heads are computed one after another. (Fixed has a
# quarter of all blocks: with 32,768 tokens in fp32, 11 GB per head.)
_KEPT = 8 << 30
_TARGET = 3.0  # times as fast as gathered blocks
_ON_A_GPU = ("Fixed", "BigBird")
_FLASH, _FLEX, _OURS = "flash, dense", "FlexAttention", "shardlib"
# Speed-ups over the peer, forward and backward together; that over flash for layouts with a density below 5 %.
_TARGETS = {_FLEX: 2.0, _FLASH: 6.0}
# Operations per pair of positions and number of a head; backward computes the scores again.
_PASSES = {_FORWARD: 4, _BOTH: 14}
# Errors of results and gradients over the largest number: some roundings of the dtype.
_TOLERANCES = {torch.float32: 2**-17, torch.float16: 2**-9, torch.bfloat16: 2**-6}


class Name(NamedTuple):
    """One timed call; ``layout`` is empty for dense attention."""

    length: int
    dtype: str
    layout: str
    how: str  # "sparse", "gathered" or "dense"
    which: str

    def __str__(self) -> str:
        return ",".join(map(str, self))


def measure(setting: Setting) -> Result:
    lengths = (512,) if setting.small else _LENGTHS[setting.kind]
    return _on_a_gpu(lengths, setting) if setting.kind == CUDA else _on_one_core(lengths, setting)


def _on_one_core(lengths: tuple[int, ...], setting: Setting) -> Result:
    times: Times = {}
    with one_thread():
        for length in lengths:
            for dtype in _DTYPES:
                quick, slow = _calls(length, dtype)
                times |= interleave(quick, setting.rounds, warm=1, stopwatch=processor)
                some = min(setting.rounds, 3) if length <= _SHORT else 1
                times |= interleave(slow, some, stopwatch=processor)
                print(f"{length} {dtype}: measured", flush=True)
    about = (
        f"Batch 1, {_HEADS[CPU]} heads of size {_SIZE}, blocks of {_BLOCK}, not causal, one thread; sparse: "
        f"{choose('sparse_attention', setting.device)}. “Gathered”: the same blocks gathered in plain torch, with "
        f"autograd, a head at a time where all together would keep more than {_KEPT >> 30} GB. “Dense”: "
        "`F.scaled_dot_product_attention`. Seconds of processor time, the machine's load being "
        f"{os.getloadavg()[0]:.0f}; sparse and gathered take turns; medians of {setting.rounds} rounds (of dense attention "
        f"and of {_DENSEST} 3, beyond {_SHORT} tokens 1), ratios with 95% intervals. The last column, speed-up over dense × "
        "density, is 1 where an operation of sparse attention takes as long as one of dense attention."
    )
    columns = ["tokens", "dtype", "layout", "density", "", "seconds", "gathered", "times as fast (target ≥ 3)", ""]
    columns += ["dense", "× dense", "× dense × density"]
    return tables.listed("Sparse attention on one core", about, columns, _cells(times), times)


def _calls(length: int, dtype: str) -> tuple[Calls, Calls]:
    """Calls of sparse and gathered attention, and the slow ones: dense attention, and those with the densest layout."""
    generator = torch.Generator().manual_seed(0)
    heads = _HEADS[CPU]
    shape = 1, heads, length, _SIZE
    whole = [torch.randn(shape, generator=generator).to(_DTYPES[dtype]) for _ in range(4)]  # q, k, v, gradient
    by_head = [[x[:, head : head + 1].contiguous() for x in whole] for head in range(heads)]
    for x in (x for tensors in (whole, *by_head) for x in tensors[:3]):
        x.requires_grad_()

    def calls(layout: str, how: str, attention: Attention, shares: list[list[torch.Tensor]]) -> dict[str, Any]:
        def forward(_: int) -> None:
            with torch.no_grad():
                attention(*whole[:3])

        def both(_: int) -> None:
            for *inputs, grad in shares:
                torch.autograd.grad(attention(*inputs), inputs, grad)

        functions = zip(_PASSES, (forward, both))
        return {str(Name(length, dtype, layout, how, which)): function for which, function in functions}

    quick: dict[str, Any] = {}
    slow = calls("", "dense", F.scaled_dot_product_attention, [whole])
    for name, make in _LAYOUTS.items():
        layout = make(length)
        attentions = {"sparse": partial(sl.nn.sparse_attention, layout=layout), "gathered": Gathered(layout)}
        with torch.no_grad():
            torch.testing.assert_close(*(f(*whole[:3]) for f in attentions.values()), rtol=0.02, atol=0.02)
        # keys and values; scores twice
        kept = heads * layout.blocks * _BLOCK * 2 * (_SIZE + _BLOCK) * whole[0].itemsize
        runs = calls(name, "sparse", attentions["sparse"], [whole])
        runs |= calls(name, "gathered", attentions["gathered"], by_head if kept > _KEPT else [whole])
        (slow if name == _DENSEST else quick).update(runs)
    return quick, slow


def _cells(times: Times) -> list[list[str]]:
    rows = []
    for key, taken in times.items():
        length, dtype, layout, how, which = key.split(",")
        if how != "sparse":
            continue
        density = _LAYOUTS[layout](int(length)).density
        gathered = times[str(Name(int(length), dtype, layout, "gathered", which))]
        dense = statistics.median(times[str(Name(int(length), dtype, "", "dense", which))])
        faster, seconds = ratio(gathered, taken), statistics.median(taken)
        gain = dense / seconds
        cells = [length, dtype, layout, f"{density:.2%}", which, f"{seconds:.4f}", f"{statistics.median(gathered):.4f}"]
        cells += [f"{faster.median:.1f} ({faster.low:.1f} – {faster.high:.1f})"]
        cells += ["met" if faster.median >= _TARGET else "missed"]
        rows.append([*cells, f"{dense:.3f}", f"{gain:.1f}", f"{gain * density:.2f}"])
    return rows


def _on_a_gpu(lengths: tuple[int, ...], setting: Setting) -> Result:
    """Milliseconds, and operations per second, counted on the layout's blocks (for dense attention on all)."""
    rows, all_times, device, heads = [], Times(), setting.device, _HEADS[CUDA]
    ceiling = rates.product_rate(setting)
    for length in lengths:
        inputs = [torch.randn(1, heads, length, _SIZE, device=device).bfloat16().requires_grad_() for _ in range(3)]
        grad = torch.randn_like(inputs[0])
        for name in _ON_A_GPU:
            layout = _LAYOUTS[name](length).to(device)
            calls = _providers(layout, inputs, grad)
            times = setting.time({": ".join(key): call for key, call in calls.items()}, warm=rates.GPU_WARM)
            all_times |= {f"{name}, {length}, {key}": seconds for key, seconds in times.items()}
            taken = medians(times)
            share = triton.work(
                *inputs[:2], ComputedBlocks(layout.row_offsets, layout.columns), Options(_BLOCK, _SIZE**-0.5)
            )
            for provider, which in calls:
                median = taken[f"{provider}: {which}"]
                over = median / taken[f"{_OURS}: {which}"]
                density = 1.0 if provider == _FLASH else layout.density
                rate = _PASSES[which] * density * length**2 * heads * _SIZE / median
                cells = [name, length, f"{layout.density:.2%}", f"{share:.2%}", which, provider, f"{median * 1e3:.3f}"]
                cells += [f"{rate / 1e12:.1f}", f"{rate / ceiling:.1%}", f"{over:.2f}"]
                rows.append([*cells, verdict(provider, which, layout.density, over)])
    columns = ["layout", "tokens", "density", "computed by shardlib", "pass", "provider", "ms", "TFLOP/s"]
    columns += ["of a product's", "over shardlib", "target"]
    about = f"{heads} heads of size {_SIZE} in bf16, blocks of {_BLOCK}, {setting.rounds} rounds."
    return tables.listed("Sparse attention", about, columns, rows, all_times)


def verdict(provider: str, which: str, density: float, over: float) -> str:
    """Whether a peer's time over the library's reaches the target."""
    target = _TARGETS.get(provider)
    if target is None or which == _FORWARD or (provider == _FLASH and density >= 0.05):
        return ""
    return f"≥ {target:g}: {'met' if over >= target else 'missed'}"


def _providers(
    layout: Layout, inputs: list[torch.Tensor], grad: torch.Tensor
) -> dict[tuple[str, str], Callable[[int], Any]]:
    """Calls by provider and pass, after a check that shardlib and FlexAttention agree."""
    device, constants = inputs[0].device, [x.detach() for x in inputs]
    functions: dict[str, Attention] = {
        _OURS: lambda q, k, v: sl.nn.sparse_attention(q, k, v, layout, using=rates.implementations(device)[-1]),
        _FLASH: flash(device),
        _FLEX: flex(layout, inputs[0].shape[2], device),
    }
    torch.testing.assert_close(*(functions[name](*constants) for name in (_OURS, _FLEX)), rtol=0.02, atol=0.02)
    calls: dict[tuple[str, str], Callable[[int], Any]] = {}
    for name, attention in functions.items():
        calls[name, _FORWARD] = lambda _, attention=attention: attention(*constants)
        if inputs[0].is_cuda or name != _FLEX:  # which has no backward on a CPU
            calls[name, _BOTH] = lambda _, attention=attention: torch.autograd.grad(attention(*inputs), inputs, grad)
    return calls


def check(device: torch.device) -> Checks:
    """Checks of output and gradients against plain torch in float64, and of equal bits in two runs."""
    sizes = (16, 64, 80, 128, 256) if device.type == CUDA else (16, 64)
    cases = [*product(_TOLERANCES, sizes, ("plain", "causal, masked", "bias, dropout"))]

    return rates.in_processes(partial(_checked, device, rates.implementations(device)[-1]), cases, device)


def _checked(device: torch.device, using: str | None, case: tuple[torch.dtype, int, str]) -> tuple[str, str]:
    dtype, size, options = case
    error, repeats = _compare(device, using, dtype, size, options)
    detail = f"{error:.1e}{'' if repeats else ', other bits the second time'}"
    good = error <= _TOLERANCES[dtype] and repeats
    return f"sparse attention, {str(dtype)[6:]}, size {size}, {options}", rates.outcome(good, detail)


def _compare(
    device: torch.device, using: str | None, dtype: torch.dtype, size: int, options: str
) -> tuple[float, bool]:
    """The largest error over the largest number, and whether two runs agree bit by bit."""
    length = 1100  # not a multiple of the block, and rows and columns long enough to be split into items
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

    def run(values: list[torch.Tensor], implementation: str | None) -> list[torch.Tensor]:
        values = [value.detach().requires_grad_() for value in values]
        q, k, v, *bias = values
        out = sl.nn.sparse_attention(q, k, v, layout, bias=bias[0] if bias else None, using=implementation, **given)
        return [out.detach(), *torch.autograd.grad(out, values, grad.to(out.dtype))]

    wanted = run([value.double() for value in inputs], "reference")
    found, again = (run(inputs, using) for _ in range(2))
    error = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, wanted))
    return error, all(torch.equal(a, b) for a, b in zip(found, again))


CASE = Case(
    "sparse_attention",
    "five layouts on one core, two at up to 131,072 tokens on a GPU, against plain torch, flash and FlexAttention",
    {CPU: 20, CUDA: rates.GPU_ROUNDS},
    measure,
    check,
)
