"""What functions of torch do along a dimension of a tensor: take its numbers together, cut it, or put it elsewhere.

Dimensions are counted from the end, from −1 on. A function gets the arguments of the call, the tensor first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class Piece(NamedTuple):
    """A stretch of a dimension."""

    start: int
    size: int


def name_of(func: Any) -> str:
    """The name of a function, or of an operator or a method in place."""
    return getattr(func, "__name__", "").strip("_")


def named(*names: str) -> list[Any]:
    """The functions and methods of tensors that have these names."""
    return [getattr(owner, name) for name in names for owner in (torch, torch.Tensor) if hasattr(owner, name)]


def _table(*rows: tuple[Sequence[Any], Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    return {function: does for functions, does in rows for function in functions}


# --- together


def _these(x: torch.Tensor, dims: Any) -> frozenset[int]:
    """Some dimensions; all for None, and for the flag that `torch.std` takes in their place."""
    if isinstance(dims, torch.Tensor):  # the larger of two tensors
        return frozenset()
    dims = () if dims is None or isinstance(dims, bool) else dims if isinstance(dims, (tuple, list)) else (dims,)
    return frozenset(_from_end(x, dim) for dim in (dims or range(x.dim())) if isinstance(dim, int))


def _from_end(x: torch.Tensor, dim: int) -> int:
    return dim - x.dim() if dim >= 0 else dim


def _listed(each: Sequence[Any], whole: Any) -> Any:
    """Numbers that are given one by one, or as one sequence."""
    return whole if whole is not None else each[0] if each and isinstance(each[0], (tuple, list)) else each


def _last(x: Any, *args: Any, **options: Any) -> frozenset[int]:
    return frozenset((-1,))


CONVOLUTIONS = [F.conv1d, F.conv2d, F.conv3d]


def _convolved(
    x: torch.Tensor,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> frozenset[int]:
    windows = range(2 - x.dim(), 0)  # of each channel, where it has a group of its own
    return frozenset(windows if groups == x.shape[1] else (1 - x.dim(), *windows))


# Products with another matrix, which keep all dimensions but the last.
_PRODUCTS = [*named("matmul", "mm", "bmm"), torch.Tensor.__matmul__, F.linear]

# Function -> the dimensions whose numbers a call takes together.
TOGETHER: dict[Any, Callable[..., frozenset[int]]] = _table(
    (
        [
            *(
                *named("sum", "mean", "prod", "std", "var", "logsumexp", "cumsum", "cumprod", "logcumsumexp"),
                F.softmax,
            ),
            *(*named("softmax", "log_softmax", "max", "min", "amax", "amin", "argmax", "argmin"), F.log_softmax),
        ],
        lambda x, dim=None, *args, **options: _these(x, dim),
    ),
    (named("sort", "argsort"), lambda x, dim=-1, *args, **options: _these(x, dim)),
    (named("topk"), lambda x, k, dim=-1, *args, **options: _these(x, dim)),
    (
        [*named("norm"), torch.linalg.norm, torch.linalg.vector_norm],
        lambda x, p=2, dim=None, *args, **options: _these(x, dim),
    ),
    ([F.normalize], lambda x, p=2, dim=1, *args, **options: _these(x, dim)),
    ([F.cosine_similarity], lambda x, other, dim=1, *args, **options: _these(x, dim)),
    ([F.layer_norm, F.rms_norm], lambda x, shape, *args, **options: frozenset(range(-len(shape), 0))),
    ([F.group_norm], lambda x, *args, **options: frozenset(range(1 - x.dim(), 0))),
    (named("roll"), lambda x, shifts, dims=None, *args: _these(x, dims)),
    (named("flip"), lambda x, *each, dims=None: _these(x, _listed(each, dims))),
    ([*_PRODUCTS, *named("cdist")], _last),
    ([F.scaled_dot_product_attention], _last),
    (CONVOLUTIONS, _convolved),
)


# --- in pieces


def _bounded(bounds: Sequence[int]) -> list[Piece]:
    return [Piece(start, stop - start) for start, stop in itertools.pairwise(bounds)]


def _in_steps(size: int, each: int) -> list[Piece]:
    return _bounded([*range(0, size, each), size])


def _chunks(x: torch.Tensor, along: int, chunks: int, dim: int = 0) -> list[Piece]:
    size = x.shape[along]
    return _in_steps(size, math.ceil(size / chunks)) if _from_end(x, dim) == along else []


def _sections(x: torch.Tensor, along: int, sections: Any, dim: int = 0) -> list[Piece]:
    if _from_end(x, dim) != along or isinstance(sections, torch.Tensor):
        return []
    size = x.shape[along]
    if isinstance(sections, int):  # the first ones are one larger
        return _bounded([number * (size // sections) + min(number, size % sections) for number in range(sections + 1)])
    return _bounded([0, *sections, size])


def _split(x: torch.Tensor, along: int, split_size: Any, dim: int = 0) -> list[Piece]:
    if _from_end(x, dim) != along:
        return []
    if isinstance(split_size, int):
        return _in_steps(x.shape[along], split_size)
    return _bounded([0, *itertools.accumulate(split_size)])


def _narrow(x: torch.Tensor, along: int, dim: int, start: int, length: int) -> list[Piece]:
    return [Piece(start, length)] if _from_end(x, dim) == along else []


def _select(x: torch.Tensor, along: int, dim: int, index: int) -> list[Piece]:
    return _narrow(x, along, dim, index % x.shape[along], 1) if isinstance(index, int) else []


def _unbind(x: torch.Tensor, along: int, dim: int = 0) -> list[Piece]:
    return _chunks(x, along, x.shape[along], dim)


def item_along(x: torch.Tensor, along: int, index: Any) -> Any:
    """What an index has for a dimension: a number or a slice; None where it has no plain ones."""
    return dict(_walk(x, index) or ()).get(along)


def _indexed(x: torch.Tensor, along: int, index: Any) -> list[Piece]:
    item = item_along(x, along, index)
    if isinstance(item, int):
        return [Piece(item % x.shape[along], 1)]
    if not isinstance(item, slice):
        return []
    start, stop, step = item.indices(x.shape[along])
    return [Piece(start, max(stop - start, 0))] if step == 1 else []


def _walk(x: torch.Tensor, index: Any) -> list[tuple[int | None, Any]] | None:
    """An index in the order of what it keeps: each with its dimension, None for a new one. None if some are no plain ones."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(item is None or item is Ellipsis or type(item) in (int, slice) for item in items):
        return None
    left = x.dim() - sum(item is not None and item is not Ellipsis for item in items)
    place = next((number for number, item in enumerate(items) if item is Ellipsis), len(items))
    items[place : place + 1] = [slice(None)] * left
    found: list[tuple[int | None, Any]] = []
    dim = -x.dim()
    for item in items:
        found.append((None, None) if item is None else (dim, item))
        dim += item is not None
    return found


# Function -> the pieces that a call makes along a dimension, which is its second argument; none if it cuts others.
PIECES: dict[Any, Callable[..., list[Piece]]] = _table(
    (named("chunk"), _chunks),
    (named("tensor_split"), _sections),
    ([F.glu], lambda x, along, dim=-1: _chunks(x, along, 2, dim)),
    (named("split"), _split),
    (named("narrow"), _narrow),
    (named("select"), _select),
    (named("unbind"), _unbind),
    ([torch.Tensor.__getitem__], _indexed),
)


# --- elsewhere

# What makes each number of its result of one number of each argument, by name.
NUMBER_BY_NUMBER = {
    *(
        "add",
        "sub",
        "rsub",
        "subtract",
        "mul",
        "multiply",
        "div",
        "rdiv",
        "divide",
        "true_divide",
        "pow",
        "rpow",
        "neg",
    ),
    *(
        "abs",
        "exp",
        "log",
        "log1p",
        "expm1",
        "sqrt",
        "rsqrt",
        "square",
        "reciprocal",
        "erf",
        "sin",
        "cos",
        "tanh",
        "sigmoid",
    ),
    *("relu", "relu6", "leaky_relu", "prelu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "softsign"),
    *(
        "hardswish",
        "hardtanh",
        "hardsigmoid",
        "logsigmoid",
        "clamp",
        "clip",
        "maximum",
        "minimum",
        "where",
        "masked_fill",
    ),
    *("dropout", "alpha_dropout", "nan_to_num", "lerp", "addcmul", "clone", "contiguous", "to", "type", "type_as"),
    *("float", "double", "half", "bfloat16"),
}


def _swapped(x: torch.Tensor, along: int, dim0: int, dim1: int) -> int:
    dims = _from_end(x, dim0), _from_end(x, dim1)
    return dims[1 - dims.index(along)] if along in dims else along


def _permuted(x: torch.Tensor, along: int, *each: Any, dims: Any = None) -> int:
    order = [_from_end(x, dim) for dim in _listed(each, dims)]
    return order.index(along) - x.dim()


def _kept(x: torch.Tensor, along: int, index: Any) -> int | None:
    kept = [dim for dim, item in _walk(x, index) or () if not isinstance(item, int)]
    return kept.index(along) - len(kept) if along in kept else None


# Function -> where a call puts a dimension, which is its second argument; None if it is not there any more.
MOVES: dict[Any, Callable[..., int | None]] = _table(
    (named("transpose", "swapaxes", "swapdims"), _swapped),
    ([torch.Tensor.mT.__get__, torch.Tensor.T.__get__], lambda x, along: _swapped(x, along, -1, -2)),  # type: ignore[attr-defined]
    (named("permute"), _permuted),
    (named("unsqueeze"), lambda x, along, dim: along if dim % (x.dim() + 1) <= x.dim() + along else along - 1),
    ([torch.Tensor.__getitem__], _kept),
    (_PRODUCTS, lambda x, along, *args, **options: along if along < -1 else None),
    ([F.embedding], lambda ids, along, *args, **options: along - 1),
)


class Grouping(NamedTuple):
    """What becomes of a dimension in another shape.

    Attributes:
        dim: its place, or that of the first of those that it is split into.
        size: of that one.
        given: whether the call gives this size and leaves one of the others to be computed, rather than the reverse (True,
            False), or gives all of them (None).
    """

    dim: int
    size: int
    given: bool | None


def _grouped(x: torch.Tensor, along: int, shape: Sequence[int], asked: Sequence[int]) -> Grouping | None:
    before, size = math.prod(x.shape[: x.dim() + along]), x.shape[along]
    at = [place for place in range(len(shape)) if math.prod(shape[:place]) == before]  # all but the last have size 1
    ones = sum(math.prod(x.shape[dim:along]) == 1 for dim in range(-x.dim(), along))
    if not at or (len(at) > 1 + ones and -1 not in (asked[number] for number in at)):
        return None  # a dimension of size 1 may be the groups, or a new one
    place = next((number for number in at if asked[number] == -1), at[-1])
    if size % shape[place] and shape[place] % size:
        return None
    inside = [number for number in range(place, len(shape)) if math.prod(shape[place : number + 1]) <= size]
    given = False if asked[place] == -1 else True if any(asked[number] == -1 for number in inside) else None
    return Grouping(place - len(shape), shape[place], given)


def grouped(func: Any, x: torch.Tensor, along: int, args: Sequence[Any], result: torch.Tensor) -> Grouping | None:
    """What a call of a function that gives a tensor another shape makes of a dimension; None if it mixes it with others, or
    is no such function.

    Args:
        args: what follows the tensor.
    """
    shape = list(result.shape)
    if func in _VIEWS and args:
        asked = _listed(args, None)
        known = len(asked) == len(shape) and all(isinstance(size, int) for size in asked)
        return _grouped(x, along, shape, asked) if known else None
    if func in _UNFLATTEN and len(args) == 2 and all(type(each) is int for each in (args[0], *args[1])):
        place = args[0] % x.dim()
        return _grouped(x, along, shape, [*x.shape[:place], *args[1], *x.shape[place + 1 :]])
    return _grouped(x, along, shape, shape) if func in _FLATTEN else None


_VIEWS, _FLATTEN = {*named("view", "reshape")}, {*named("flatten")}
_UNFLATTEN = {*named("unflatten")}


def summed(equation: str, place: int, along: int) -> bool:
    """Whether an equation of `torch.einsum` sums over a dimension of an argument."""
    arguments, arrow, result = equation.replace(" ", "").partition("->")
    letters = arguments.split(",")[place].rpartition("...")[2]
    if -along > len(letters):
        return False
    letter = letters[along]
    return letter not in result if arrow else arguments.count(letter) > 1
