"""The largest GPT that a plan fits into a budget, with and without each transform. Nothing runs: all of it is planned."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import cache

import torch

import shardlib as sl
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.tables import grid
from shardlib.models import gpt
from shardlib.plan.limits import Limits
from shardlib.plan.plan import Plan
from shardlib.plan.tables import count
from shardlib.plan.transform import Transform

BUDGETS = ("16GiB", "24GiB", "40GiB", "80GiB")
HOST, DISK = "128GiB", "1TiB"
_BF16 = sl.precision("bf16", reduce_dtype="bf16")
_DOWN = {"params": "host", "gradients": "host"}
_FOLDER = {"folder": "states"}
_BATCH = 8  # rows for each rank
_LARGEST = 256  # of `Sizes`: 128 blocks of width 16,384, 412 billion parameters

# name -> ranks of one host, and transforms
ROWS: Mapping[str, tuple[int, tuple[Transform, ...]]] = {
    "fp32": (1, (sl.zero(0),)),
    "bf16": (1, (sl.zero(0), _BF16)),
    "bf16, `remat()`": (1, (sl.zero(0), _BF16, sl.remat())),
    "bf16, `remat(store='host')`": (1, (sl.zero(0), _BF16, sl.remat(store="host"))),
    **{f"bf16, `remat()`, `zero({stage})` on 8 ranks": (8, (sl.zero(stage), _BF16, sl.remat())) for stage in (1, 2, 3)},
    "bf16, `offload()`": (1, (sl.zero(0), _BF16, sl.offload())),
    "bf16, `remat()`, `offload()`": (1, (sl.zero(0), _BF16, sl.remat(), sl.offload())),
    "the same, parameters and gradients too": (1, (sl.zero(0), _BF16, sl.remat(), sl.offload(**_DOWN))),
    "the same, states on disk": (1, (sl.zero(0), _BF16, sl.remat(), sl.offload("disk", **_DOWN, **_FOLDER))),
    "the same, `zero(3)` on 8 ranks": (8, (sl.zero(3), _BF16, sl.remat(), sl.offload("disk", **_DOWN, **_FOLDER))),
}


def measure(setting: Setting) -> Result:
    budgets = ("8MiB", "16MiB") if setting.small else BUDGETS
    host, disk = ("64MiB", "256MiB") if setting.small else (HOST, DISK)
    sequence, vocab = (64, 256) if setting.small else (2048, 50304)
    samples, rows = [], []
    for name, (ranks, transforms) in ROWS.items():
        size = Sizes(sl.chain(*transforms), ranks, sequence, vocab, 16 if setting.small else 64)
        found = [size.largest(Limits.given(budget, host, disk, ranks, 0)) for budget in budgets]
        samples += [
            (name, ranks, budget, n // 2, size.width * n, size.parameters(n), limit)
            for budget, (n, limit) in zip(budgets, found, strict=True)
        ]
        rows.append((name, ranks, *(f"{count(size.parameters(n))}, {limit}" if n else "none" for n, limit in found)))
        print(" | ".join(map(str, rows[-1])), flush=True)
    about = (
        "Parameters of the largest GPT whose plan fits, and the memory that a larger one does not fit. A GPT has n blocks of "
        f"width {2 * size.width}·n, so that both grow; {_BATCH} rows of {sequence} tokens for each rank; AdamW. The ranks "
        f"share one host, with {host} of memory and {disk} of disk. What an allocator loses to fragments, and workspace of "
        "operations, are not counted."
    )
    text = "\n".join([about, "", *grid(["", "ranks", *budgets], rows), ""])
    return Result(text, ("transforms", "ranks", "device", "blocks", "width", "parameters", "limited by"), samples)


class Sizes:
    """GPTs of n // 2 blocks of width ``width``·n on one plan, by n.

    Args:
        ranks: of one host.
    """

    def __init__(self, transform: Transform, ranks: int, sequence: int, vocab: int, width: int) -> None:
        self.width = width
        self._transform, self._mesh = transform, sl.abstract_mesh(data=ranks)
        self._sequence, self._vocab = sequence, vocab
        self._plan: Callable[[int, bool], Plan] = cache(self._planned)

    def parameters(self, n: int) -> int:
        return self._plan(n, False).parameters if n else 0

    def largest(self, limits: Limits | None) -> tuple[int, str]:
        """The largest size that fits, from 2 on, and the memory that the next one does not fit; 0 if none fits."""
        assert limits is not None
        fits = lambda n, traced: not limits.excess(self._plan(n, traced))  # noqa: E731
        # What is held without a trace is a bound, for a fraction of the time.
        bound = bisect_left(range(_LARGEST + 1), True, lo=2, key=lambda n: not fits(n, False))
        first = bisect_left(range(bound), True, lo=2, key=lambda n: not fits(n, True))
        beyond = [use.peak.memory for use in limits.uses(self._plan(first, True)) if not use.fits]
        return (first - 1 if first > 2 else 0), " and ".join(beyond)

    def _planned(self, n: int, traced: bool) -> Plan:
        config = gpt.GPTConfig(vocab=self._vocab, layers=n // 2, width=self.width * n, heads=n, sequence=self._sequence)
        tokens = torch.empty(_BATCH, self._sequence, dtype=torch.int64, device="meta")
        job = {"loss_fn": gpt.make_loss(config), "batch": {"tokens": tokens, "targets": tokens}} if traced else {}
        params = gpt.init(config, device="meta")
        return sl.make_plan(params, self._mesh, self._transform, optimizer=sl.optim.adamw(1e-3), **job)


CASE = Case("planned_gpt", "the largest GPT whose plan fits budgets, by transform", {CPU: 1}, measure)
