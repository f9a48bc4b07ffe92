"""What is wrong with the rules of a tensor slicing, and what to put in their place."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from shardlib.collectives.styles.base import Style
from shardlib.errors import listing
from shardlib.mesh.specs import P
from shardlib.plan.claims import LeafInfo


@dataclass(frozen=True)
class Misfit:
    """One thing that is wrong.

    Attributes:
        text: what, with the leaf's path and shape, and the rule.
        remedy: what to put in the rule's place; "" where that is to leave the leaf whole.
        pattern, path: the rule, and the leaf that is to be left whole.
    """

    text: str
    remedy: str = ""
    pattern: str = ""
    path: str = ""


def misfits_of(
    leaf: LeafInfo, pattern: str, style: Style, spec: P, axis: str, sizes: Mapping[str, int]
) -> list[Misfit]:
    """Why one leaf cannot be sliced by a rule over this mesh."""
    found, remedy = [], ""
    if not leaf.dtype.is_floating_point:
        found.append(f"{leaf.dtype} is no layer's weight or bias")
    elif spec.axes and not leaf.shape:
        found.append("a single number has no dimension to slice")
    elif spec.axes:
        found += spec.problems(leaf.shape, sizes)
        if wrong := style.misfit(leaf.shape, sizes[axis]):
            found.append(wrong[0])
            remedy = wrong[1]
    about = f"{leaf.path}: shape {leaf.shape}"
    return [Misfit(f"{about}: {text}, by rule {pattern!r}: {style.rule}", remedy, pattern, leaf.path) for text in found]


def tied(leaf: LeafInfo, patterns: Sequence[str]) -> Misfit:
    """Rules that do not agree on one leaf."""
    return Misfit(
        f"{' = '.join((leaf.path, *leaf.aliases))}: one tied leaf of shape {leaf.shape} with several styles, by the rules "
        f"{', '.join(map(repr, patterns))}",
        "give all of them one style ('vocab' where an embedding also scores)",
    )


def never_first(pattern: str, first: str, path: str) -> Misfit:
    """A rule that others come before, wherever it matches."""
    return Misfit(
        f"rule {pattern!r} never holds: {first!r} matches {path} too, and comes before it",
        f"put it before {first!r}, or take it out",
    )


def matches_nothing(pattern: str, paths: Sequence[str], match: Callable[[str, str], bool]) -> Misfit:
    text = f"rule {pattern!r} matches no parameter"
    anywhere = f"*/{pattern}"
    if any(match(path, anywhere) for path in paths):
        return Misfit(text, f"replace it with {anywhere!r}")
    layers = sorted({_glob(path.rpartition("/")[0] or path) for path in paths})
    names = [f"*/{layer.rpartition('/')[2]}" for layer in layers if "/" in layer]
    near = get_close_matches(pattern.replace(".", "/"), [*layers, *names, *map(_glob, paths)], 1)
    return Misfit(text, f"replace it with {near[0]!r}, or take it out" if near else "take it out")


def with_remedies(misfits: Sequence[Misfit], held: Mapping[str, Sequence[str]]) -> list[Misfit]:
    """With what leaves the others whole: the rule as a whole, or a rule before it where it suits other leaves.

    ``held``: rule -> the paths that it holds for.
    """
    failing: dict[str, set[str]] = {}
    for misfit in misfits:
        failing.setdefault(misfit.pattern, set()).add(misfit.path)

    def remedy(misfit: Misfit) -> str:
        fine = [path for path in held[misfit.pattern] if path not in failing[misfit.pattern]]
        layers = {path.rpartition("/")[0] for path in failing[misfit.pattern]}
        if all(path.rpartition("/")[0] in layers for path in fine):  # biases, which stay with their weights
            return "replace it with 'replicated'"
        glob = _glob(misfit.path)
        return f"put {(glob if all(_glob(path) != glob for path in fine) else misfit.path)!r}: 'replicated' before it"

    return [misfit if misfit.remedy else replace(misfit, remedy=remedy(misfit)) for misfit in misfits]


def message_of(misfits: Sequence[Misfit], name: str, axis: str, sizes: Mapping[str, int], fitting: int) -> str:
    """The message; ``fitting`` is the largest smaller size of the axis that all rules fit, or 1."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    lines = [f"{misfit.text}; {misfit.remedy}" for misfit in misfits]
    advice = [f"With {axis}={fitting} all rules fit."] if fitting > 1 else []
    if any(misfit.pattern for misfit in misfits):
        advice.append(
            "A layer that stays whole gives whole outputs: what they went into by sl.row() takes them by sl.row(split=True), "
            "or stays whole too."
        )
    advice.append(
        "(A rule matches a parameter's path or its layer's, such as 'blocks/*/mlp/up'; the first that matches holds.)"
    )
    return f"{name} does not fit the parameters and the mesh ({mesh}):\n{listing(lines)}\n{' '.join(advice)}"


def _glob(path: str) -> str:
    """For all layers of a list at once: numbers become ``*``."""
    return re.sub(r"(^|/)\d+(?=/|$)", r"\1*", path)
