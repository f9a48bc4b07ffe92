"""What torch's functions do along the last dimension of a tensor: cut it, take its numbers together, or neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def _chunks(x: torch.Tensor, chunks: Any, dim: int = 0) -> int:
    return chunks if isinstance(chunks, int) and dim % x.dim() == x.dim() - 1 else 1


def _glu(x: torch.Tensor, dim: int = -1) -> int:
    return _chunks(x, 2, dim)


def _halves(x: torch.Tensor, index: Any) -> int:
    """2 for either half along the last dimension."""
    last = index[-1] if isinstance(index, tuple) and len(index) in (x.dim(), 2) and len(index) > 1 else None
    if not isinstance(last, slice) or (len(index) < x.dim() and index[0] is not Ellipsis):
        return 1
    size = x.shape[-1]
    return 2 if last.indices(size) in ((0, size // 2, 1), (size // 2, size, 1)) else 1


def _last(x: torch.Tensor, dim: Any = None, *args: Any, **options: Any) -> bool:
    """Whether the last dimension is among ``dim``, as it is where none is given."""
    if isinstance(dim, torch.Tensor):  # the larger of two tensors
        return False
    if dim is None or isinstance(dim, bool):  # std(unbiased)
        dim = ()
    dims = dim if isinstance(dim, (tuple, list)) else [dim]
    return not dims or any(isinstance(each, int) and each % x.dim() == x.dim() - 1 for each in dims)


def _last_of_norm(x: torch.Tensor, p: Any = 2, dim: Any = None, *args: Any, **options: Any) -> bool:
    return _last(x, dim)


def _last_of_unit(x: torch.Tensor, p: Any = 2, dim: Any = 1, *args: Any, **options: Any) -> bool:
    return _last(x, dim)


def _last_of_largest(x: torch.Tensor, k: Any, dim: Any = -1, *args: Any, **options: Any) -> bool:
    return _last(x, dim)


def _last_of_sorted(x: torch.Tensor, dim: Any = -1, *args: Any, **options: Any) -> bool:
    return _last(x, dim)


def _of(*names: str) -> list[Any]:
    """The functions and methods of tensors that have these names."""
    return [getattr(owner, name) for name in names for owner in (torch, torch.Tensor)]


SOFTMAX = {F.softmax, torch.softmax, torch.Tensor.softmax}
# Function -> into how many equal parts a call cuts its first argument along the last dimension.
HALVING: dict[Any, Callable[..., int]] = {
    torch.chunk: _chunks,
    torch.Tensor.chunk: _chunks,
    torch.tensor_split: _chunks,
    torch.Tensor.tensor_split: _chunks,
    torch.Tensor.__getitem__: _halves,
    F.glu: _glu,
}
# Function -> whether a call takes the numbers along its first argument's last dimension together.
SUMMING: dict[Any, Callable[..., bool]] = {
    **dict.fromkeys((*SOFTMAX, F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax), _last),
    **dict.fromkeys(_of("sum", "mean", "prod", "std", "var", "logsumexp", "cumsum", "cumprod"), _last),
    **dict.fromkeys(_of("max", "min", "amax", "amin", "argmax", "argmin"), _last),
    **dict.fromkeys(_of("sort", "argsort"), _last_of_sorted),
    **dict.fromkeys(_of("topk"), _last_of_largest),
    **dict.fromkeys((*_of("norm"), torch.linalg.vector_norm), _last_of_norm),
    F.normalize: _last_of_unit,
    **dict.fromkeys((F.layer_norm, F.rms_norm), lambda *args, **options: True),
}
# What makes each number of its result of one number of a share: the result is a share of the same layer's outputs.
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
