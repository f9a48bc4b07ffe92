"""The process of one rank on this host, as `launch` and `shardlib run` start and kill it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from shardlib.mesh.launch import supervised


def threads(ranks: int) -> str:
    """The threads of each of ``ranks`` processes: OMP_NUM_THREADS where it is set, else their share of the cores."""
    return os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))


def start(
    command: Sequence[str], rank: int, ranks: int, port: int, more: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Start a rank's process as torchrun would, in a session of its own: Ctrl-C reaches only the process that started it.

    Args:
        port: where this process hosts the store by which the ranks find each other.
        more: further variables of the environment.
        options: of `subprocess.Popen`.
    """
    # What a supervisor tells this process is not for the ranks that this process starts.
    inherited = {name: value for name, value in os.environ.items() if name not in supervised.VARIABLES}
    environment = inherited | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's name for a store that no rank hosts
        "OMP_NUM_THREADS": threads(ranks),
        "PYTHONUNBUFFERED": "1",
        **more,
    }
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, **options)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a rank that still runs, and the processes that it started; returns when the rank is gone."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
