"""Plain trees of parameters, in which tied leaves are leaves of their own; in a `Sharded` tree they are one parameter."""

from __future__ import annotations

from collections.abc import Sequence

from shardlib.errors import TreeError, listing
from shardlib.tree import Tree, flatten, same_values, tied_pairs


def require_untied(params: Tree) -> None:
    """Refuse tied leaves for an update in place.

    Raises:
        TreeError: lists them.
    """
    _refuse(tied_pairs(params), "what is added in place is added twice")


def require_counted_once(params: Tree, updates: Tree) -> None:
    """Refuse leaves that are one parameter, since they are tied and have one gradient, for sums over all elements.

    Raises:
        TreeError: lists them.
    """
    paths, leaves, _ = flatten(updates)
    given = dict(zip(paths, leaves, strict=True))
    one = [(first, other) for first, other in tied_pairs(params) if same_values(given[first], given[other])]
    _refuse(one, "a sum over all elements counts them twice")


def _refuse(pairs: Sequence[tuple[str, str]], why: str) -> None:
    if pairs:
        raise TreeError(
            f"leaves of a plain tree are tied, and {why}:\n{listing([f'{first} and {other}' for first, other in pairs])}\n"
            "Shard the tree, before tx.init too, so that they are one parameter: params = sl.shard(params, sl.make_mesh())"
        )
