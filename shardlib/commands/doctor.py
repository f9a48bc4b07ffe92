"""Show versions, devices, backends, compilers, and which kernels are in use and why."""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from shardlib.commands.arguments import WrongArguments, positive, wrong_arguments
from shardlib.commands.measure import measure_machine
from shardlib.kernels.common import build, dispatch, native
from shardlib.mesh.launch import launch
from shardlib.mesh.mesh import make_mesh
from shardlib.plan.tables import table
from shardlib.report.environment import devices, versions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--measure", action="store_true", help="measure what ranks of this machine do per second")
    parser.add_argument("--ranks", type=positive, default=1, help="that measure at once")
    parser.add_argument("--out", type=Path, help="JSON file for what is measured, for `shardlib plan --search`")


def run(args: argparse.Namespace) -> int:
    if not args.measure and (args.out or args.ranks > 1):
        raise WrongArguments("--out and --ranks are of what --measure measures: give it too")
    for title, rows in (
        ("Versions", versions()),
        ("Devices", devices()),
        ("Communication", _backends()),
        ("Compilers", _compilers()),
    ):
        print(table((title, ""), rows), end="\n\n", flush=True)
    _print_kernels()
    if args.measure:
        alone = args.ranks == 1
        machine = measure_machine(make_mesh()) if alone else launch(measure_machine, mesh={"data": args.ranks})[0]
        print(machine)
        if args.out:
            with wrong_arguments(OSError):
                machine.write(args.out)
    return 0


def _backends() -> list[tuple[str, str]]:
    return [
        (
            "gloo",
            "used on CPU" if dist.is_gloo_available() else "missing from this torch: no multi-process runs on CPU",
        ),
        ("nccl", "used on CUDA" if dist.is_nccl_available() else "missing from this torch: no multi-GPU runs"),
    ]


def _compilers() -> list[tuple[str, str]]:
    rows = []
    finders = {"g++": partial(build.find_compiler, "g++"), "nvcc": partial(build.find_compiler, "nvcc")}
    for name, find in (finders | {"ninja": build.find_ninja}).items():
        try:
            path = find()
        except build.BuildError as reason:
            rows.append((name, f"{reason}; until then kernels fall back to the next implementation"))
            continue
        output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        rows.append((name, version_line(output) or path))
    return rows


def version_line(output: str) -> str | None:
    """The line of ``--version`` that has a compiler's version, not its copyright or the date on which it was built."""
    return next(
        (line for line in output.splitlines() if re.search(r"\d+\.\d+", line) and "(c)" not in line.lower()), None
    )


def _print_kernels() -> None:
    """Prints a row as soon as its kernel is there: the first time all of them are compiled, which takes minutes."""
    rows = {
        f"{operation} on {each.type}": (operation, each)
        for operation in dispatch.operations()
        for each in [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])
    }
    missing = {name: recipe for name, (operation, device) in rows.items() if (recipe := _missing(operation, device))}
    places = {name: f"{number} of {len(missing)}" for number, name in enumerate(missing, 1)}
    width = max(map(len, rows))
    print(table(("Kernels".ljust(width), "in use"), ()), flush=True)
    for name, (operation, device) in rows.items():
        if name in missing:
            with contextlib.suppress(build.BuildError):
                build.shared_library(missing[name], places[name])
        print(f"{name.ljust(width)}  {dispatch.choose(operation, device)}", flush=True)
    print()


def _missing(operation: str, device: torch.device) -> build.Recipe | None:
    """The recipe of the preferred implementation, if that is still to be compiled."""
    try:
        recipe = native.recipe_of(operation, dispatch.preferred(operation, device))
        return recipe if recipe and not build.is_built(recipe) else None
    except (build.BuildError, OSError):  # the row says why
        return None
