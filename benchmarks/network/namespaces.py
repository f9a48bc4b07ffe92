"""Hosts in network namespaces, joined by links of adjustable speed. Needs root and iproute2.

Two hosts are joined by a veth pair, more hosts by a bridge in its own namespace: nothing is created outside of namespaces.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PREFIX = "shardlib-"  # of namespaces; the id of the process that made them follows
_WIRE = "wire"  # a host's interface


class NoNetwork(Exception):
    """Network namespaces cannot be made here."""


@dataclass(frozen=True)
class Network:
    """Hosts 0 to ``hosts`` − 1; objects with equal fields stand for the same network."""

    name: str
    hosts: int

    def address(self, host: int) -> str:
        return f"192.168.211.{host + 1}"

    def limit(self, rate: str | None, burst: str = "256kb") -> None:
        """Limits both directions of every link to ``rate``, in tc's notation ("100mbit"); None lifts the limit.

        Args:
            burst: bytes that pass at once after a pause, however slow the link. Messages of less see no limit.
        """
        shape = ("tbf", "rate", rate, "burst", burst, "latency", "50ms") if rate else ("noqueue",)
        for space, device in self._ends():
            _run("tc", "-n", space, "qdisc", "replace", "dev", device, "root", *shape)

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Starts ``command`` on a host, with the host's interface set for gloo; it is killed when the network is removed.

        Options are those of Popen; ``env`` is added to the environment.
        """
        variables = os.environ | {"GLOO_SOCKET_IFNAME": _WIRE, "OMP_NUM_THREADS": "1"} | options.pop("env", {})
        return subprocess.Popen(
            ["ip", "netns", "exec", self._space(host), *command], env=variables, text=True, **options
        )

    def run(self, module: str, *arguments: str, timeout: float) -> str:
        """``python -m module arguments`` on every host, as ranks of one world; returns what rank 0 printed.

        Raises:
            RuntimeError: a rank failed (its traceback is on stderr), or ``timeout`` seconds went by.
        """
        world = {"WORLD_SIZE": str(self.hosts), "MASTER_ADDR": self.address(0), "MASTER_PORT": "29511"}
        command = [sys.executable, "-m", module, *arguments]
        with tempfile.TemporaryFile("w+") as out:
            streams = [out, *[subprocess.DEVNULL] * (self.hosts - 1)]
            ranks = [
                self.start(rank, command, env=world | {"RANK": str(rank)}, stdout=stream)
                for rank, stream in enumerate(streams)
            ]
            deadline = time.monotonic() + timeout
            while (codes := [rank.poll() for rank in ranks]) != [0] * self.hosts:
                failed = [rank for rank, code in enumerate(codes) if code]
                if failed:
                    raise RuntimeError(f"{module}: rank {failed[0]} exited with code {codes[failed[0]]}")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{module}: rank {codes.index(None)} still ran after {timeout:g} s")
                time.sleep(0.1)
            out.seek(0)
            return out.read()

    def build(self) -> None:
        """Make the namespaces and links; `network` does, and removes them."""
        for space in self._spaces():
            _run("ip", "netns", "add", space)
        ends = self._ends()
        if self.hosts == 2:
            _run(
                "ip", "-n", ends[0][0], "link", "add", _WIRE, "type", "veth", "peer", "name", _WIRE, "netns", ends[1][0]
            )
        else:
            _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for host in range(self.hosts):
            space, port = self._space(host), f"port{host}"
            if self.hosts > 2:
                peer = ("peer", "name", _WIRE, "netns", space)
                _run("ip", "-n", self._switch, "link", "add", port, "type", "veth", *peer)
                _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", space, "addr", "add", f"{self.address(host)}/24", "dev", _WIRE)
            _run("ip", "-n", space, "link", "set", _WIRE, "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")

    def kill(self, host: int) -> None:
        """A host dies: it is cut off without a word, and all that runs on it is killed."""
        _run("ip", "-n", self._space(host), "link", "set", _WIRE, "down")
        _kill(self._space(host))

    def _spaces(self) -> list[str]:
        hosts = [self._space(host) for host in range(self.hosts)]
        return hosts if self.hosts == 2 else [*hosts, self._switch]

    def _space(self, host: int) -> str:
        return f"{self.name}-{host}"

    @property
    def _switch(self) -> str:
        return f"{self.name}-switch"

    def _ends(self) -> list[tuple[str, str]]:
        """The two ends of every link; a limit applies to the packets that leave an end."""
        hosts = [(self._space(host), _WIRE) for host in range(self.hosts)]
        return hosts if self.hosts == 2 else hosts + [(self._switch, f"port{host}") for host in range(self.hosts)]


@contextmanager
def network(hosts: int) -> Iterator[Network]:
    """A context with a network of at least two hosts; it is removed afterwards with all that runs on it, even on errors.

    Networks that killed processes have left behind are removed first.

    Raises:
        NoNetwork: this needs root and iproute2.
    """
    made = Network(f"{_PREFIX}{os.getpid()}", hosts)
    try:
        try:
            _remove(lambda owner: owner == os.getpid() or not Path(f"/proc/{owner}").exists())
            made.build()
        except (OSError, subprocess.CalledProcessError) as error:
            raise NoNetwork(f"no network namespaces here, which needs root and iproute2: {_why(error)}") from error
        yield made
    finally:
        if shutil.which("ip"):
            _remove(lambda owner: owner == os.getpid())


def _remove(accepts: Callable[[int], bool]) -> None:
    """Removes the namespaces for whose maker's process id ``accepts`` is true, and kills what runs in them."""
    for line in _run("ip", "netns", "list").splitlines():
        space = line.split()[0] if line.strip() else ""
        owner = space.removeprefix(_PREFIX).split("-")[0]
        if not space.startswith(_PREFIX) or not owner.isdigit() or not accepts(int(owner)):
            continue
        _kill(space)
        _run("ip", "netns", "delete", space)


def _kill(space: str) -> None:
    """Kills what runs in a namespace."""
    for process in _run("ip", "netns", "pids", space).split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _why(error: Exception) -> str:
    return error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
