"""Triton's interpreter, which has to be on before a kernel is decorated: a process of its own, one for all tests.

`python -m helpers.interpreter` runs the scripts whose command lines it reads and answers each with what went wrong.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
_running: list[subprocess.Popen[str]] = []


def interpret(operation: str, script: str) -> None:
    """Run a file as a script under the interpreter; ``operation`` is its argument."""
    pytest.importorskip("triton")
    process = _process()
    assert process.stdin and process.stdout
    print(json.dumps([script, operation]), file=process.stdin, flush=True)
    answer = process.stdout.readline()
    assert answer, "the interpreter's process ended"
    wrong = json.loads(answer)
    assert not wrong, wrong


def _process() -> subprocess.Popen[str]:
    """The one that runs, or a new one."""
    if not _running or _running[-1].poll() is not None:
        paths = os.pathsep.join([str(_TESTS), str(_TESTS.parent)])
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
        command = [sys.executable, "-W", "ignore", "-m", "helpers.interpreter"]
        pipe = subprocess.PIPE
        _running.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment))
    return _running[-1]


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what scripts print must not mix with answers
    for line in sys.stdin:
        sys.argv = json.loads(line)
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
            wrong = ""
        except Exception:
            wrong = traceback.format_exc()
        print(json.dumps(wrong), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
