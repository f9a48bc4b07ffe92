"""Misfits: the rules of a tensor slicing that do not fit the parameters or the mesh, with remedies."""

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
    """One failure of a rule.

    Attributes:
        text: the failure, with the leaf's path and shape, and the rule.
        remedy: the remedy; "" if it is to leave the leaf whole, which `with_remedies` spells out.
        pattern: the rule's glob, or "".
        path: the path of the leaf to leave whole, or "".
    """

    text: str
    remedy: str = ""
    pattern: str = ""
    path: str = ""


def misfits_of(
    leaf: LeafInfo, pattern: str, style: Style, spec: P, axis: str, sizes: Mapping[str, int]
) -> list[Misfit]:
    """The reasons for which a rule cannot slice a leaf over this mesh."""
    reasons, remedy = [], ""
    if not leaf.dtype.is_floating_point:
        reasons.append(f"{leaf.dtype} is no layer's weight or bias")
    elif spec.axes and not leaf.shape:
        reasons.append("a single number has no dimension to slice")
    elif spec.axes:
        reasons += spec.problems(leaf.shape, sizes)
        if misfit := style.misfit(leaf.shape, sizes[axis]):
            reasons.append(misfit[0])
            remedy = misfit[1]
    shape, rule = f"{leaf.path}: shape {leaf.shape}", f"by rule {pattern!r}: {style.rule}"
    return [Misfit(f"{shape}: {reason}, {rule}", remedy, pattern, leaf.path) for reason in reasons]


def tied(leaf: LeafInfo, patterns: Sequence[str]) -> Misfit:
    """A tied leaf to whose paths rules give different styles."""
    return Misfit(
        f"{' = '.join((leaf.path, *leaf.aliases))}: one tied leaf of shape {leaf.shape} with several styles, by the rules "
        f"{', '.join(map(repr, patterns))}",
        "give all of them one style ('vocab' where an embedding also scores)",
    )


def never_first(pattern: str, first: str, path: str) -> Misfit:
    """A rule that never holds, since an earlier rule matches every parameter that it matches."""
    return Misfit(
        f"rule {pattern!r} never holds: {first!r} matches {path} too, and comes before it",
        f"put it before {first!r}, or take it out",
    )


def matches_nothing(pattern: str, paths: Sequence[str], match: Callable[[str, str], bool]) -> Misfit:
    """A rule that matches no parameter; the remedy is the most similar glob that does."""
    text = f"rule {pattern!r} matches no parameter"
    anywhere = f"*/{pattern}"
    if any(match(path, anywhere) for path in paths):
        return Misfit(text, f"replace it with {anywhere!r}")
    layers = sorted({_glob(path.rpartition("/")[0] or path) for path in paths})
    names = [f"*/{layer.rpartition('/')[2]}" for layer in layers if "/" in layer]
    near = get_close_matches(pattern.replace(".", "/"), [*layers, *names, *map(_glob, paths)], 1)
    return Misfit(text, f"replace it with {near[0]!r}, or take it out" if near else "take it out")


def with_remedies(misfits: Sequence[Misfit], held: Mapping[str, Sequence[str]]) -> list[Misfit]:
    """The misfits, with the missing remedies: replace the rule, or put a rule before it if it suits other leaves.

    Args:
        held: glob of a rule -> the paths for which it is the first match.
    """
    failing: dict[str, set[str]] = {}
    for misfit in misfits:
        failing.setdefault(misfit.pattern, set()).add(misfit.path)

    def remedy(misfit: Misfit) -> str:
        fine = [path for path in held[misfit.pattern] if path not in failing[misfit.pattern]]
        layers = {path.rpartition("/")[0] for path in failing[misfit.pattern]}
        if all(path.rpartition("/")[0] in layers for path in fine):  # only biases fit, and they belong to their weights
            return "replace it with 'replicated'"
        glob = _glob(misfit.path)
        return f"put {(glob if all(_glob(path) != glob for path in fine) else misfit.path)!r}: 'replicated' before it"

    return [misfit if misfit.remedy else replace(misfit, remedy=remedy(misfit)) for misfit in misfits]


def message_of(misfits: Sequence[Misfit], name: str, axis: str, sizes: Mapping[str, int], fitting: int) -> str:
    """The message on all misfits. ``fitting`` is the largest smaller size of the axis that suits all rules, or 1."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    lines = [f"{misfit.text}; {misfit.remedy}" for misfit in misfits]
    advice = [f"With {axis}={fitting} all rules fit."] if fitting > 1 else []
    if any(misfit.pattern for misfit in misfits):
        advice.append(
            "A layer that stays whole gives whole outputs: change the layer after it from sl.row() to sl.row(split=True), or "
            "leave that layer whole too."
        )
    advice.append(
        "(A rule matches a parameter's path or its layer's, such as 'blocks/*/mlp/up'; the first that matches holds.)"
    )
    return f"{name} does not fit the parameters and the mesh ({mesh}):\n{listing(lines)}\n{' '.join(advice)}"


def _glob(path: str) -> str:
    """A glob for the same leaf of all layers of a list: numbers in the path become ``*``."""
    return re.sub(r"(^|/)\d+(?=/|$)", r"\1*", path)
