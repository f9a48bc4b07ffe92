"""Whether a process of this host lives, for reports about ranks that do not answer."""

from __future__ import annotations

import os
from pathlib import Path

_NOTHING = "it gives no sign of life"


def identity() -> str:
    """This process's host, process id and start, by which other processes of the host find it; "" where that is not
    known."""
    try:
        started = _fields(os.getpid())[19]
        return " ".join((_host(), str(os.getpid()), started))
    except OSError:
        return ""


def look(identity: str) -> tuple[bool, str]:
    """Whether it is certain that a process will not answer, and what is known of it.

    Args:
        identity: the process's `identity`; of another host's process nothing is known.
    """
    host, pid, started = identity.split() if identity else ("", "", "")
    if not host or host != _host():
        return False, _NOTHING
    try:
        state, *_ = fields = _fields(int(pid))
    except OSError:
        return True, f"its process ({pid}) has ended"
    if state in "ZX" or fields[19] != started:
        return True, f"its process ({pid}) has ended"
    if state in "Tt":
        return True, f"its process ({pid}) was stopped by a signal (SIGSTOP) and not continued"
    return False, f"{_NOTHING}, though its process ({pid}) runs"


def _fields(pid: int) -> list[str]:
    """The fields of a process from the third, its state, on: see proc_pid_stat(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _host() -> str:
    """The kernel's boot and the space of process ids, within which a process id names a process."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
