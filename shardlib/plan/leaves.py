"""The leaves of a plan as they are listed: those that differ only in an index (layers) together, by the block they are in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shardlib.common.tensors import dtype_name
from shardlib.mesh.specs import Leaf
from shardlib.plan.placement import Placement
from shardlib.plan.tables import shortened

_INDEX = re.compile(r"(?<=/)\d+(?=/|$)|^\d+(?=/)")
_MERGED = re.compile(r"\d+(?:[…,]\d+)*(?: … [\d,…]+)?")  # one or several indices


@dataclass(frozen=True)
class AlikeLeaves:
    """Leaves of one shape, dtype and specs whose paths differ in indices alone.

    Attributes:
        path: of all of them, such as ``blocks/0…7/weight``.
        members: their placements.
    """

    path: str
    members: Sequence[Placement]

    @property
    def first(self) -> Placement:
        return self.members[0]

    @property
    def block(self) -> str:
        """The path up to the first index; else its first part; "" for a leaf at the top."""
        parts = self.path.split("/")
        for number, part in enumerate(parts[:-1]):
            if _MERGED.fullmatch(part):
                return "/".join(parts[: number + 1])
        return parts[0] if len(parts) > 1 else ""


def alike(placements: Iterable[Placement]) -> list[AlikeLeaves]:
    """The leaves, those together that differ only in an index, in the order of their first ones."""
    found: dict[tuple[Any, ...], tuple[list[tuple[int, ...]], list[Placement]]] = {}
    for placement in placements:
        path = placement.path
        numbers = tuple(map(int, _INDEX.findall(path)))
        pattern = _INDEX.sub("#", path) if numbers else path
        param, grad, optimizer = placement.param, placement.grad, placement.optimizer
        others = (leaf and (leaf.spec, leaf.memory) for leaf in (grad, optimizer))
        roles = (param.spec, param.memory, *others)
        indices, members = found.setdefault((pattern, param.shape, param.dtype, placement.aliases, *roles), ([], []))
        indices.append(numbers)
        members.append(placement)
    return [AlikeLeaves(_merge(key[0], indices), members) for key, (indices, members) in found.items()]


def _merge(pattern: str, numbers: list[tuple[int, ...]]) -> str:
    """``blocks/#/weight`` with indices 0..7 -> ``blocks/0…7/weight``."""
    for column in range(len(numbers[0])):
        values = sorted({row[column] for row in numbers})
        whole = values == list(range(values[0], values[-1] + 1))
        shown = f"{values[0]}…{values[-1]}" if whole and len(values) > 1 else ",".join(map(str, values))
        pattern = pattern.replace("#", shown, 1)
    return pattern


def spec_text(leaf: Leaf) -> str:
    """The spec of a leaf, with its memory where that is not the device's."""
    spec = "whole" if repr(leaf.spec) == "P()" else repr(leaf.spec)
    return spec if leaf.memory == "device" else f"{spec} in {leaf.memory} memory"


def leaf_cells(leaves: AlikeLeaves) -> tuple[str, ...]:
    """Path, shape, dtype, and the specs as a parameter, as a gradient and in the optimizer."""
    placement = leaves.first
    tied = f" (tied: {', '.join(placement.aliases)})" if placement.aliases else ""
    return (
        leaves.path + tied,
        "×".join(map(str, placement.param.shape)) or "scalar",
        dtype_name(placement.param.dtype),
        spec_text(placement.param),
        spec_text(placement.grad) if placement.grad else "frozen",
        spec_text(placement.optimizer) if placement.optimizer else "-",
    )


def blocks_of(leaves: Iterable[AlikeLeaves]) -> dict[str, list[AlikeLeaves]]:
    """Block -> its leaves, in order."""
    found: dict[str, list[AlikeLeaves]] = {}
    for each in leaves:
        found.setdefault(shortened(each.block, 60), []).append(each)
    return found
