"""Runs the fast part of the tests on a copy, with a defect or without."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import fast_part
from .forking import EXPIRED, Forking
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
        skipped: whether all tests were skipped: this machine does not run the code.
    """

    test: str
    hung: bool
    output: str
    skipped: bool = False

    @property
    def noticed(self) -> bool:
        return bool(self.test) and not self.hung

    @property
    def word(self) -> str:
        return "noticed" if self.noticed else "skipped" if self.skipped else "hangs" if self.hung else "NOT NOTICED"


@contextmanager
def project() -> Iterator[tuple[Copy, Forking]]:
    """A copy of the project, and of the kernels that are built, and what runs its tests, as long as they are needed."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Copy(Path(folder))
        built = Path(folder) / "kernels"
        built.mkdir()
        for library in _built().glob("*.so"):
            shutil.copy2(library, built)
        forking = Forking(_environment(copy))
        try:
            yield copy, forking
        finally:
            forking.close()


def _built() -> Path:
    from shardlib.kernels.common.build import cache_folder

    return cache_folder()


def run(made: tuple[Copy, Forking], defect: Defect, likely: bool = False) -> Outcome:
    """The likely tests; where none of them notices the defect, the rest of the fast part, unless ``likely``."""
    with made[0].with_defect(defect):
        found = _pytest(made, defect.tests, defect.module)
        if found.test or found.skipped or likely:
            return found
        return _pytest(made, ["tests", *(f"--ignore={path}" for path in fast_part.IGNORED)], defect.module)


def noticed_by(made: tuple[Copy, Forking], defect: Defect, case: str) -> Outcome:
    """One case, with the defect planted."""
    with made[0].with_defect(defect):
        return _pytest(made, [case], defect.module)


def control(made: tuple[Copy, Forking], tests: Iterable[str]) -> Outcome:
    """The tests, with no defect planted."""
    return _pytest(made, list(dict.fromkeys(tests)))


def _pytest(made: tuple[Copy, Forking], tests: Sequence[str], module: str = "") -> Outcome:
    """
    Raises:
        RuntimeError: pytest neither passed nor failed a test: a defect that does not import, a test that is not there.
    """
    copy, forking = made
    options = ["-x", "-p", "mutation.fast_part", "-p", "no:cacheprovider", "-p", "no:randomly", "--tb=line", "-rfE"]
    arguments = [*options, f"--timeout={fast_part.SECONDS}", "-m", "not nightly", *tests]
    status, output = forking.run(arguments, copy.root, {fast_part.MODULE: module}, _WHOLE_RUN)
    if status == EXPIRED:
        return Outcome("the whole run", True, output)
    if status == _PASSED:
        return Outcome("", False, output, skipped=not re.search(r"\b\d+ passed", output))
    failed = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+(?:\[.*\](?= - |$))?)", output, re.M)
    hung = "Timeout" in output and f">{fast_part.SECONDS}" in output
    if status != _FAILED or not (failed or hung):
        raise RuntimeError(f"pytest ended with {status} and no test that failed:\n{output[-3000:]}")
    return Outcome(failed[1] if failed else "the whole run", hung, output)


def _environment(copy: Copy) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "HYPOTHESIS_", "PYTHON"))
    }
    return kept | {
        "PYTHONPATH": os.pathsep.join([str(copy.root), str(copy.root / "tests")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "SHARDLIB_CACHE": str(copy.root.parent / "kernels"),
        fast_part.ROOT: str(copy.root),
    }
