"""Building kernels: once however many processes ask, safely when one dies, and not at all without a compiler."""

import io
import logging
import os
import platform
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import kernels

from shardlib.kernels import onebit
from shardlib.kernels.common import build, dispatch, native
from shardlib.kernels.common.build import BuildError, Recipe, shared_library

ROOT = Path(__file__).parents[2]
SOURCE = 'extern "C" void twice(float* x, int count) { for (int i = 0; i < count; ++i) x[i] *= FACTOR; }\n'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("SHARDLIB_CACHE", str(folder))
    return folder


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """g++ behind a script that notes every compilation, slowly."""
    script, notes = tmp_path / "a compiler's script", tmp_path / "notes"
    notes.touch()
    script.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) echo $$ >> {notes}; sleep 0.5;; esac\nexec g++ "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    return notes


@pytest.fixture
def old_compiler(tmp_path, monkeypatch):
    """g++ behind a script that knows no AMX, as GCC 10."""
    script = tmp_path / "an old compiler"
    script.write_text(
        '#!/bin/sh\ncase "$*" in *-mamx*) echo "unrecognized command line option -mamx-tile" >&2; exit 1;; esac\n'
        'exec g++ "$@"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))


def recipe(folder, factor=2):
    source, header = folder / "a source: twice.cpp", folder / "twice.h"
    source.write_text('#include "twice.h"\n')
    header.write_text(SOURCE)
    return Recipe("twice", "g++", ((source, (f"-DFACTOR={factor}",)),), (header,), ("-fPIC",))


def test_a_library_is_built_once_and_called(cache, compiler, tmp_path):
    path = shared_library(recipe(tmp_path))
    assert shared_library(recipe(tmp_path)) == path and len(compiler.read_text().split()) == 1
    x = torch.arange(5.0)
    native.functions(path, {"twice": "pi"}).twice(x, 4)
    assert x.tolist() == [0, 2, 4, 6, 4]
    assert sorted(file.suffix for file in cache.iterdir()) == [".lock", ".so"]


def test_the_file_name_depends_on_every_ingredient(cache, compiler, tmp_path):
    first = shared_library(recipe(tmp_path))
    assert shared_library(recipe(tmp_path, factor=3)) != first
    changed = recipe(tmp_path)
    (tmp_path / "twice.h").write_text(SOURCE + "// changed\n")
    assert shared_library(changed) != first


PROGRAM = """
import sys, torch
from shardlib.kernels.common import dispatch
from shardlib.kernels import onebit
segments = onebit.Segments([0, 100])
bits, scales = onebit.compress(torch.ones(100), torch.zeros(100), segments, using="cpu")
print(scales.item(), dispatch.choose("onebit", torch.device("cpu")))
"""


def start(program, **variables):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=pipe, stderr=pipe, text=True)


def test_four_processes_at_once_build_once(cache, compiler):
    processes = [start(PROGRAM) for _ in range(4)]
    for process in processes:
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0 and out.startswith("1.0 C++, "), out + errors
    assert len(compiler.read_text().split()) == len(native.cpp_recipe("onebit").units)
    assert len(list(cache.glob("*.so"))) == 1


@pytest.mark.parametrize("rank, terminal", [("0", True), ("0", False), ("1", True)])
def test_a_compilation_is_announced_once(cache, tmp_path, monkeypatch, caplog, rank, terminal):
    """On rank 0: in a terminal, else in the log; and not at all where the library is there."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    monkeypatch.setattr(said, "isatty", lambda: terminal)
    with caplog.at_level(logging.INFO, logger="shardlib.kernels"):
        for _ in range(2):
            shared_library(recipe(tmp_path), "1 of 2")
    line = f"compiling twice (1 of 2), once: it is kept in {cache}"
    assert said.getvalue() == (f"shardlib: {line}\n" if (rank, terminal) == ("0", True) else "")
    assert caplog.messages == ([line] if (rank, terminal) == ("0", False) else [])


def test_a_killed_builder_does_not_block_others(cache, compiler):
    first = start(PROGRAM)
    deadline = time.monotonic() + 60
    while not compiler.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert not list(cache.glob("*.so"))
    second = start(PROGRAM)
    out, errors = second.communicate(timeout=60)
    assert out.startswith("1.0 C++, "), out + errors


FALLBACK = """
import logging, torch
logging.basicConfig(format="logged: %(message)s")
from shardlib.kernels.common import dispatch
from shardlib.kernels import onebit, quantize
segments = onebit.Segments([0, 100])
for _ in range(2):
    assert onebit.compress(torch.ones(100), torch.zeros(100), segments)[1].item() == 1.0
    assert quantize.quantize(torch.ones(100), quantize.Blockwise(8))[0][0] == 127
print(dispatch.choose("onebit", torch.device("cpu")))
"""


@pytest.mark.parametrize(
    "found, said",
    [("no-such-compiler", "no-such-compiler not found; install it or set CXX"), ("false", "false --version")],
)
def test_without_a_compiler_plain_torch_is_used_with_one_warning(cache, found, said):
    out, errors = start(FALLBACK, CXX=found).communicate(timeout=60)
    assert out.startswith("plain torch (no C++: ") and said in out, out + errors
    assert errors.count("logged: ") == 1 and said in errors, errors


def test_only_the_first_rank_logs_that_there_is_no_compiler(cache):
    out, errors = start(FALLBACK, CXX="no-such-compiler", RANK="1").communicate(timeout=60)
    assert out.startswith("plain torch (no C++: ") and "logged" not in errors, out + errors


EVERY_KERNEL = """
import logging
logging.basicConfig(format="logged: %(message)s")
import torch
from shardlib.kernels.common import dispatch
for operation in dispatch.operations():
    print(dispatch.choose(operation, torch.device("cpu")).name)
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="there is no /proc")
@pytest.mark.parametrize("broken", ["cache", "compiler"])
def test_a_reason_that_all_kernels_share_is_logged_once(tmp_path, broken):
    """Messages differ from kernel to kernel by the names of files."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit\necho "no $@"; exit 1\n')
    compiler.chmod(0o755)
    # In /proc nobody makes a file, root neither.
    changed = {"SHARDLIB_CACHE": "/proc"} if broken == "cache" else {"CXX": str(compiler)}
    out, errors = start(EVERY_KERNEL, **{"SHARDLIB_CACHE": str(tmp_path / "cache")} | changed).communicate(timeout=60)
    assert set(out.split()) == {"reference"} and len(out.split()) > 10
    assert errors.count("logged: ") == 1 and "`shardlib doctor` says which" in errors, errors


WITHOUT_AMX = """
import sys
sys.path.insert(0, "tests")
import torch
from helpers import sparse_cases
from shardlib.kernels.common import dispatch
for dtype in (torch.float32, torch.bfloat16):
    sparse_cases.check(sparse_cases.make(length=200, dtype=dtype, bias_heads=4, causal=True), "cpu")
print(dispatch.choose("sparse_attention", torch.device("cpu")))
"""


@pytest.mark.skipif(platform.machine() != "x86_64" or platform.system() != "Linux", reason="AMX is compiled for x86-64")
def test_instruction_sets_that_the_compiler_lacks_are_left_out(cache, old_compiler):
    assert not any("-DISA=amx" in flags for _, flags in native.cpp_recipe("sparse_attention").units)
    out, errors = start(WITHOUT_AMX).communicate(timeout=240)
    described = (
        r"C\+\+, (avx512|avx2|portable) \(without AMX, which this compiler does not support; GCC 11 and later do\)\n"
    )
    assert re.fullmatch(described, out), out + errors


def test_a_source_that_does_not_compile(cache, tmp_path):
    broken = recipe(tmp_path)
    (tmp_path / "twice.h").write_text("this is not C++")
    with pytest.raises(BuildError, match="error: expected unqualified-id"):
        shared_library(broken)
    assert not list(cache.glob("*.so"))


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHARDLIB_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="set SHARDLIB_CACHE to a writable folder"):
        shared_library(recipe(tmp_path))


def test_the_cache_folder(monkeypatch):
    monkeypatch.delenv("SHARDLIB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert build.cache_folder() == Path("/somewhere/shardlib")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.cache_folder() == Path.home() / ".cache" / "shardlib"


def test_one_implementation_is_chosen_and_logged(caplog):
    dispatch._chosen.pop(("onebit", "cpu"), None)
    with caplog.at_level(logging.INFO, logger="shardlib.kernels"):
        for _ in range(3):
            onebit.compress(torch.ones(8), torch.zeros(8), onebit.Segments([0, 8]))
    assert [record.getMessage() for record in caplog.records] == [
        f"onebit on cpu: {dispatch.choose('onebit', torch.device('cpu'))}"
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_implementation_that_cannot_run_here_raises():
    x, segments = torch.zeros(8), onebit.Segments([0, 8])
    with pytest.raises(BuildError, match="no NVIDIA GPU"):
        onebit.compress(x, x.clone(), segments, using="cuda")
    with pytest.raises(BuildError, match="does not compile for cpu"):
        onebit.compress(x, x.clone(), segments, using="triton")


def test_the_sources_are_part_of_the_package():
    import tomllib
    from fnmatch import fnmatch

    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["shardlib"]
    package = ROOT / "shardlib"
    sources = [file for suffix in ("cpp", "h", "cu", "cuh") for file in package.rglob(f"*.{suffix}")]
    assert len(sources) >= 8
    for file in sources:
        assert any(fnmatch(str(file.relative_to(package)), pattern) for pattern in patterns), file


# Operation -> how many kernels it is compiled to, and the registers of the largest: bytes decide, so all warps must fit.
CUDA = {
    "adamw": (56, 48),  # three dtypes of state, gradient and copy, four elements a thread or one; and the direction
    "frozen_adam": (12, 40),  # four elements a thread or one, of the step with each copy and without, others, momentum
    "global_norm": (7, 64),  # three dtypes, four elements at once or one; and the sum over tiles
    "lion": (54, 48),  # three dtypes of state, gradient and copy, four elements a thread or one
    "onebit": (11, 64),
    "quantize": (20, 64),
}


@pytest.mark.parametrize("operation", CUDA)
def test_cuda_kernels_compile_without_spills(operation, tmp_path):
    ((source, _),) = native.cuda_recipe(operation, (9, 0)).units
    report, (entries, registers) = kernels.cubin_report(source, tmp_path), CUDA[operation]
    assert (
        report.count("0 bytes spill stores, 0 bytes spill loads") == report.count("Compiling entry function") == entries
    )
    assert max(map(int, re.findall(r"Used (\d+) registers", report))) <= registers


def test_every_cuda_source_is_compiled():
    assert sorted(CUDA) == sorted(source.stem for source in (ROOT / "shardlib/kernels").glob("*/*.cu"))
