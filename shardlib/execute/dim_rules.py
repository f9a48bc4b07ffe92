"""What functions of torch do along one dimension of a tensor: show some of it, put it elsewhere, or take it together.

Dimensions are counted from the end, from −1 on. Functions are known by name, as torch has each in several places. What a view
shows is read off a view of a tensor without memory, in which the dimension alone, and what follows it, has strides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardlib.common._compat import estimated, no_modes, pytree, storage_id, without_func

_Args = Sequence[Any]
_Kwargs = Mapping[str, Any]

_POINTWISE = {
    "add", "sub", "rsub", "subtract", "mul", "multiply", "div", "rdiv", "divide", "true_divide", "pow", "rpow", "neg", "abs",
    "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "square", "reciprocal", "erf", "sin", "cos", "tanh", "sigmoid", "relu",
    "relu6", "leaky_relu", "prelu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "softsign", "hardswish",
    "hardtanh", "hardsigmoid", "logsigmoid", "clamp", "clip", "maximum", "minimum", "where", "masked_fill", "dropout",
    "alpha_dropout", "nan_to_num", "lerp", "addcmul", "clone", "contiguous", "to", "type", "type_as", "float", "double",
    "half", "bfloat16",
}  # fmt: skip
PRODUCTS = {"matmul", "mm", "bmm", "linear"}  # with another matrix: they keep all dimensions but the last
CONVOLUTIONS = {"conv1d", "conv2d", "conv3d"}
RECURRENT = {"gru", "lstm", "rnn_tanh", "rnn_relu"}
_LAST = {*PRODUCTS, "cdist", "scaled_dot_product_attention", "inner", "dot", "vdot", "pairwise_distance"}
# The place of their dimensions among the arguments after the tensor, and what these are by default: None for all.
_DIMS: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys((
        "sum", "mean", "prod", "std", "var", "logsumexp", "cumsum", "cumprod", "logcumsumexp", "softmax", "log_softmax",
        "max", "min", "amax", "amin", "argmax", "argmin", "softmin", "median", "nanmedian", "nansum", "nanmean", "std_mean",
        "var_mean", "cummax", "cummin", "count_nonzero",
    ), (0, None)),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm", "roll", "quantile", "nanquantile"), (1, None)),
    **dict.fromkeys(("kthvalue", "diff", "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft"), (1, -1)),
    "mode": (0, -1),
    "gumbel_softmax": (3, -1),
    "aminmax": (0, None),  # by name alone
    "linalg_vecdot": (1, -1),
    **dict.fromkeys(("normalize", "cosine_similarity"), (1, 1)),
    **dict.fromkeys(("sort", "argsort"), (0, -1)),
    "topk": (1, -1),
}  # fmt: skip
_VIEWS = {
    "chunk", "tensor_split", "split", "narrow", "select", "unbind", "getitem", "transpose", "swapaxes", "swapdims", "permute",
    "unsqueeze", "view", "reshape", "flatten", "unflatten", "glu",
}  # fmt: skip
_TRANSPOSED = {torch.Tensor.mT.__get__, torch.Tensor.T.__get__}  # type: ignore[attr-defined]


def name_of(func: Any) -> str:
    """The name of a function, or of an operator or a method in place."""
    return getattr(func, "__name__", "").strip("_")


def pointwise(func: Any, args: _Args, kwargs: _Kwargs) -> bool:
    """Whether a call makes each number of its result of one number of each argument. ``args`` are all of them."""
    name = name_of(func)
    if name in ("max", "min"):  # the larger of two tensors
        return isinstance(kwargs.get("other", args[1] if len(args) > 1 else None), torch.Tensor)
    return name in _POINTWISE


def together(func: Any, x: torch.Tensor, args: _Args, kwargs: _Kwargs) -> frozenset[int]:
    """The dimensions of a call's first argument whose numbers it takes together; none of a function that is not known."""
    name = name_of(func)
    if name in _LAST:
        return frozenset((-1,))
    if name in ("layer_norm", "rms_norm"):
        return frozenset(range(-len(args[0] if args else kwargs["normalized_shape"]), 0))
    if name == "group_norm":
        return frozenset(range(1 - x.dim(), 0))
    if name in ("local_response_norm", "cross_entropy", "nll_loss"):  # the dimension of channels, or classes
        return frozenset((1 - x.dim() if x.dim() > 1 else -1,))
    if name == "instance_norm":
        return frozenset(range(2 - x.dim(), 0))
    if name == "batch_norm":  # all but that one, where it takes statistics of its input
        training = kwargs.get("training", args[4] if len(args) > 4 else False)
        return frozenset({*range(-x.dim(), 0)} - {1 - x.dim()}) if training else frozenset()
    if name in RECURRENT:
        return frozenset((1 - x.dim(),)) if args[-1] is True else frozenset((-x.dim(),))
    if name in CONVOLUTIONS:  # of each channel, where it has a group of its own
        groups = kwargs.get("groups", args[5] if len(args) > 5 else 1)
        return frozenset(range(2 - x.dim() if groups == x.shape[1] else 1 - x.dim(), 0))
    if name == "flip":
        return _from_end(x, kwargs.get("dims", args[0] if args and isinstance(args[0], (tuple, list)) else args))
    if name not in _DIMS or pointwise(func, (x, *args), kwargs):
        return frozenset()
    place, default = _DIMS[name]
    dims = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else default))
    return _from_end(x, dims)


def _from_end(x: torch.Tensor, dims: Any) -> frozenset[int]:
    """Some dimensions; all for None, and for the flag that `torch.std` takes in their place."""
    several: Iterable[Any] = (
        dims if isinstance(dims, (tuple, list)) else () if dims is None or dims is True else (dims,)
    )
    several = [dim for dim in several if isinstance(dim, int) and not isinstance(dim, bool)]
    return frozenset(dim % x.dim() - x.dim() for dim in several or range(x.dim()))


def summed(equation: str, place: int, dim: int) -> bool:
    """Whether an equation of `torch.einsum` sums over a dimension of an argument."""
    arguments, arrow, result = equation.replace(" ", "").partition("->")
    letters = arguments.split(",")[place].rpartition("...")[2]
    if -dim > len(letters):
        return False
    letter = letters[dim]
    return letter not in result if arrow else arguments.count(letter) > 1


class DimView(NamedTuple):
    """What a view shows of a dimension.

    Attributes:
        shape: of the view.
        dims: where the dimension is, the major one first: several where it is split, none where one index is left of it.
        start, size: the stretch that is shown.
        step: from one index to the next.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    start: int
    size: int
    step: int


def views(func: Any, x: torch.Tensor, dim: int, args: _Args, kwargs: _Kwargs, times: int = 1) -> list[DimView] | None:
    """What a call shows of a dimension of its first argument, in each of its results.

    None for a function that shows none, or mixes it with the dimensions before it, and for a call that is refused.

    Args:
        times: of a tensor whose dimension is so many times as long.
    """
    if (name_of(func) not in _VIEWS and func not in _TRANSPOSED) or _has_tensors((args, kwargs)):
        return None
    args, kwargs = pytree.tree_map(_in_numbers, (args, kwargs))
    if name_of(func) == "glu":
        func, args, kwargs = torch.chunk, (2, *args), {"dim": -1, **kwargs} if not args else kwargs
    shape = [*map(estimated, x.shape)]
    shape[dim] *= times
    inner = math.prod(shape[x.dim() + dim + 1 :])
    with no_modes(), without_func():
        after = torch.empty(shape[dim:], dtype=x.dtype, device="meta")
        probe = after.as_strided(shape, [0] * (x.dim() + dim) + list(after.stride()))
        try:
            result = func(probe, *args, **kwargs)
        except (RuntimeError, ValueError, IndexError, TypeError):
            return None
        results = [result] if isinstance(result, torch.Tensor) else result
        if any(storage_id(each.untyped_storage()) != storage_id(after.untyped_storage()) for each in results):
            return None
        if any(each.dtype.itemsize != x.dtype.itemsize for each in results):
            return None  # its elements are others
        return [_seen(each, inner) for each in results]


def _has_tensors(given: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(given))


def _in_numbers(value: Any) -> Any:
    """An argument, with what sizes are likely to be where they are known in a run alone."""
    if isinstance(value, slice):
        return slice(*map(_in_numbers, (value.start, value.stop, value.step)))
    return estimated(value) if isinstance(value, torch.SymInt) else value


def _seen(view: torch.Tensor, inner: int) -> DimView:
    """What a view of a tensor shows, of whose elements ``inner`` after each other have one index."""
    reach = {dim: view.stride(dim) * (view.shape[dim] - 1) for dim in range(-view.dim(), 0)}
    dims = tuple(dim for dim, last in reach.items() if last >= inner)
    size = (sum(reach[dim] for dim in dims) // inner + 1) if view.numel() else 0
    step = max(view.stride(dims[0]) // inner, 1) if len(dims) == 1 else 1
    return DimView(tuple(view.shape), dims, view.storage_offset() // inner, -(-size // step), step)
