"""Sparse attention on one core, against gathered blocks in plain torch and against dense attention.

``python -m benchmarks.sparse`` writes ``results/sparse_cpu.md`` and ``.csv``; ``--lengths 512 --rounds 1`` tries it out.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import shardlib as sl
from benchmarks.gathered import Gathered
from benchmarks.report import machine
from benchmarks.timing import Times, interleave, ratio
from shardlib.kernels.dispatch import choose

_HEADS, _SIZE, _BLOCK = 2, 64, 16
_TARGET = 3.0  # times as fast as gathered blocks
_RESULTS = Path(__file__).parent / "results"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_PASSES = ("forward", "forward + backward")
_LAYOUTS: dict[str, Callable[[int], sl.sparse.Layout]] = {
    "Fixed": sl.sparse.fixed,
    "Variable": sl.sparse.variable,
    "BigBird": sl.sparse.bigbird,
    "BSLongformer": sl.sparse.longformer,
    "LocalSlidingWindow": partial(sl.sparse.sliding_window, causal=False),
}
# Up to here, everything. Of longer sequences not Fixed, a quarter of all blocks, as autograd keeps what was gathered; no
# dense backward, which takes minutes; and fewer rounds.
_SHORT = 8192

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
            sparse, dense = _calls(length, dtype)
            for call in sparse.values():
                call(0)
            times |= interleave(sparse, rounds if length <= _SHORT else max(1, rounds - 2), clock=time.process_time)
            times |= interleave(dense, 2 if length <= _SHORT else 1, clock=time.process_time)
            print(f"{length} {dtype}: measured", flush=True)
    return times


def _calls(length: int, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of sparse and gathered attention, and of dense."""
    generator = torch.Generator().manual_seed(0)
    shape = 1, _HEADS, length, _SIZE
    q, k, v, grad = (torch.randn(shape, generator=generator).to(_DTYPES[dtype]) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def calls(layout: str, how: str, attention: Attention, passes: tuple[str, ...]) -> dict[str, Any]:
        def forward(_: int) -> None:
            with torch.no_grad():
                attention(*inputs)

        def both(_: int) -> None:
            torch.autograd.grad(attention(*inputs), inputs, grad)

        runs = dict(zip(_PASSES, (forward, both)))
        return {_key(Name(length, dtype, layout, how, which)): runs[which] for which in passes}

    sparse: dict[str, Any] = {}
    for name, make in _LAYOUTS.items():
        if name == "Fixed" and length > _SHORT:
            continue
        layout = make(length)
        attentions = {"sparse": partial(sl.sparse_attention, layout=layout), "gathered": Gathered(layout)}
        torch.testing.assert_close(*(f(q, k, v) for f in attentions.values()), rtol=0.02, atol=0.02)
        for how, attention in attentions.items():
            sparse |= calls(name, how, attention, _PASSES)
    passes = _PASSES if length <= _SHORT else _PASSES[:1]
    return sparse, calls("", "dense", F.scaled_dot_product_attention, passes)


def _key(name: Name) -> str:
    return ",".join(map(str, name))


def table(times: Times) -> str:
    lines = [
        "# Sparse attention on one core",
        "",
        machine(),
        "",
        f"Batch 1, {_HEADS} heads of size {_SIZE}, blocks of {_BLOCK}, not causal, one thread; sparse: "
        f"{choose('sparse_attention', torch.device('cpu'))}. “Gathered”: the same blocks gathered in plain torch, with "
        "autograd. “Dense”: `F.scaled_dot_product_attention`. Seconds of processor time, the machine's load being "
        f"{os.getloadavg()[0]:.0f}; sparse and gathered take turns; medians of rounds, "
        "ratios with 95% intervals. The last column, speed-up over dense × density, is 1 where an "
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
        dense = times.get(_key(Name(int(length), dtype, "", "dense", which)))
        faster = ratio(gathered, taken)
        seconds = statistics.median(taken)
        cells = [length, dtype, layout, f"{density:.2%}", which, f"{seconds:.4f}", f"{statistics.median(gathered):.4f}"]
        cells += [f"{faster.median:.1f} ({faster.low:.1f} – {faster.high:.1f})"]
        cells += ["met" if faster.median >= _TARGET else "missed"]
        if dense is None:
            cells += ["not measured", "", ""]
        else:
            gain = statistics.median(dense) / seconds
            cells += [f"{statistics.median(dense):.3f}", f"{gain:.1f}", f"{gain * density:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="*", default=[8192, 32768])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    times = measure(arguments.lengths, arguments.rounds)
    text = table(times)
    print(text)
    if arguments.lengths != parser.get_default("lengths"):
        return
    (_RESULTS / "sparse_cpu.md").write_text(text)
    with (_RESULTS / "sparse_cpu.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([*Name._fields, "round", "seconds"])
        for key, taken in times.items():
            rows.writerows([*key.split(","), number, f"{t:.6f}"] for number, t in enumerate(taken))


if __name__ == "__main__":
    main()
