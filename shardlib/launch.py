"""Run a function on many ranks: real processes (`launch`) or all of them in this process (`simulate`)."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextvars import copy_context
from pathlib import Path
from typing import Any

import cloudpickle
import torch.distributed as dist

from shardlib.errors import RankFailure
from shardlib.groups import Simulation
from shardlib.mesh import check_shape, current_mesh, make_mesh, simulated_mesh

_CHILD = "import sys; from shardlib.launch import child; child(sys.argv[1])"


def simulate(fn: Callable[..., Any], *args: Any, mesh: Mapping[str, int]) -> list[Any]:
    """Run ``fn(mesh, *args)`` on every rank of ``mesh`` in this process; returns the ranks' values.

    Ranks are threads that run one at a time and switch only where a collective waits, so a run is
    deterministic; each draws from torch's generator as if it had one of its own. CPU only. A failure on one rank
    stops all and is raised here, naming the rank; ranks that call different collectives, or wait for each other for
    ever, are reported at once. ``args`` are shared by the ranks: make models inside ``fn``.

    Ctrl-C (a notebook's stop button) ends the ranks at their next collective, or two seconds later wherever they are,
    and then raises KeyboardInterrupt. A rank inside one long operation ends after it; a note on the error names it.
    """
    shape = check_shape(mesh)
    ranks = math.prod(shape.values())
    simulation = Simulation(ranks)
    exchanges: dict[Any, Any] = {}

    def body(rank: int) -> Callable[[], Any]:
        view = simulated_mesh(shape, rank, simulation, exchanges)

        def run() -> Any:
            current_mesh.set(view)
            return fn(view, *args)

        context = copy_context()
        return lambda: context.run(run)

    return simulation.run([body(rank) for rank in range(ranks)])


def launch(fn: Callable[..., Any], *args: Any, mesh: Mapping[str, int], timeout: float = 600.0) -> list[Any]:
    """Run ``fn(mesh, *args)`` in one real process per rank; returns the ranks' values in rank order.

    Functions defined in a notebook work (cloudpickle). Each process computes with its share of the cores
    unless OMP_NUM_THREADS says otherwise.

    Args:
        mesh: axis name -> size.
        timeout: seconds for the whole run, and for each collective.

    Raises:
        RankFailure: a rank raised, died or ran out of time; names it, with its traceback or the end of its
            output. The other ranks are stopped.
    """
    shape = check_shape(mesh)
    ranks = math.prod(shape.values())
    with tempfile.TemporaryDirectory(prefix="shardlib-") as folder:
        job = Path(folder)
        (job / "paths").write_text("\n".join(sys.path))  # what the function's module needs before it unpickles
        (job / "job.pkl").write_bytes(cloudpickle.dumps((fn, args, shape, timeout)))
        port = _free_port()
        processes = []
        for rank in range(ranks):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks))),
            }
            with (job / f"{rank}.log").open("wb") as log:
                command = [sys.executable, "-c", _CHILD, folder]
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        try:
            _watch(processes, job, timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [cloudpickle.loads((job / f"{rank}.out").read_bytes()) for rank in range(ranks)]


def _watch(processes: list[subprocess.Popen[bytes]], job: Path, timeout: float) -> None:
    """Return when every rank ended well; raise for the first one that did not."""
    deadline = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            raise RankFailure(_report(processes, job))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            raise RankFailure(
                f"rank {', '.join(map(str, running))} of {len(processes)} still ran after {timeout:g} s and was "
                f"stopped; raise timeout= or look at the output:\n{_tail(job, running[0])}"
            )
        time.sleep(0.02)


def _report(processes: list[subprocess.Popen[bytes]], job: Path) -> str:
    """What happened, once the other ranks had a moment to fail in their turn: the first cause comes first."""
    time.sleep(0.2)
    parts = []
    for rank, process in enumerate(processes):
        code = process.poll()
        if code in (None, 0):
            continue
        error = job / f"{rank}.error"
        if error.exists():
            parts.append((error.stat().st_mtime, f"rank {rank} raised:\n{error.read_text()}"))
        else:
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            parts.append((0.0, f"rank {rank} {how}. Its last output:\n{_tail(job, rank)}"))
    parts.sort()
    return f"{parts[0][1]}\n({len(processes)} ranks; the others were stopped)"


def _tail(job: Path, rank: int, lines: int = 15) -> str:
    text = (job / f"{rank}.log").read_text(errors="replace").splitlines()
    return "\n".join(text[-lines:]) or "(no output)"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def child(folder: str) -> None:
    """One rank of `launch`: run the pickled job and leave its value, or its traceback, in the folder."""
    job, rank = Path(folder), os.environ["RANK"]
    try:
        sys.path[:] = [*dict.fromkeys([*(job / "paths").read_text().split("\n"), *sys.path])]
        fn, args, shape, timeout = cloudpickle.loads((job / "job.pkl").read_bytes())
        mesh = make_mesh(timeout=timeout, **shape)
        current_mesh.set(mesh)
        value = fn(mesh, *args)
        (job / f"{rank}.out").write_bytes(cloudpickle.dumps(value))
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        (job / f"{rank}.error").write_text(traceback.format_exc())
        # Skip torch's tear-down: it may wait for peers that will never answer.
        os._exit(1)
