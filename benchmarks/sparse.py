"""Sparse attention on one core, against gathered blocks in plain torch and against dense attention.

``python -m benchmarks.sparse`` writes ``results/sparse_cpu.md`` and ``.csv``; ``--lengths 512 --rounds 1`` tries it out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import shardlib as sl
from benchmarks.gathered import Gathered
from benchmarks.report import machine, results, write_rows
from benchmarks.timing import Times, interleave, ratio
from shardlib.kernels.common.dispatch import choose

_HEADS, _SIZE, _BLOCK = 2, 64, 16
_TARGET = 3.0  # times as fast as gathered blocks
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_PASSES = ("forward", "forward + backward")
_LAYOUTS: dict[str, Callable[[int], sl.sparse.Layout]] = {
    "Fixed": sl.sparse.fixed,
    "Variable": sl.sparse.variable,
    "BigBird": sl.sparse.bigbird,
    "BSLongformer": sl.sparse.longformer,
    "LocalSlidingWindow": partial(sl.sparse.sliding_window, causal=False),
}
_SHORT = 8192  # what takes seconds has one round only for longer sequences
_DENSEST = "Fixed"  # a quarter of the blocks, so it takes seconds
# Bytes that autograd may keep of gathered blocks; where it would be more, heads come one after another. (Fixed is a
# quarter of all blocks: of 32,768 tokens in fp32, 11 GB a head.)
_KEPT = 8 << 30

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Name(NamedTuple):
    """What was timed; ``layout`` is empty for dense attention."""

    length: int
    dtype: str
    layout: str
    how: str  # "sparse", "gathered" or "dense"
    which: str


def measure(lengths: list[int], rounds: int) -> Times:
    """Seconds per call, by the names joined by commas."""
    torch.set_num_threads(1)
    times: Times = {}
    for length in lengths:
        for dtype in _DTYPES:
            quick, slow = _calls(length, dtype)
            for call in quick.values():
                call(0)
            times |= interleave(quick, rounds, clock=time.process_time)
            times |= interleave(slow, min(rounds, 3) if length <= _SHORT else 1, clock=time.process_time)
            print(f"{length} {dtype}: measured", flush=True)
    return times


def _calls(length: int, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of sparse and gathered attention; and those that take long: of dense attention, and by the densest layout."""
    generator = torch.Generator().manual_seed(0)
    shape = 1, _HEADS, length, _SIZE
    whole = [torch.randn(shape, generator=generator).to(_DTYPES[dtype]) for _ in range(4)]  # q, k, v, gradient
    by_head = [[x[:, head : head + 1].contiguous() for x in whole] for head in range(_HEADS)]
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
        return {_key(Name(length, dtype, layout, how, which)): function for which, function in functions}

    quick: dict[str, Any] = {}
    slow = calls("", "dense", F.scaled_dot_product_attention, [whole])
    for name, make in _LAYOUTS.items():
        layout = make(length)
        attentions = {"sparse": partial(sl.nn.sparse_attention, layout=layout), "gathered": Gathered(layout)}
        with torch.no_grad():
            torch.testing.assert_close(*(f(*whole[:3]) for f in attentions.values()), rtol=0.02, atol=0.02)
        kept = (
            _HEADS * layout.blocks * _BLOCK * 2 * (_SIZE + _BLOCK) * whole[0].itemsize
        )  # keys and values; scores twice
        runs = calls(name, "sparse", attentions["sparse"], [whole])
        runs |= calls(name, "gathered", attentions["gathered"], by_head if kept > _KEPT else [whole])
        (slow if name == _DENSEST else quick).update(runs)
    return quick, slow


def _key(name: Name) -> str:
    return ",".join(map(str, name))


def table(times: Times, rounds: int) -> str:
    lines = [
        "# Sparse attention on one core",
        "",
        machine(),
        "",
        f"Batch 1, {_HEADS} heads of size {_SIZE}, blocks of {_BLOCK}, not causal, one thread; sparse: "
        f"{choose('sparse_attention', torch.device('cpu'))}. “Gathered”: the same blocks gathered in plain torch, with "
        f"autograd, a head at a time where all together would keep more than {_KEPT >> 30} GB. “Dense”: "
        "`F.scaled_dot_product_attention`. Seconds of processor time, the machine's load being "
        f"{os.getloadavg()[0]:.0f}; sparse and gathered take turns; medians of {rounds} rounds (of dense attention and of "
        f"{_DENSEST} 3, beyond {_SHORT} tokens 1), ratios with 95% intervals. "
        "The last column, speed-up over dense × density, is 1 where an "
        "operation of sparse attention takes as long as one of dense attention. Written by `python -m benchmarks.sparse`.",
        "",
        "| tokens | dtype | layout | density | | seconds | gathered | times as fast (target ≥ 3) | | dense | × dense "
        "| × dense × density |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, taken in times.items():
        length, dtype, layout, how, which = key.split(",")
        if how != "sparse":
            continue
        density = _LAYOUTS[layout](int(length)).density
        gathered = times[_key(Name(int(length), dtype, layout, "gathered", which))]
        dense = statistics.median(times[_key(Name(int(length), dtype, "", "dense", which))])
        faster = ratio(gathered, taken)
        seconds = statistics.median(taken)
        gain = dense / seconds
        cells = [length, dtype, layout, f"{density:.2%}", which, f"{seconds:.4f}", f"{statistics.median(gathered):.4f}"]
        cells += [f"{faster.median:.1f} ({faster.low:.1f} – {faster.high:.1f})"]
        cells += ["met" if faster.median >= _TARGET else "missed"]
        cells += [f"{dense:.3f}", f"{gain:.1f}", f"{gain * density:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="*", default=[8192, 16384, 32768])
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    times = measure(arguments.lengths, arguments.rounds)
    text = table(times, arguments.rounds)
    print(text)
    if arguments.lengths != parser.get_default("lengths"):
        return
    results("sparse_cpu.md").write_text(text)
    rows = ((*key.split(","), number, f"{t:.6f}") for key, taken in times.items() for number, t in enumerate(taken))
    write_rows(results("sparse_cpu.csv"), [*Name._fields, "round", "seconds"], rows)


if __name__ == "__main__":
    main()
