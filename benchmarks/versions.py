"""The wheel under each Python and each CPU build of torch that this machine offers: ``python -m benchmarks versions``.

Each pair gets a virtual environment with the wheel and its dependencies, trains, and runs a part of the tests. A build of
torch is named to its local version (``2.13.0+cpu``), so that none with gigabytes of CUDA comes in its place: where there is
none, the pair is not tried, and the table says so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
TESTS = ("tests/test_rng.py", "tests/test_tree_paths.py", "tests/mesh/test_specs.py", "tests/transforms/test_code.py")
NEEDED = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
_OF_WHEEL = ("-o", "pythonpath=tests")  # without the checkout's folder, whose package would be tested in its place
NO_PYTHON, NO_TORCH = "no interpreter", "no CPU build"
_TRAIN = """
import torch, shardlib as sl
def losses(mesh):
    params = sl.shard({"w": torch.ones(8, 8)}, mesh, sl.chain(sl.zero(3), sl.precision("bf16")))
    state, step = sl.make_train_step(lambda p, x: (x @ p["w"] - 1).square().mean(), params, sl.optim.adamw(0.1))
    found = []
    for _ in range(3):
        state, metrics = step(state, torch.ones(4, 8))
        found.append(float(metrics["loss"]))
    return found
assert all(last < first for first, _, last in sl.simulate(losses, mesh=dict(data=2)))
assert sl.launch(losses, mesh=dict(data=1))[0][0] > 0
print(torch.__version__)
"""


def interpreter(version: str) -> str | None:
    """The path of a Python of this version, on the PATH or among pyenv's."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    return str(found[-1]) if found else shutil.which(f"python{version}")


def _environment() -> dict[str, str]:
    """This process's, without paths on which pip would find the library installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def pinned(names: Iterable[str]) -> list[str]:
    """The lines of the requirements for some packages."""
    lines = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    return [line for line in lines if re.split("[=; ]", line)[0] in set(names)]


def offered(version: str, build: str) -> bool:
    """Whether pip finds a build of torch for a version of Python. Downloads nothing that is installed."""
    place = ("--target", "unused", "--python-version", version, "--only-binary=:all:")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", *place, build]
    return subprocess.run(command, capture_output=True).returncode == 0


def tried(version: str, torch: str, wheel: Path, folder: Path) -> str:
    """What one pair gave: "passed (N tests)", the step that failed, or why it was not tried."""
    python, build = interpreter(version), f"torch=={torch}+cpu"
    if python is None:
        return NO_PYTHON
    if not offered(version, build):
        return NO_TORCH
    inside = folder / "bin" / "python"
    steps: list[tuple[str, Sequence[str]]] = [
        ("install failed", (str(inside), "-m", "pip", "install", "--quiet", str(wheel), build, *pinned(NEEDED))),
        ("training failed", (str(inside), "-c", _TRAIN)),
        ("tests failed", (str(folder / "bin" / "pytest"), "-n0", "-p", "no:cacheprovider", *_OF_WHEEL, *TESTS)),
    ]
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    said = ""
    for failure, command in steps:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=ROOT if failure == "tests failed" else folder,
            env=_environment(),
        )
        said = done.stdout + done.stderr
        if done.returncode:
            print(said[-2000:], file=sys.stderr)
            return failure
        if failure == "training failed" and done.stdout.split()[-1] != f"{torch}+cpu":
            return f"pip put {done.stdout.split()[-1]} in its place"
    passed = re.search(r"(\d+) passed", said)
    if passed is None:
        return "no tests ran"
    return f"passed ({passed[1]} tests)"


def versions(pythons: Sequence[str], torches: Sequence[str]) -> dict[tuple[str, str], str]:
    """(Python, torch) -> what they gave."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="versions-") as work:
        command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", work, str(ROOT)]
        subprocess.run(command, check=True, capture_output=True)
        wheel = next(Path(work).glob("*.whl"))
        for python in pythons:
            for torch in torches:
                folder = Path(work) / f"{python}-{torch}"
                found[python, torch] = tried(python, torch, wheel, folder)
                print(f"Python {python}, torch {torch}: {found[python, torch]}", flush=True)
                shutil.rmtree(folder, ignore_errors=True)
    return found


def text(found: Mapping[tuple[str, str], str], source: Mapping[str, str]) -> str:
    """The table, as a page."""
    pythons, torches = (list(dict.fromkeys(pair[side] for pair in found)) for side in (0, 1))
    lines = [
        "# Python and torch",
        "",
        *(f"- {what}: {value}" for what, value in source.items() if what != "torch"),
        "",
        "The wheel in an environment of its own, with torch's CPU build: it trains on one rank and on two, and passes "
        f"{', '.join(f'`{test}`' for test in TESTS)}. "
        f'"{NO_TORCH}": pip offers no `+cpu` build of that version for that Python here, so the pair was **not tried**.',
        "",
        f"| Python | {' | '.join(f'torch {torch}' for torch in torches)} |",
        f"|---|{'---|' * len(torches)}",
        *(f"| {python} | {' | '.join(found[python, torch] for torch in torches)} |" for python in pythons),
        "",
    ]
    return "\n".join(lines)
