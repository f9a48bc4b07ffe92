"""The layers of a model: the elements of its lists of blocks that are like others of the same list."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from shardlib.errors import IllegalComposition, listing
from shardlib.plan.arguments import refused, texts
from shardlib.plan.claims import LeafInfo
from shardlib.tree import matches

# A leaf below a node: the rest of its path, and what it must be for two elements of a list to be alike.
_Below = tuple[tuple[str, ...], tuple[object, ...]]
_Kind = frozenset[_Below]


def globs_in_order(function: str, layers: str | Sequence[str]) -> tuple[str, ...]:
    """The argument ``layers`` of a transform, globs of which the order counts.

    Raises:
        IllegalComposition: it is no text and no list of texts.
    """
    if isinstance(layers, Set) and len(layers) > 1:
        raise refused(function, "layers", layers, "a set has no order; give a list, in the order in which layers run")
    return texts(function, "layers", layers, "glob of layers", 0)


def layers_of(function: str, leaves: Sequence[LeafInfo], globs: tuple[str, ...]) -> tuple[str, ...]:
    """The paths of a model's layers, in the order in which they run: that of ``globs``, and within a list its own.

    Without ``globs`` these are the elements of the one outermost list that have the structure, shapes and dtypes of another
    element of it: the layers between the embedding and the head of an `sl.sequential`, for example, tied or not.

    Args:
        function: the transform that asks, for messages.
        globs: of paths of elements of lists, such as "blocks/*"; empty for the rule above.

    Raises:
        IllegalComposition: there are no layers, or one glob of none; layers are elements of several lists, and ``globs`` do
            not say which runs first; layers have no parameter of their own, by which they could be told apart.
    """
    below = [
        (tuple(path.split("/")), (leaf.shape, leaf.dtype)) for leaf in leaves for path in (leaf.path, *leaf.aliases)
    ]
    elements = dict(_elements((), below))
    if globs:
        found = [[path for path in elements if matches(path, glob)] for glob in globs]
        asked = [f"no element of a list matches {glob}" for glob, paths in zip(globs, found, strict=True) if not paths]
    else:
        found = [[path for path, kind in elements.items() if kind is not None]]
        asked = [] if found[0] else ["no list has two elements that are alike"]
    if asked:
        raise IllegalComposition(
            f"{function} leaves out layers, which are elements of a list of parameters, and "
            f'{" and ".join(asked)}; put them in a list, or name them: layers="blocks/*"'
        )
    named = {path for paths in found for path in paths}
    found = [[path for path in paths if _around(path, named) is None] for paths in found]
    _require_order(function, found)
    layers = tuple(dict.fromkeys(path for paths in found for path in paths))
    tied = _tied(leaves, layers)
    if not globs and tied and _are_ends(layers, [elements[path] for path in layers], tied):
        return layers[1:-1]
    _require_told_apart(function, tied)
    return layers


def _around(path: str, nodes: Set[str]) -> str | None:
    """The node of these that a path lies below; None if it lies below none."""
    above = itertools.accumulate(path.split("/")[:-1], "{}/{}".format)
    return next((node for node in above if node in nodes), None)


def _require_order(function: str, found: Sequence[Sequence[str]]) -> None:
    """Refuse layers of several lists that are found together: the pytree has its lists in the order of their names."""
    lists = [list(dict.fromkeys(path.rpartition("/")[0] for path in paths)) for paths in found]
    if any(len(each) > 1 for each in lists):
        every = dict.fromkeys(f"{name}/*" for each in lists for name in each)
        raise IllegalComposition(
            f"{function} numbers layers in the order in which they run, and these are of several lists: {', '.join(every)}. "
            f"Name the lists in that order: layers={list(every)} if {next(iter(every))} runs first"
        )


def _tied(leaves: Sequence[LeafInfo], layers: Sequence[str]) -> dict[str, set[str]]:
    """Layers without a parameter of their own -> the layers and leaves that theirs are tied to."""
    owns, tied, known = set[str](), {layer: set[str]() for layer in layers}, frozenset(layers)
    for leaf in leaves:
        holders = {_around(path, known) or path for path in (leaf.path, *leaf.aliases)}
        owns |= holders if len(holders) == 1 else set()
        for layer in holders & known:
            tied[layer] |= holders - {layer}
    return {layer: others for layer, others in tied.items() if layer not in owns}


def _are_ends(layers: Sequence[str], kinds: Sequence[_Kind | None], tied: Mapping[str, set[str]]) -> bool:
    """Whether the first and the last of these elements are embedding and head: tied to each other, and unlike the others."""
    first, last = layers[0], layers[-1]
    tied_ends = tied.keys() == {first, last} and tied[first] == {last}
    return tied_ends and kinds[0] == kinds[-1] and kinds[0] not in kinds[1:-1] and len(layers) > 2


def _require_told_apart(function: str, tied: Mapping[str, set[str]]) -> None:
    """Refuse layers all of whose parameters are tied to others: which one a block is, its parameters tell."""
    if tied:
        shown = [f"{layer}: tied to {', '.join(sorted(others))}" for layer, others in tied.items()]
        raise IllegalComposition(
            f"{function} tells layers apart by parameters of their own, which these do not have:\n{listing(shown)}\n"
            "Untie a parameter of each (a copy, such as of its norm), or name other layers: layers=[...]"
        )


def _elements(at: tuple[str, ...], leaves: Iterable[_Below]) -> Iterator[tuple[str, _Kind | None]]:
    """The path of every element of a list, and its kind if another element of the list is like it. Lists within a list that
    has such elements are parts of them."""
    children: dict[str, list[_Below]] = {}
    for (first, *rest), kind in leaves:
        children.setdefault(first, []).append((tuple(rest), kind))
    is_list = set(children) == {str(number) for number in range(len(children))}
    if is_list:  # leaves that are tied to an earlier one come with that
        children = {str(number): children[str(number)] for number in range(len(children))}
    kinds = {name: frozenset(each) for name, each in children.items() if all(rest for rest, _ in each)}
    counts = Counter(kinds.values() if is_list else ())
    for name, below in kinds.items():
        if is_list:
            yield "/".join((*at, name)), below if counts[below] > 1 else None
        if not any(count > 1 for count in counts.values()):
            yield from _elements((*at, name), children[name])
