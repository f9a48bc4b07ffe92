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
from shardlib.plan.plan import Plan
from shardlib.plan.tables import count
from shardlib.plan.tiers.limits import Limits
from shardlib.plan.transform import Transform

BUDGETS = ("16GiB", "24GiB", "40GiB", "80GiB")
HOST, DISK = "128GiB", "1TiB"
_BF16 = sl.precision("bf16", reduce_dtype="bf16")
_DOWN = {"params": "host", "gradients": "host"}
_FOLDER = {"folder": "states"}
_BATCH = 8  # rows for each rank
_LARGEST = 128  # width 16,384 with 128 blocks: 412 billion parameters

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
        size = Sizes(sl.chain(*transforms), ranks, sequence, vocab, 32 if setting.small else 128)
        found = [size.largest(Limits.given(budget, host, disk, ranks, 0)) for budget in budgets]
        samples += [
            (name, ranks, budget, blocks, size.parameters(blocks), limit)
            for budget, (blocks, limit) in zip(budgets, found, strict=True)
        ]
        cells = [f"{count(size.parameters(blocks))}, {limit}" if blocks else "none" for blocks, limit in found]
        rows.append((name, ranks, *cells))
        print(" | ".join(map(str, rows[-1])), flush=True)
    about = (
        f"Parameters of the largest GPT whose plan fits, and the memory that a larger one does not fit. k blocks of width "
        f"{size.width}·k, so that both grow; {_BATCH} rows of {sequence} tokens for each rank; AdamW. The ranks share one host, "
        f"with {host} of memory and {disk} of disk. What an allocator loses to fragments, and workspace, are not counted."
    )
    text = "\n".join([about, "", *grid(["", "ranks", *budgets], rows), ""])
    return Result(text, ("transforms", "ranks", "device", "blocks", "parameters", "limited by"), samples)


class Sizes:
    """GPTs of k blocks of width ``width``·k on one plan.

    Args:
        ranks: of one host.
    """

    def __init__(self, transform: Transform, ranks: int, sequence: int, vocab: int, width: int) -> None:
        self.width = width
        self._transform, self._mesh = transform, sl.abstract_mesh(data=ranks)
        self._sequence, self._vocab = sequence, vocab
        self._plan: Callable[[int, bool], Plan] = cache(self._planned)

    def parameters(self, blocks: int) -> int:
        return self._plan(blocks, False).parameters if blocks else 0

    def largest(self, limits: Limits | None) -> tuple[int, str]:
        """The most blocks that fit, and the memory that one block more does not fit."""
        assert limits is not None
        fits = lambda blocks, traced: not limits.excess(self._plan(blocks, traced))  # noqa: E731
        # What is held without a trace is a bound, for a fraction of the time.
        bound = bisect_left(range(1, _LARGEST + 1), True, key=lambda blocks: not fits(blocks, False))
        low = bisect_left(range(1, bound + 1), True, key=lambda blocks: not fits(blocks, True))
        beyond = [use.tier.memory for use in limits.uses(self._plan(low + 1, True)) if not use.fits]
        return low, " and ".join(beyond)

    def _planned(self, blocks: int, traced: bool) -> Plan:
        config = gpt.GPTConfig(
            vocab=self._vocab, layers=blocks, width=self.width * blocks, heads=blocks, sequence=self._sequence
        )
        tokens = torch.empty(_BATCH, self._sequence, dtype=torch.int64, device="meta")
        job = {"loss_fn": gpt.make_loss(config), "batch": {"tokens": tokens, "targets": tokens}} if traced else {}
        params = gpt.init(config, device="meta")
        return sl.make_plan(params, self._mesh, self._transform, optimizer=sl.optim.adamw(1e-3), **job)


CASE = Case("planned_gpt", "the largest GPT whose plan fits budgets, by transform", {CPU: 1}, measure)
