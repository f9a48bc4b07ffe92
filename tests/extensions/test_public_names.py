"""The extensions are a user's files: short, and made of public names."""

import ast
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import shardlib as sl

FILES = sorted(path for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__))


def private(path):
    """What a file takes from the package by names that are not public."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "shardlib":
            room = import_module(node.module)
            if not (hasattr(room, "__all__") or is_public(["sl", *node.module.split(".")[1:]])):
                found.append(node.module)
            found += [f"{node.module}.{name.name}" for name in node.names if name.name not in names_of(room)]
        elif isinstance(node, ast.Attribute) and not is_public(ast.unparse(node).split(".")):
            found.append(ast.unparse(node))
    return found


def is_public(names):
    """Whether each room lists the next name of ``sl.room.name``; True for what does not begin in the package."""
    value = sl
    for name in names[1:] if names[0] == "sl" else ():
        if not isinstance(value, ModuleType):
            break  # a method or an attribute
        if name not in names_of(value):
            return False
        value = getattr(value, name)
    return True


def names_of(room):
    return getattr(room, "__all__", None) or [name for name in vars(room) if not name.startswith("_")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_short_and_uses_public_names_alone(path):
    assert len(path.read_text().splitlines()) <= 80
    assert private(path) == []


def test_there_is_one_of_each():
    assert len(FILES) == 9
