"""Compile a kernel's sources once into a cache that processes share.

A library's file name holds a hash of everything that goes into it (sources, flags, compiler and its version), so a
file that is there is right. Who wants to build takes a lock that the system drops when its holder dies, looks again,
builds in a folder of its own and renames the result into place: any number of processes may start at once, one
builds, and an interrupted build leaves nothing that looks finished.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SECONDS = 600  # a compiler that takes longer hangs


class BuildError(Exception):
    """A kernel that cannot be compiled here; says why, and the remedy."""


@dataclass(frozen=True)
class Recipe:
    """One shared library.

    Attributes:
        name: of the library.
        compiler: "g++" or "nvcc"; the variables CXX and NVCC name others.
        units: what is compiled: a source file and its own flags each.
        includes: files that the sources include.
        flags: for all units, and for the linker.
    """

    name: str
    compiler: str
    units: tuple[tuple[Path, tuple[str, ...]], ...]
    includes: tuple[Path, ...]
    flags: tuple[str, ...]


def shared_library(recipe: Recipe) -> Path:
    """The built library, from the cache or compiled now.

    The cache is the folder SHARDLIB_CACHE, or "shardlib" in XDG_CACHE_HOME or ~/.cache.

    Raises:
        BuildError: no compiler, one that fails, or a cache that cannot be written.
    """
    command = find_compiler(recipe.compiler)
    folder = cache_folder()
    library = folder / f"{recipe.name}-{_key(recipe, command)}.so"
    try:
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(library.with_suffix(".lock")):
                if not library.exists():
                    _compile(recipe, command, library)
    except OSError as failure:
        reason = failure.strerror or failure  # without the file's name, which is another for every library
        raise BuildError(f"{folder} cannot be used ({reason}); set SHARDLIB_CACHE to a writable folder") from failure
    return library


def cache_folder() -> Path:
    """Where libraries are kept."""
    own = os.environ.get("SHARDLIB_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardlib"


def compiles(compiler: str, source: str, flags: tuple[str, ...]) -> bool:
    """Whether a `Recipe`'s ``compiler`` takes these flags and translates the C++ ``source``; asked once.

    Raises:
        BuildError: no compiler.
    """
    return _compiles(find_compiler(compiler), source, flags)


@functools.cache
def _compiles(command: str, source: str, flags: tuple[str, ...]) -> bool:
    try:
        _run([command, *flags, "-x", "c++", "-c", "-", "-o", os.devnull], None, source)
    except BuildError:
        return False
    return True


def find_compiler(program: str) -> str:
    """The path of a `Recipe`'s compiler, or of the one that its variable names.

    Raises:
        BuildError: it is not there.
    """
    variable = {"g++": "CXX", "nvcc": "NVCC"}[program]
    path = shutil.which(os.environ.get(variable) or program)
    if path is None:
        raise BuildError(f"{os.environ.get(variable) or program} not found; install it or set {variable}")
    return path


def _key(recipe: Recipe, command: str) -> str:
    parts: list[str | bytes] = [recipe.name, command, _version(command), platform.machine(), *recipe.flags]
    for source, flags in recipe.units:
        parts += [*flags, source.read_bytes()]
    parts += [file.read_bytes() for file in recipe.includes]
    digest = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else part.encode()
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:20]


@functools.cache
def _version(command: str) -> str:
    return _run([command, "--version"], None)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as handle:
        # Some network file systems have no locks: several processes then build, and the last rename stands.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _compile(recipe: Recipe, command: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f".{recipe.name}-") as work:
        names = [f"{number}.o" for number in range(len(recipe.units))]
        lines = [
            f"flags = {' '.join(recipe.flags)}",
            "rule compile",
            f"  command = {_quoted(command)} $flags $own -c $in -o $out",
            "rule link",
            f"  command = {_quoted(command)} $flags -shared $in -o $out",
        ]
        for name, (source, flags) in zip(names, recipe.units, strict=True):
            lines += [f"build {name}: compile {_escaped(source)}", f"  own = {' '.join(flags)}"]
        lines += [f"build library.so: link {' '.join(names)}", ""]
        (Path(work) / "build.ninja").write_text("\n".join(lines))
        _run([find_ninja(), "-C", work], work)
        os.replace(Path(work) / "library.so", library)


def _run(command: list[str], folder: str | None, given: str = "") -> str:
    try:
        done = subprocess.run(command, cwd=folder, input=given, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise BuildError(f"{command[0]} does not run: {failure}") from failure
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def find_ninja() -> str:
    """The one that came with this Python (pip's package puts it among the scripts), or the system's."""
    path = shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja")
    if path is None:
        raise BuildError("ninja not found; pip install ninja")
    return path


def _quoted(path: str) -> str:
    """For the shell that ninja starts."""
    return "'" + path.replace("'", "'\\''").replace("$", "$$") + "'"


def _escaped(path: Path) -> str:
    """For a ninja build line; ninja quotes what it puts for $in itself."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")
