"""The layers of a model: the elements of its lists of blocks that are like others of the same list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from shardlib.errors import IllegalComposition
from shardlib.plan.claims import LeafInfo
from shardlib.tree import matches

# A leaf below a node: the rest of its path, and what it must be for two elements of a list to be alike.
_Below = tuple[tuple[str, ...], tuple[object, ...]]


def layers_of(function: str, leaves: Sequence[LeafInfo], globs: tuple[str, ...]) -> tuple[str, ...]:
    """The paths of a model's layers, in the order of the pytree.

    Without ``globs`` these are the elements of each outermost list that have the structure, shapes and dtypes of another
    element of it: the layers between the embedding and the head of an `sl.sequential`, for example.

    Args:
        function: the transform that asks, for messages.
        globs: of paths of elements of lists, such as "blocks/*"; empty for the rule above.

    Raises:
        IllegalComposition: there are no layers.
    """
    below = [
        (tuple(path.split("/")), (leaf.shape, leaf.dtype)) for leaf in leaves for path in (leaf.path, *leaf.aliases)
    ]
    found = [path for path, alike in _elements((), below) if (matches(path, globs) if globs else alike)]
    if not found:
        asked = (
            f"no element of a list matches {', '.join(globs)}" if globs else "no list has two elements that are alike"
        )
        raise IllegalComposition(
            f"{function} leaves out layers, which are elements of a list in the parameters' pytree, and {asked}; put the "
            'layers\' parameters in a list, or name them: layers="blocks/*"'
        )
    return tuple(path for path in found if not any(path.startswith(f"{other}/") for other in found))


def _elements(at: tuple[str, ...], leaves: Iterable[_Below]) -> Iterator[tuple[str, bool]]:
    """The path of every element of a list, and whether another element of the list is like it. Lists within a list that has
    such elements are parts of them."""
    children: dict[str, list[_Below]] = {}
    for (first, *rest), kind in leaves:
        children.setdefault(first, []).append((tuple(rest), kind))
    is_list = list(children) == [str(number) for number in range(len(children))]
    kinds = {name: frozenset(each) for name, each in children.items() if all(rest for rest, _ in each)}
    counts = Counter(kinds.values() if is_list else ())
    for name, below in kinds.items():
        if is_list:
            yield "/".join((*at, name)), counts[below] > 1
        if not any(count > 1 for count in counts.values()):
            yield from _elements((*at, name), children[name])
