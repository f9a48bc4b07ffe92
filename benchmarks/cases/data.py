"""`sl.data.loader` against torch's `DataLoader`: rows per second, what a step waits for, and what resuming costs."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, WeightedRandomSampler

import shardlib as sl
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.timing import Times, interleave, one_thread, processor, ratio, wall
from shardlib.data.rows import RowsDataset

_BATCH = 64
_OURS, _THEIRS = "sl.data.loader", "DataLoader"
_WEIGHTS = (0.3, 0.7)


class _Source(NamedTuple):
    """A dataset as the two are given it.

    Attributes:
        batches: drawn in a round.
    """

    name: str
    ours: Any
    theirs: Any
    batches: int
    workers: int = 0
    sampler: Callable[[], Any] | None = None


def loading(setting: Setting) -> Result:
    """Batches in turns from both, of the same rows or as many."""
    with tempfile.TemporaryDirectory(prefix="shardlib-benchmark-") as folder, one_thread():
        times: Times = {}
        cells = []
        for source in _sources(Path(folder), setting.small):
            streams = {f"{_OURS}, {source.name}": _ours(source), f"{_THEIRS}, {source.name}": _theirs(source)}
            calls = {name: _draw(stream, source.batches) for name, stream in streams.items()}
            # Time in which others had the processor does not count, but where workers read it is theirs that counts.
            taken = interleave(calls, setting.rounds, warm=1, stopwatch=wall if source.workers else processor)
            times |= taken
            mine, theirs = taken.values()
            compared = ratio(mine, theirs)
            each = [np.median(seconds) / source.batches for seconds in (mine, theirs)]
            cells.append(
                [
                    source.name,
                    source.workers,
                    *(f"{_BATCH / seconds:,.0f}" for seconds in each),
                    *(f"{seconds * 1e6:,.0f}" for seconds in each),
                    f"{compared.median:.3f}",
                    f"{compared.low:.3f} – {compared.high:.3f}",
                ]
            )
            for stream in streams.values():
                stream.close()
    about = (
        f"Batches of {_BATCH} rows in a shuffled order, collated, one rank of one thread, {setting.rounds} rounds in which "
        "both take turns; processor time of the process, and with workers wall-clock time. torch's `DataLoader` has the same "
        "dataset and workers and its own sampler; for datasets of shardlib it reads sample by sample, for a mixture it draws "
        "sources with `WeightedRandomSampler`. The time per step is what a step waits for a batch, made when it is asked for."
    )
    columns = ["dataset", "workers", "rows/s", "of torch's", "µs per step", "of torch's", "ratio", "95% interval"]
    return tables.listed("Batches", about, columns, cells, times)


def _sources(folder: Path, small: bool) -> Iterator[_Source]:
    shrink = 100 if small else 1
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(100_000 // shrink, 128, generator=generator)
    listed, batches = list(rows), 500 // shrink
    yield _Source(f"a list of {len(rows):,} tensors of 128 floats", listed, listed, batches)
    yield _Source("the list, by workers", listed, listed, batches, workers=2)
    yield _Source("one tensor of them", rows, rows, batches)
    documents = list(_documents(2_000 if small else 20_000))  # enough rows for a batch
    file = folder / "corpus.tokens"
    sl.data.write_tokens(file, documents)
    windows = sl.data.tokens(file, sequence=1024)
    yield _Source("a token file, windows of 1,024", windows, windows, batches)
    packed = sl.data.packed(file, sequence=2048)
    yield _Source(f"{len(documents):,} documents packed into rows of 2,048", packed, packed, max(1, batches // 5))
    yield _Source("the packed rows, by workers", packed, packed, max(1, batches // 5), workers=2)
    halves = [rows[: len(rows) // 4], rows[len(rows) // 4 :]]
    weights = [w / len(half) for w, half in zip(_WEIGHTS, halves, strict=True) for _ in range(len(half))]
    yield _Source(
        "a mixture of two tensors, 3 : 7",
        sl.data.mixture(halves, weights=_WEIGHTS),
        ConcatDataset([list(half) for half in halves]),
        batches,
        sampler=lambda: WeightedRandomSampler(weights, len(rows), generator=torch.Generator().manual_seed(0)),
    )


def _documents(count: int) -> Iterator[np.ndarray]:
    """Documents of random bytes, whose lengths have a long tail."""
    dice = np.random.default_rng(0)
    for length in np.minimum(np.exp(dice.normal(5.5, 1.0, count)).astype(int) + 1, 8192):
        yield dice.integers(0, 256, length, dtype=np.uint8)


def _ours(source: _Source) -> Iterator[Any]:
    yield from sl.data.loader(source.ours, sl.make_mesh(), batch=_BATCH, workers=source.workers)


def _theirs(source: _Source) -> Iterator[Any]:
    sampler = source.sampler() if source.sampler else None
    loader = DataLoader(
        source.theirs,
        _BATCH,
        shuffle=sampler is None,
        sampler=sampler,
        drop_last=True,
        num_workers=source.workers,
        persistent_workers=source.workers > 0,
    )
    while True:
        yield from loader


def _draw(stream: Iterator[Any], batches: int) -> Callable[[int], None]:
    def call(_: int) -> None:
        for _ in itertools.islice(stream, batches):
            pass

    return call


class _Numbers(RowsDataset):
    """Samples that are their own indices."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def rows_at(self, indices: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(indices)


def beginning(setting: Setting) -> Result:
    """The first batch at any sample of a long stream, and the packing of documents."""
    samples, documents = 10**9, list(_documents(200 if setting.small else 20_000))
    stream = sl.data.loader(_Numbers(samples), sl.make_mesh(), batch=_BATCH)
    packed: list[Any] = []
    calls: dict[str, Callable[[int], Any]] = {
        f"the first batch at sample {name}": lambda _, at=at: next(iter(stream.seek(at)))
        for name, at in (("0", 0), ("10⁸", 10**8), ("10¹⁷", 10**17))
    }
    calls[f"packing {len(documents):,} documents"] = lambda _: packed.append(sl.data.packed(documents, sequence=2048))
    with one_thread():
        times = interleave(calls, setting.rounds, warm=1, stopwatch=processor)
    about = (
        f"Processor time, medians of {setting.rounds} rounds; the stream has {samples:,} samples per epoch. The packed rows "
        f"are filled to {packed[0].filled:.2%}."
    )
    cells = [(name, f"{np.median(seconds) * 1e3:.3g}") for name, seconds in times.items()]
    return tables.listed("Beginnings", about, ["", "ms"], cells, times)


def analysing(setting: Setting) -> Result:
    """The rarity of every window of a token file, against a plain loop in NumPy that writes nothing."""
    with tempfile.TemporaryDirectory(prefix="shardlib-benchmark-") as folder, one_thread():
        dice, tokens = np.random.default_rng(0), (40_000 if setting.small else 20_000_000)
        path = Path(folder) / "corpus.tokens"
        file = sl.data.write_tokens(path, [dice.zipf(1.3, tokens) % 50_000], vocabulary=50_000)
        windows = sl.data.tokens(path, sequence=1024)

        def plain(_: int) -> None:
            whole = np.asarray(file.tokens[: len(windows) * 1024])
            counts = np.bincount(whole, minlength=50_000)
            nats = np.log(counts.sum()) - np.log(np.maximum(counts, 1))
            values = np.array([nats[whole[start : start + 1024]].mean() for start in range(0, len(whole), 1024)])
            np.argsort(values, kind="stable")

        calls = {
            "sl.data.analyze": lambda _: sl.data.analyze(windows, "rarity", path.with_suffix(".rarity")),
            "a loop": plain,
        }
        times = interleave(calls, setting.rounds, warm=1, stopwatch=processor)
    compared = ratio(*times.values())
    about = (
        f"The rarity of {len(windows):,} windows of 1,024 tokens, one process of one thread, medians of {setting.rounds} "
        "rounds in which both take turns; processor time. The loop has all tokens in memory; both count and sort."
    )
    cells = [(name, f"{len(windows) / np.median(seconds):,.0f}") for name, seconds in times.items()]
    cells.append(("ratio of times", f"{compared.median:.3f} ({compared.low:.3f} – {compared.high:.3f})"))
    return tables.listed("Analysis", about, ["", "samples/s"], cells, times)


CASES = (
    Case("data_loading", "rows per second of sl.data.loader against torch's DataLoader", {CPU: 10}, loading),
    Case("data_analysis", "the rarity of every sample, by analyze and by a plain loop", {CPU: 10}, analysing),
    Case("data_beginning", "the first batch after resuming, and packing", {CPU: 10}, beginning),
)
