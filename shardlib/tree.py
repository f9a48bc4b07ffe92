"""Pytrees: flattening with readable paths, leaf globs and ties."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any

import optree
import torch
from typing_extensions import TypeVar

from shardlib.common._compat import FakeTensor, pytree, torch_nodes
from shardlib.errors import TreeError, listing

Tree = Any
T = TypeVar("T", default=Any)  # a user's pytree, such as dict[str, torch.Tensor]
T_co = TypeVar("T_co", default=Any, covariant=True)
TreeDef = optree.PyTreeSpec
_adopted: set[type] = set()
_adopting = Lock()  # simulated ranks are threads


def path_name(path: Sequence[Any]) -> str:
    """``("blocks", 0, "weight")`` -> ``"blocks/0/weight"``."""
    return "/".join(str(part) for part in path)


def flatten(tree: Tree) -> tuple[list[str], list[Any], TreeDef]:
    """The paths, leaves and structure of a pytree, in optree's order (dictionaries sorted by key).

    Raises:
        TreeError: leaves whose keys differ and have one path, by which one of them would be taken for the other.
    """
    paths, leaves, treedef = optree.tree_flatten_with_path(tree)
    return path_names(paths), leaves, treedef


def path_names(paths: Sequence[tuple[Any, ...]]) -> list[str]:
    """`path_name` of the path of each leaf of a tree. Raises `TreeError`: as for `flatten`."""
    names = [path_name(path) for path in paths]
    if len(set(names)) < len(names):
        keys: dict[str, list[str]] = {}
        for name, path in zip(names, paths, strict=True):
            keys.setdefault(name, []).append("".join(f"[{part!r}]" for part in path) or "the tree itself")
        failures = [f"{name}: {' and '.join(each)}" for name, each in keys.items() if len(each) > 1]
        raise TreeError(
            f"different leaves of a tree have one path:\n{listing(failures)}\nRename a key: keys may not hold '/' where "
            "nested keys give the same path, nor be a number and its text"
        )
    return names


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[tuple[Any, ...], Any]]:
    """Path and value of each leaf. A path has the names of fields, which stay the same when others are added."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, is_leaf=is_leaf)
    return [
        (tuple(each.field if isinstance(each, optree.NamedTupleEntry) else each.entry for each in accessor), leaf)
        for accessor, leaf in zip(accessors, leaves, strict=True)
    ]


def unflatten(treedef: TreeDef, leaves: Iterable[Any]) -> Tree:
    """The pytree of a structure and its leaves; the inverse of `flatten`."""
    return optree.tree_unflatten(treedef, leaves)


def tree_map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply ``fn`` to the leaves of pytrees of one structure; the results are a pytree of that structure."""
    return optree.tree_map(fn, tree, *rest)


def tree_unzip(like: Tree, tree: Tree, count: int) -> tuple[Tree, ...]:
    """Transpose a tree of ``count``-tuples, one for each leaf of ``like``, into ``count`` trees of that structure."""
    return tuple(optree.tree_map(lambda _, values, at=at: values[at], like, tree) for at in range(count))


def leaves_of(tree: Tree) -> list[Any]:
    """The leaves of a pytree, in the order of `flatten`."""
    return optree.tree_leaves(tree)


def tensors_of(tree: Tree) -> list[torch.Tensor]:
    """The tensors of a pytree."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, torch.Tensor)]


def matches(path: str, globs: str | Sequence[str]) -> bool:
    """Whether a path matches one of the globs (``*`` crosses ``/``)."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in globs_of(globs))


def globs_of(globs: str | Sequence[str]) -> tuple[str, ...]:
    """One or several globs as a tuple. One is text, which is a sequence too, of globs such as ``*``."""
    return (globs,) if isinstance(globs, str) else tuple(globs)


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
    """A remedy for leaves of a dtype that optimizers do not train, complex or 8-bit floats; None for other dtypes."""
    if dtype.is_complex:
        return "hold torch.view_as_real(leaf), and let the loss take torch.complex(leaf[..., 0], leaf[..., 1])"
    if dtype.is_floating_point and dtype.itemsize == 1:
        return "hold leaf.bfloat16() in the tree, or add sl.precision('bf16'), which casts it"
    return None


def check_trained(tree: Tree) -> None:
    """Raise one `TreeError` that lists every leaf of ``tree`` of a dtype that optimizers do not train: see `untrained`."""
    paths, leaves, _ = flatten(tree)
    dtypes = [(path, leaf.dtype) for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
    if failures := [f"{path}: {dtype}; {remedy}" for path, dtype in dtypes if (remedy := untrained(dtype))]:
        raise TreeError(f"{len(failures)} leaves of dtypes that are not trained:\n{listing(failures)}")


def trained_part(tree: Tree) -> Tree:
    """The tree with None for integer and boolean tensors, which are not trained."""
    return tree_map(lambda leaf: None if isinstance(leaf, torch.Tensor) and is_integral(leaf.dtype) else leaf, tree)


def is_integral(dtype: torch.dtype) -> bool:
    """Whether a dtype is that of integers or booleans."""
    return not (dtype.is_floating_point or dtype.is_complex)


def check_alike(what: str, tree: Tree, like: Tree, names: tuple[str, str]) -> None:
    """Raise one `TreeError` that lists the paths and shapes in which two pytrees differ.

    Args:
        what: the caller, for the message.
        names: names of ``tree`` and ``like``, for the message.
    """
    paths, leaves, treedef = flatten(tree)
    like_paths, like_leaves, like_treedef = flatten(like)
    given, wanted = dict(zip(paths, leaves, strict=True)), dict(zip(like_paths, like_leaves, strict=True))
    name, like_name = names
    failures = [f"{path}: in the {like_name} alone" for path in wanted.keys() - given.keys()]
    failures += [f"{path}: in the {name} alone" for path in given.keys() - wanted.keys()]
    for path, leaf in given.items():
        if path in wanted and getattr(leaf, "shape", None) != wanted[path].shape:
            shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            failures.append(f"{path}: {name} of shape {shape}, {like_name} of shape {tuple(wanted[path].shape)}")
    if not failures and treedef != like_treedef:
        failures.append(f"the structures: {treedef} and {like_treedef}")
    if failures:
        raise TreeError(f"{what}: {name} and {like_name} must match, and differ in\n{listing(sorted(failures))}")


def tied_pairs(tree: Tree) -> list[tuple[str, str]]:
    """The paths of each leaf that is tied to an earlier one, and of that one first; see `ties`."""
    paths, leaves, _ = flatten(tree)
    return [(paths[owner], paths[at]) for at, owner in enumerate(ties(leaves)) if owner != at]


def ties(leaves: Sequence[torch.Tensor]) -> list[int]:
    """For each leaf the index of the first leaf that is the same tensor.

    Two leaves are tied if they are one object, or views of the same memory with the same shape and stride
    (``module.weight`` of two modules, for example). Meta and fake tensors are tied only if they are one object.
    """
    first: dict[Any, int] = {}
    owners = []
    for index, leaf in enumerate(leaves):
        key: Any = id(leaf)
        if leaf.device.type != "meta" and leaf.numel() > 0 and not isinstance(leaf, FakeTensor):
            key = (leaf.device, leaf.data_ptr(), leaf.dtype, tuple(leaf.shape), leaf.stride())
        owners.append(first.setdefault(key, index))
    return owners


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are one, or equal."""
    return one is other or torch.equal(one, other)


Children = Callable[[Any], tuple[Iterable[Any], Any]]
Build = Callable[[Any, Iterable[Any]], Any]


def register_node(cls: type, children: Children, build: Build, in_torch: tuple[Children, Build] | None = None) -> None:
    """Register a class as a pytree node with optree and with torch's own pytrees.

    ``children(node)`` returns the children and static data; ``build(static, children)`` makes the node again. ``in_torch``
    are these two for torch's pytrees, where they differ.
    """
    torch_children, torch_build = in_torch or (children, build)

    def flatten_in_torch(node: Any) -> tuple[list[Any], Any]:
        values, static = torch_children(node)
        return list(values), static

    everywhere = optree.registry.__GLOBAL_NAMESPACE
    optree.register_pytree_node(cls, lambda node: (*children(node), None), build, namespace=everywhere)
    pytree.register_pytree_node(cls, flatten_in_torch, lambda values, static: torch_build(static, values))


def adopt(tree: Tree) -> None:
    """Make optree flatten what torch's pytrees flatten, in ``tree``: outputs of transformers' models, for example."""
    while found := {type(leaf) for leaf in leaves_of(tree)} & torch_nodes.keys():
        if not adopt_classes(found):
            return


def adopt_classes(classes: Iterable[type]) -> bool:
    """Register with optree the classes among these that torch's pytrees know; whether there are any. Not torch's own."""
    with _adopting:
        new = [cls for cls in classes if cls not in _adopted and cls.__module__.partition(".")[0] != "torch"]
        for cls in new:
            _adopt(cls)
            _adopted.add(cls)
    return bool(new)


def _adopt(cls: type) -> None:
    node = torch_nodes[cls]

    def children(value: Any) -> tuple[Iterable[Any], Any, Iterable[Any] | None]:
        if node.flatten_with_keys_fn is None:
            return (*node.flatten_fn(value), None)
        pairs, static = node.flatten_with_keys_fn(value)
        return [child for _, child in pairs], static, [str(key).strip("[]'.") for key, _ in pairs]

    def build(static: Any, values: Iterable[Any]) -> Any:
        return node.unflatten_fn(values, static)

    optree.register_pytree_node(cls, children, build, namespace=optree.registry.__GLOBAL_NAMESPACE)


def adopted_in(treedef: TreeDef) -> set[type]:
    """The classes of `adopt` in a structure, which other processes may have to adopt before they can read it."""
    if not _adopted:
        return set()
    return _adopted & {treedef.type} | set().union(*map(adopted_in, treedef.children()))
