"""Runs the fast part of the tests on a copy, with a defect or without."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import fast_part
from .planting import Copy, Defect

_WHOLE_RUN = 3000  # seconds
_PASSED, _FAILED, _NOTHING_RUN = 0, 1, 5  # what pytest returns


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        test: the first that failed, or "".
        hung: whether it did not end, by which nothing is noticed: whoever waits for it learns nothing.
        output: of pytest.
    """

    test: str
    hung: bool
    output: str

    @property
    def noticed(self) -> bool:
        return bool(self.test) and not self.hung


@contextmanager
def project() -> Iterator[Copy]:
    """A copy of the project, and of the kernels that are built, as long as it is needed."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Copy(Path(folder))
        built = Path(folder) / "kernels"
        built.mkdir()
        for library in _built().glob("*.so"):
            shutil.copy2(library, built)
        yield copy


def _built() -> Path:
    from shardlib.kernels.common.build import cache_folder

    return cache_folder()


def run(copy: Copy, defect: Defect, likely: bool = False) -> Outcome:
    """The likely tests; where none of them notices the defect, the rest of the fast part, unless ``likely``."""
    with copy.with_defect(defect):
        found = _pytest(copy, defect.tests, defect.module)
        if found.test or likely:
            return found
        return _pytest(copy, ["tests", *(f"--ignore={path}" for path in fast_part.IGNORED)], defect.module)


def control(copy: Copy, defects: Sequence[Defect]) -> Outcome:
    """The likely tests of all defects, with none of them planted."""
    return _pytest(copy, list(dict.fromkeys(test for defect in defects for test in defect.tests)))


def _pytest(copy: Copy, tests: Sequence[str], module: str = "") -> Outcome:
    """
    Raises:
        RuntimeError: pytest neither passed nor failed a test: a defect that does not import, a test that is not there.
    """
    options = ["-x", "-p", "mutation.fast_part", "-p", "no:cacheprovider", "-p", "no:randomly", "--tb=line", "-rfE"]
    command = [sys.executable, "-m", "pytest", *options, f"--timeout={fast_part.SECONDS}", "-m", "not nightly", *tests]
    try:
        done = subprocess.run(
            command, cwd=copy.root, env=_environment(copy, module), capture_output=True, text=True, timeout=_WHOLE_RUN
        )
    except subprocess.TimeoutExpired as expired:
        return Outcome("the whole run", True, str(expired))
    output = done.stdout + done.stderr
    if done.returncode == _PASSED:
        return Outcome("", False, output)
    failed = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", output, re.M)
    hung = "Timeout" in output and f">{fast_part.SECONDS}" in output
    if done.returncode != _FAILED or not (failed or hung):
        raise RuntimeError(f"pytest ended with {done.returncode} and no test that failed:\n{output[-3000:]}")
    return Outcome(failed[1] if failed else "the whole run", hung, output)


def _environment(copy: Copy, module: str) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "HYPOTHESIS_", "PYTHON"))
    }
    return kept | {
        "PYTHONPATH": os.pathsep.join([str(copy.root), str(copy.root / "tests")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "SHARDLIB_CACHE": str(copy.root.parent / "kernels"),
        fast_part.ROOT: str(copy.root),
        fast_part.MODULE: module,
    }
