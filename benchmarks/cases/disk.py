"""Buffers on disk against raw direct I/O on the same files."""

from __future__ import annotations

import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.timing import interleave, one_thread
from shardlib.common.devices import pages
from shardlib.mesh.memories import AHEAD
from shardlib.sharded.disk import Flat, Store, pool
from shardlib.sharded.disk.store import DEPTH

_TARGET = 1 / 0.8  # of raw direct I/O's time


class _Raw:
    """Requests of the same size and number at once on a store's own files, into memory that is always the same.

    What it writes goes to the slots that the store writes next.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._threads = store, ThreadPoolExecutor(DEPTH)
        layout = store._layout
        self._memory = {name: pages(flat.padded, pinned=False) for name, flat in layout.buffers.items()}

    def move(self, *, read: bool, write: bool) -> None:
        """Read all buffers, write all, or each of them one after the other."""
        layout = self._store._layout
        pending = []
        for name, extents in layout.extents.items():
            slot = self._store._committed.slots[name]
            for call, wanted, at in ((pool.read, read, slot), (pool.write, write, 1 - slot)):
                for extent in extents if wanted else ():
                    fd, offset, path = self._store._place(at, extent)
                    view = memoryview(self._memory[name].numpy())[extent.start :][: extent.length]
                    pending.append(self._threads.submit(call, fd, view, offset, name, path))
        for one in pending:
            one.result()
        if write:
            self._store._files.sync(0)

    def close(self) -> None:
        self._threads.shutdown()


def passes(setting: Setting) -> Result:
    """Whole passes over the buffers: reads, writes with their commit, and both."""
    count, elements = (3, 5000) if setting.small else (32, 4 << 20)
    buffers = {f"exp_avg/{number}": Flat(elements, torch.float32) for number in range(count)}
    size = sum(flat.bytes for flat in buffers.values())
    with tempfile.TemporaryDirectory(prefix="shardlib-benchmark-") as folder, one_thread():
        memory = (AHEAD + 3) * max(flat.padded for flat in buffers.values())
        with Store([Path(folder)], buffers, memory) as store:
            groups = [[name] for name in buffers]
            values = torch.randn(elements)

            def read() -> None:
                for group in store.fetched(groups):
                    store.release(*group.values())

            def write() -> None:
                for name in buffers:
                    store.write(name, values)
                store.commit((store.step or 0) + 1)

            def update() -> None:
                for group in store.fetched(groups):
                    for name, tensor in group.items():
                        store.write(name, tensor)
                store.commit((store.step or 0) + 1)

            for _ in range(2):  # both slots: a first write to reserved space is slower
                write()
            raw = _Raw(store)
            kinds = {"reading": (read, True, False), "writing": (write, False, True), "updating": (update, True, True)}
            calls = {}
            for name, (ours, reads, writes) in kinds.items():
                calls[name] = lambda _, ours=ours: ours()
                calls[_raw(name)] = lambda _, reads=reads, writes=writes: raw.move(read=reads, write=writes)
            times = interleave(calls, setting.rounds, warm=1)
            raw.close()
    speed = {name: size / statistics.median(seconds) / 1e6 for name, seconds in times.items()}
    rows = [tables.row(times, name, _raw(name), _TARGET) for name in kinds]
    speeds = ", ".join(
        f"{row.name} {speed[row.name]:,.0f} ({speed[row.reference]:,.0f}, of which {1 / row.ratio.median:.0%})"
        for row in rows
        if row.ratio
    )
    about = (
        f"Passes over {count} buffers of {4 * elements / 1e6:,.0f} MB in one file, {DEPTH} requests at once, "
        f"{setting.rounds} rounds in which all take turns. Writing and updating end with the data on the disk, a commit's "
        "record included; every read is compared with its checksum. Raw I/O is of the same requests to the same file. MB of "
        f"buffers a second, raw in brackets: {speeds}."
    )
    return tables.compared("Buffers on one disk", about, rows, times)


def _raw(name: str) -> str:
    """The name of the raw call that another is compared with."""
    return f"{name}, raw"


CASE = Case("disk", "passes over buffers on disk, against raw direct I/O on the same files", {CPU: 15}, passes)
