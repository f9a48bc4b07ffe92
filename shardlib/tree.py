"""Pytrees: flattening with readable paths, leaf globs and ties."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree
import torch

from shardlib._compat import FakeTensor, pytree
from shardlib.errors import TreeError, listing

Tree = Any
TreeDef = optree.PyTreeSpec


def path_name(path: Sequence[Any]) -> str:
    """``("blocks", 0, "weight")`` -> ``"blocks/0/weight"``."""
    return "/".join(str(part) for part in path)


def flatten(tree: Tree) -> tuple[list[str], list[Any], TreeDef]:
    """Paths, leaves and structure of a pytree, in optree's order (dictionaries sorted by key)."""
    paths, leaves, treedef = optree.tree_flatten_with_path(tree)
    return [path_name(path) for path in paths], leaves, treedef


def unflatten(treedef: TreeDef, leaves: Iterable[Any]) -> Tree:
    return optree.tree_unflatten(treedef, leaves)


def tree_map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    return optree.tree_map(fn, tree, *rest)


def tree_unzip(like: Tree, tree: Tree, count: int) -> tuple[Tree, ...]:
    """The first, second, … of the ``count`` values that ``tree`` has for each leaf of ``like``, as a tree each."""
    return tuple(optree.tree_map(lambda _, values, at=at: values[at], like, tree) for at in range(count))


def leaves_of(tree: Tree) -> list[Any]:
    return optree.tree_leaves(tree)


def matches(path: str, globs: str | Sequence[str]) -> bool:
    """Whether a leaf's path matches one of the globs (``*`` crosses ``/``)."""
    patterns = (globs,) if isinstance(globs, str) else globs
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def check_tensors(paths: Sequence[str], leaves: Sequence[Any], what: str = "parameter") -> None:
    """Raise one `TreeError` that lists every leaf that is not a dense tensor."""
    failures = []
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            failures.append(f"{path}: {type(leaf).__name__}, not a tensor; close over it or wrap it in torch.tensor")
        elif leaf.layout is not torch.strided:
            failures.append(f"{path}: layout {leaf.layout}; call .to_dense() first")
    if failures:
        raise TreeError(f"{len(failures)} {what} leaves cannot be sharded:\n{listing(failures)}")


def untrained(dtype: torch.dtype) -> str | None:
    """What to hold instead of a leaf that autograd takes and optimizers do not, complex or of 8 bits; None for others."""
    if dtype.is_complex:
        return (
            "hold torch.view_as_real(leaf) in the tree, and let the loss take torch.complex(leaf[..., 0], leaf[..., 1])"
        )
    if dtype.is_floating_point and dtype.itemsize == 1:
        return "hold leaf.bfloat16() in the tree, or add sl.precision('bf16'), which casts it"
    return None


def check_trained(tree: Tree) -> None:
    """Raise one `TreeError` that lists every leaf of ``tree`` that optimizers do not take; see `untrained`."""
    paths, leaves, _ = flatten(tree)
    found = [(path, leaf.dtype) for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
    if failures := [f"{path}: {dtype}; {instead}" for path, dtype in found if (instead := untrained(dtype))]:
        raise TreeError(f"{len(failures)} leaves of dtypes that are not trained:\n{listing(failures)}")


def check_alike(what: str, tree: Tree, like: Tree, names: tuple[str, str]) -> None:
    """Raise one `TreeError` listing the leaves of ``tree`` that ``like`` lacks, has beside, or has in another shape.

    ``names`` of the two, for the message of ``what``.
    """
    paths, leaves, treedef = flatten(tree)
    theirs, others, other_treedef = flatten(like)
    mine, wanted = dict(zip(paths, leaves, strict=True)), dict(zip(theirs, others, strict=True))
    one, other = names
    failures = [f"{path}: in the {other} alone" for path in wanted.keys() - mine.keys()]
    failures += [f"{path}: in the {one} alone" for path in mine.keys() - wanted.keys()]
    for path, leaf in mine.items():
        if path in wanted and getattr(leaf, "shape", None) != wanted[path].shape:
            shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            failures.append(f"{path}: {one} of shape {shape}, {other} of shape {tuple(wanted[path].shape)}")
    if not failures and treedef != other_treedef:
        failures.append(f"the structures: {treedef} and {other_treedef}")
    if failures:
        raise TreeError(f"{what}: {one} and {other} are to be alike, and differ in\n{listing(sorted(failures))}")


def ties(leaves: Sequence[torch.Tensor]) -> list[int]:
    """For each leaf the index of the first leaf that is the same tensor.

    Two leaves are tied when they are one object, or view the same memory with the same shape and stride
    (``module.weight`` reached through two modules, say). Meta and fake tensors are tied only as one object.
    """
    first: dict[Any, int] = {}
    owners = []
    for index, leaf in enumerate(leaves):
        key: Any = id(leaf)
        if leaf.device.type != "meta" and leaf.numel() > 0 and not isinstance(leaf, FakeTensor):
            key = (leaf.device, leaf.data_ptr(), leaf.dtype, tuple(leaf.shape), leaf.stride())
        owners.append(first.setdefault(key, index))
    return owners


def register_node(
    cls: type, children: Callable[[Any], tuple[Iterable[Any], Any]], build: Callable[[Any, Iterable[Any]], Any]
) -> None:
    """Register a class as a pytree node with optree and with torch's own pytrees.

    ``children(node)`` returns the children and the static part; ``build(static, children)`` inverts it.
    """
    optree.register_pytree_node(
        cls,
        lambda node: (*children(node), None),
        build,
        namespace=optree.registry.__GLOBAL_NAMESPACE,
    )
    pytree.register_pytree_node(
        cls,
        lambda node: _torch_children(children(node)),
        lambda values, static: build(static, values),
    )


def _torch_children(pair: tuple[Iterable[Any], Any]) -> tuple[list[Any], Any]:
    values, static = pair
    return list(values), static
