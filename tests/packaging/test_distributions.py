"""The source distribution has all that the tests need, and the wheel works where nothing but its dependencies is there."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEFT_OUT = {"__pycache__", ".pytest_cache", ".ipynb_checkpoints"}
OPTIONAL = (
    "triton", "transformers", "peft", "accelerate", "datasets", "safetensors", "tensorboard", "wandb", "matplotlib",
    "pytest", "hypothesis", "IPython", "nbformat", "nbclient", "deepspeed", "setuptools",
)  # fmt: skip
SCRIPT = """
import logging, sys
sys.modules.update(dict.fromkeys({optional!r}))  # an import of None fails
logging.basicConfig(format="%(name)s: %(message)s")
import torch
import shardlib as sl
print(sl.__file__)
params = {{"w": torch.ones(64, 64), "b": torch.zeros(64)}}
tx = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(0.1))
def loss_fn(params, batch):
    return (torch.nn.functional.linear(batch, params["w"], params["b"]) - 1).square().mean()
def losses(mesh):
    chain = sl.chain(sl.zero(3), sl.precision("bf16"), sl.quantize(gradients="int8"), sl.remat())
    state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, chain), tx)
    found = []
    for _ in range(4):
        state, metrics = step(state, torch.full((8, 64), 0.1))
        found.append(float(metrics["loss"]))
    sl.checkpoint.save("saved-%d" % mesh.shape["data"], state) if mesh.shape["data"] == 1 else None
    return found
for ranks in (1, 2):
    first, *_, last = sl.simulate(losses, mesh=dict(data=ranks))[0]
    assert last < first, (first, last)
print(sl.make_plan(params, sl.abstract_mesh(data=8), stage=3, optimizer=tx).bytes("total"))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution, and the wheel that is made of it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


def files_below(folder):
    for path in (ROOT / folder).rglob("*"):
        if (
            path.is_file()
            and not LEFT_OUT & {*path.parts}
            and path.suffix != ".pyc"
            and ".unfinished." not in path.name
        ):
            yield str(path.relative_to(ROOT))


def test_the_source_distribution_is_whole(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        name for folder in ("shardlib", "tests", "docs", "notebooks", "benchmarks") for name in files_below(folder)
    }
    wanted |= {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "LICENSE", "Makefile"}
    wanted |= {"pyproject.toml", "requirements/cpu.txt"}
    assert sorted(wanted - names) == []


def test_the_wheel_trains_without_compilers_or_optional_packages(built, tmp_path):
    place = tmp_path / "site-packages"
    with zipfile.ZipFile(built[1]) as archive:
        archive.extractall(place)
    assert {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()} >= set(files_below("shardlib"))
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    for path in (place, *before):
        path.chmod(path.stat().st_mode & ~0o222)
    (tmp_path / "script.py").write_text(SCRIPT.format(optional=OPTIONAL))
    environment = {
        "PATH": "", "PYTHONPATH": str(place), "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1",
        "SHARDLIB_CACHE": "/dev/null/none", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(place) + os.sep)
    told = [line for line in done.stderr.splitlines() if "g++ not found" in line]
    assert len(told) == 1, done.stderr
    assert {
        path: path.stat().st_mtime_ns for path in place.rglob("*")
    } == before  # nothing was written beside the package
