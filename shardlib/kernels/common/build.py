"""Compilation of a kernel's sources, once, into a cache that processes share.

A library's file name holds a hash of everything that goes into it (sources, flags, compiler and its version), so a file
that exists is up to date. A process that builds takes a lock, which the system releases if the process dies, looks for the
file again, builds in a temporary folder and renames the result into the cache: of any number of processes that start at
once, one builds, and an interrupted build leaves nothing that looks finished.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_log = logging.getLogger("shardlib.kernels")
_SECONDS = 600  # a compiler that takes longer hangs


class BuildError(Exception):
    """A kernel that cannot be compiled here; the message has the reason and the remedy."""


@dataclass(frozen=True)
class Recipe:
    """How one shared library is built.

    Attributes:
        name: of the library.
        compiler: "g++" or "nvcc"; the environment variables CXX and NVCC name others.
        units: translation units: a source file and its flags each.
        includes: files that the sources include.
        flags: of all units, and of the linker.
    """

    name: str
    compiler: str
    units: tuple[tuple[Path, tuple[str, ...]], ...]
    includes: tuple[Path, ...]
    flags: tuple[str, ...]


def is_built(recipe: Recipe) -> bool:
    """Whether the library is in `cache_folder`.

    Raises:
        BuildError: the compiler is missing.
    """
    return _path(recipe, find_compiler(recipe.compiler)).exists()


def shared_library(recipe: Recipe, place: str = "") -> Path:
    """The path of the built library: from `cache_folder`, or compiled now.

    Args:
        place: among the libraries that are compiled in turn, such as "1 of 2", for the announcement.

    Raises:
        BuildError: the compiler is missing or fails, or the cache cannot be written.
    """
    command = find_compiler(recipe.compiler)
    library = _path(recipe, command)
    folder = library.parent
    try:
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _announce(f"{recipe.name} ({place})" if place else recipe.name, folder)
            with _locked(library.with_suffix(".lock")):
                if not library.exists():
                    _compile(recipe, command, library)
    except OSError as failure:
        reason = failure.strerror or failure  # without the file's name, which differs between libraries
        raise BuildError(f"{folder} cannot be used ({reason}); set SHARDLIB_CACHE to a writable folder") from failure
    return library


def cache_folder() -> Path:
    """The folder of built libraries: SHARDLIB_CACHE, or "shardlib" in XDG_CACHE_HOME or ~/.cache."""
    folder = os.environ.get("SHARDLIB_CACHE")
    return Path(folder) if folder else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardlib"


def compiles(compiler: str, source: str, flags: tuple[str, ...]) -> bool:
    """Whether a `Recipe`'s ``compiler`` accepts ``flags`` and compiles the C++ ``source``; tried once.

    Raises:
        BuildError: the compiler is missing.
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
    """The path of a `Recipe`'s compiler, or of the one that CXX or NVCC names.

    Raises:
        BuildError: the compiler is missing, or this is Windows.
    """
    if sys.platform == "win32":
        raise BuildError("kernels are not compiled on Windows; WSL compiles them")
    variable = {"g++": "CXX", "nvcc": "NVCC"}[program]
    path = shutil.which(os.environ.get(variable) or program)
    if path is None:
        raise BuildError(f"{os.environ.get(variable) or program} not found; install it or set {variable}")
    return path


def _path(recipe: Recipe, command: str) -> Path:
    return cache_folder() / f"{recipe.name}-{_key(recipe, command)}.so"


def _key(recipe: Recipe, command: str) -> str:
    ingredients: list[str | bytes] = [recipe.name, command, _version(command), platform.machine(), *recipe.flags]
    for source, flags in recipe.units:
        ingredients += [*flags, source.read_bytes()]
    ingredients += [file.read_bytes() for file in recipe.includes]
    digest = hashlib.sha256()
    for ingredient in ingredients:
        content = ingredient if isinstance(ingredient, bytes) else ingredient.encode()
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:20]


@functools.cache
def _version(command: str) -> str:
    return _run([command, "--version"], None)


def _announce(name: str, folder: Path) -> None:
    """Says, on rank 0, why nothing else happens for some seconds: in a terminal, and elsewhere in the log. Another process
    may be the one that compiles."""
    if os.environ.get("RANK", "0") != "0":
        return
    text = f"compiling {name}, once: it is kept in {folder}"
    if sys.stderr.isatty():
        print(f"shardlib: {text}", file=sys.stderr, flush=True)
    else:
        _log.info(text)


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
            f"  command = {_quoted(command)} $flags $unit_flags -c $in -o $out",
            "rule link",
            f"  command = {_quoted(command)} $flags -shared $in -o $out",
        ]
        for name, (source, flags) in zip(names, recipe.units, strict=True):
            lines += [f"build {name}: compile {_escaped(source)}", f"  unit_flags = {' '.join(flags)}"]
        lines += [f"build library.so: link {' '.join(names)}", ""]
        (Path(work) / "build.ninja").write_text("\n".join(lines))
        _run([find_ninja(), "-C", work], work)
        os.replace(Path(work) / "library.so", library)


def _run(command: list[str], folder: str | None, stdin: str = "") -> str:
    try:
        finished = subprocess.run(command, cwd=folder, input=stdin, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise BuildError(f"{command[0]} does not run: {failure}") from failure
    if finished.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{(finished.stdout + finished.stderr)[-2000:]}")
    return finished.stdout


def find_ninja() -> str:
    """The path of the ninja that pip installed among this Python's scripts, or of the system's.

    Raises:
        BuildError: ninja is missing.
    """
    path = shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja")
    if path is None:
        raise BuildError("ninja not found; pip install ninja")
    return path


def _quoted(path: str) -> str:
    """``path`` for the shell that ninja starts."""
    return "'" + path.replace("'", "'\\''").replace("$", "$$") + "'"


def _escaped(path: Path) -> str:
    """``path`` for a ninja build line; ninja itself quotes the paths that it substitutes for $in."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")
