"""Units: the leaves that are gathered and reduced together, derived from the structure of the parameter pytree."""

from __future__ import annotations

from typing import Any

import optree

from shardlib.tree import Tree, path_name


def unit_names(tree: Tree) -> list[str]:
    """The unit of each leaf, in flattening order.

    Each element of a list is a unit, unless the list holds tensors only; every other top-level subtree is a unit; tensors
    at the top form one unit together, named "".
    """
    names: list[str] = []
    _visit(tree, (), "", names)
    return names


def _visit(node: Any, path: tuple[Any, ...], unit: str, names: list[str]) -> None:
    if optree.tree_is_leaf(node):
        names.append(unit)
        return
    children, _, entries, _ = optree.tree_flatten_one_level(node)
    containers = [not optree.tree_is_leaf(child) for child in children]
    units_here = isinstance(node, (list, tuple)) and any(containers)
    for child, entry, container in zip(children, entries, containers, strict=True):
        below = (*path, entry)
        is_unit = units_here or (not path and container)
        _visit(child, below, path_name(below) if is_unit else unit, names)
