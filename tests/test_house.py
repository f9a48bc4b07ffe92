"""The house: few rooms and floors, imports that run downwards, no circle among files, and a drawing that is true."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path

import grimp
import pytest

import shardlib

ROOT = Path(__file__).parents[1]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def test_no_file_imports_upwards():
    program = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_contract_has_no_exceptions():
    assert [contract["id"] for contract in CONTRACTS] == ["floors"]
    assert not [key for contract in CONTRACTS for key in contract if "ignore" in key]


def test_rooms_and_floors_are_few():
    top = [path for path in (ROOT / "shardlib").iterdir() if path.name != "__pycache__"]
    files = sorted(path.name for path in top if path.suffix == ".py")
    folders = sorted(path.name for path in top if any(path.glob("*.py")))
    assert len(files) <= 10, files
    assert len(folders) <= 22, folders
    assert len(CONTRACTS[0]["layers"]) <= 10


def test_a_class_name_stands_in_one_file():
    """But for the implementations of an operation, which are called alike in every folder of kernels."""
    found = {}
    for path in sorted((ROOT / "shardlib").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name not in ("reference", "cpu", "cuda"):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


@cache
def circles():
    """The groups of files that import each other round and round, imports for type checkers included."""
    graph = grimp.build_graph("shardlib", cache_dir=None)
    left = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    while True:  # what imports nothing that is left, or is imported by nothing that is left, is in no circle
        imported = set().union(*left.values())
        ends = {module for module, uses in left.items() if not uses or module not in imported}
        if not ends:
            break
        left = {module: uses - ends for module, uses in left.items() if module not in ends}
    reached = {module: _reached(left, module) for module in left}
    groups = {tuple(sorted(m for m in reached[module] if module in reached[m])) for module in left}
    return sorted(group for group in groups if group)


def _reached(uses, start):
    """All modules on the ways that lead on from ``start``."""
    found, new = set(), {start}
    while new := set().union(*(uses[module] for module in new)) - found:
        found |= new
    return found


def test_no_circle_among_files():
    assert circles() == []


# A member of each kind -> the files, beside its own, that import it: those that have to be edited when it is added.
ADDITIONS = {
    "codec": ("collectives.codecs.float8", ["collectives.codecs"]),
    "style of slicing": ("collectives.styles.vocab", ["collectives.styles"]),
    "sequence kind": ("collectives.sequence.ring", ["collectives.sequence"]),
    "optimizer": ("optim.optimizers.lion", ["optim"]),
    "optimizer that reduces an axis itself": ("optim.axis_owner.onebit_adam", ["optim"]),
    "wrapper of optimizers": ("optim.wrappers.masked", ["optim"]),
    "router": ("nn.moe.routers.gshard", ["nn.moe.routers"]),
    "pipeline schedule": ("schedules.dualpipe", ["schedules", "schedules.make"]),
    "operation with a kernel": ("kernels.rotary", ["nn"]),
    "transform": ("transforms.hierarchical", ["", "transforms"]),
    "transport": ("mesh.transport.echo", ["mesh.transport"]),
    "command": ("commands.plan", ["commands.__main__"]),
    "library whose configurations are read": ("migration.torchtitan", ["migration.verb"]),
}


@pytest.mark.parametrize("kind", ADDITIONS)
def test_a_new_member_of_a_kind_needs_few_edits(kind):
    graph = grimp.build_graph("shardlib", cache_dir=None)
    member, edited = f"shardlib.{ADDITIONS[kind][0]}", [f"shardlib.{name}".rstrip(".") for name in ADDITIONS[kind][1]]
    own = {module for module in graph.modules if module == member or module.startswith(f"{member}.")}
    importers = set().union(*map(graph.find_modules_that_directly_import, own)) - own
    stub = (ROOT / "shardlib" / "__init__.pyi").read_text()  # which the package reads in place of imports
    room, _, name = ADDITIONS[kind][0].rpartition(".")
    if re.search(rf"^from \.({room} import {name}|{room}\.{name} import) ", stub, re.M):
        importers.add("shardlib")
    assert sorted(importers) == edited
    assert len(edited) <= 5
    row = next(
        line for line in (ROOT / "docs" / "architecture.md").read_text().splitlines() if line.startswith(f"| {kind} |")
    )
    assert row.endswith(f"| {len(edited)} |"), "docs/architecture.md counts other edits"


def test_files_that_the_architecture_names_are_there():
    named = re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 30
    assert [name for name in named if not any((root / name).exists() for root in (ROOT, ROOT / "shardlib"))] == []


@pytest.mark.parametrize("name", ["house.txt", "house.svg"])
def test_the_drawing_is_true(name):
    spec = importlib.util.spec_from_file_location("draw_house", ROOT / "docs" / "draw_house.py")
    draw_house = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw_house)
    drawn = (ROOT / "docs" / name).read_text()
    assert drawn == draw_house.DRAWINGS[name](), "run: python docs/draw_house.py"


def test_the_public_names_are_few():
    assert len(shardlib.__all__) == len(set(shardlib.__all__)) <= 72
    assert all(hasattr(shardlib, name) for name in shardlib.__all__)


def test_no_two_files_of_tests_have_one_name():
    """Processes of a pool import a test's functions by the name of its file alone."""
    names = sorted(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, after in pairwise(names) if name == after] == []
