"""The house: few rooms and floors, imports that run downwards, no circle among files, and a drawing that is true."""

import importlib.util
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import grimp
import pytest

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
    assert len(folders) <= 18, folders
    assert len(CONTRACTS[0]["layers"]) <= 10


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


@pytest.mark.parametrize("name", ["house.txt", "house.svg"])
def test_the_drawing_is_true(name):
    spec = importlib.util.spec_from_file_location("draw_house", ROOT / "docs" / "draw_house.py")
    draw_house = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw_house)
    drawn = (ROOT / "docs" / name).read_text()
    assert drawn == draw_house.DRAWINGS[name](), "run: python docs/draw_house.py"
