"""A process in which torch and pytest are imported once, and which forks a child for each run of pytest.

A program of its own: it must not import the package, of which each child imports its own copy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

EXPIRED = -1000  # in place of a status, of a run that did not end in time; no signal has this number
_POLL = 0.02  # seconds


class Forking:
    """The process, as long as it is needed.

    Args:
        env: its environment, to which each run adds.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self._server = subprocess.Popen([sys.executable, __file__], env=dict(env), stdin=pipe, stdout=pipe, text=True)

    def run(self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str], timeout: float) -> tuple[int, str]:
        """The status of pytest with these arguments, or `EXPIRED`, and its output."""
        assert self._server.stdin is not None and self._server.stdout is not None
        with tempfile.NamedTemporaryFile() as output:
            ask = {
                "arguments": list(arguments),
                "cwd": str(cwd),
                "env": dict(env),
                "timeout": timeout,
                "to": output.name,
            }
            self._server.stdin.write(json.dumps(ask) + "\n")
            self._server.stdin.flush()
            status = int(self._server.stdout.readline())
            return status, Path(output.name).read_text(errors="replace")

    def close(self) -> None:
        self._server.communicate()


def _serve() -> None:
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import optree  # noqa: F401
    import pytest  # noqa: F401
    import torch.fx.experimental.proxy_tensor  # noqa: F401

    for line in sys.stdin:
        ask = json.loads(line)
        if not (child := os.fork()):
            os.setsid()
            _become(ask)
        print(_status(child, ask["timeout"]), flush=True)


def _become(ask: Mapping[str, object]) -> None:
    """In a child: run pytest and end."""
    target = os.open(str(ask["to"]), os.O_WRONLY | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.chdir(str(ask["cwd"]))
    env = ask["env"]
    assert isinstance(env, dict)
    os.environ.update(env)
    del sys.path[0]  # this program's folder
    import pytest

    status = pytest.main(list(ask["arguments"]))  # type: ignore[call-overload]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(status))


def _status(child: int, timeout: float) -> int:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL)
    os.killpg(child, 9)
    os.waitpid(child, 0)
    return EXPIRED


if __name__ == "__main__":
    _serve()
