"""The soak: kills ranks at random times, then compares with the same training uninterrupted."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from benchmarks.soak.report import Soak
from benchmarks.soak.training import EVERY
from benchmarks.soak.watch import Watched, losses

_MEAN = 60.0  # seconds between kills
_SAMPLE = 1.0  # seconds between samples of memory


def soak(seconds: float, seed: int) -> Soak:
    """Train for ``seconds`` while ranks are killed, finish, and train as many steps without kills."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="shardlib-soak-") as root:
        folder, alone = Path(root) / "run", Path(root) / "alone"
        folder.mkdir()
        run = Watched(folder, steps=1 << 60)
        kills = _kill_ranks(run, seconds, draw)
        run.process.terminate()
        code = run.wait()
        if code != 143:
            raise RuntimeError(f"the run ended with code {code}, not with SIGTERM's 143: {run.lines[-1:]}")
        steps = max(step for step, _ in losses(folder)) + EVERY
        _finish(folder, steps)
        alone.mkdir()
        _finish(alone, steps)
        supervisor = run.memory.pop(run.process.pid)
        shas = (folder / "sha256").read_text(), (alone / "sha256").read_text()
        return Soak(
            seconds, kills, run.lines, losses(folder), losses(alone), shas, list(run.memory.values()), supervisor
        )


def write(found: Soak, source: Mapping[str, str], page: Path) -> None:
    """Write the table with its provenance."""
    lines = [
        "# A soak: kills, restarts and changes of ranks",
        "",
        *(f"- {what}: {value}" for what, value in source.items()),
    ]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join([*lines, "", _ABOUT, "", found.table()]))


_ABOUT = (
    "A byte-level GPT under `shardlib run --ranks 1:4`, with `sl.reproducible(12)` and a checkpoint every "
    f"{EVERY} steps. At random times, every {_MEAN:.0f} s on average, one rank is killed (SIGKILL), two, or all. Those that "
    "are left go on, and missing ones come back at the next checkpoint. SIGTERM ends it; two ranks then finish it, and two "
    "do the whole training uninterrupted."
)


def _finish(folder: Path, steps: int) -> None:
    if code := Watched(folder, steps, ranks="2").wait():
        raise RuntimeError(f"the run in {folder} ended with code {code}")


def _kill_ranks(run: Watched, seconds: float, draw: random.Random) -> list[tuple[str, int]]:
    kills: list[tuple[str, int]] = []
    end = time.monotonic() + seconds
    following = time.monotonic() + draw.expovariate(1 / _MEAN)
    while (now := time.monotonic()) < end and run.process.poll() is None:
        run.sample()
        if now > following and (ranks := run.ranks):
            chosen = draw.sample(ranks, min(len(ranks), draw.choices([1, 2, 4], [0.75, 0.2, 0.05])[0]))
            kills.append((run.doing, len(chosen)))
            for pid in chosen:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            following = now + draw.expovariate(1 / _MEAN)
        time.sleep(min(_SAMPLE, max(0.0, following - now)))
    return kills
