"""Handles, which stand for parameters inside a loss function while the parameters are not gathered.

A handle is a tensor without memory. Its metadata can be read without a gather; any other function of a handle is computed on
the gathered parameter. Code below `__torch_function__` (a user's autograd.Function, C++) gets the parameter through
`__torch_dispatch__`; its gradient then arrives at the handle, and is added to the unit's after backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
import torch.nn.functional as F

from shardlib.common._compat import no_torch_function, pytree, read_backward_hooks, wrapper_subclass
from shardlib.common.writes import written
from shardlib.errors import HandleError
from shardlib.nn.functional import embedding, linear_cross_entropy


class Source(Protocol):
    """The source of handles' parameters: a unit."""

    def leaf(self, index: int) -> torch.Tensor:
        """The parameter, gathered, connected to the graph."""
        ...

    def data(self, index: int) -> torch.Tensor:
        """The parameter, gathered, outside any graph."""
        ...

    def root_gradient(self, index: int) -> tuple[torch.Tensor, Any]:
        """For gradients inside the loss: the tensor to differentiate to, and a function from its gradient to the leaf's."""
        ...


class Present:
    """The source of a handle whose parameter is there already."""

    def __init__(self, leaf: torch.Tensor) -> None:
        self._leaf = leaf

    def leaf(self, index: int) -> torch.Tensor:
        return self._leaf

    def data(self, index: int) -> torch.Tensor:
        return self._leaf.detach()

    def root_gradient(self, index: int) -> tuple[torch.Tensor, Any]:
        return self._leaf, lambda gradient: gradient


class Handle(torch.Tensor):
    """A tensor without memory that stands for one parameter; see the module's docstring."""

    _source: Source
    _index: int
    _path: str

    @staticmethod
    def __new__(
        cls, source: Source, index: int, path: str, shape: tuple[int, ...], like: torch.Tensor, trained: bool
    ) -> Handle:
        handle = wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device, requires_grad=trained)
        handle._source, handle._index, handle._path = source, index, path
        return handle

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def arrived(self) -> torch.Tensor:
        """What a block gets in place of this handle, whose parameter is gathered now."""
        return self._source.leaf(self._index)

    @classmethod
    def _layer(cls, func: Any, computes: bool, args: Any, kwargs: Any) -> Callable[..., Any] | None:
        """What a function does with a parameter of this kind, by `layers`; None for what it does with a gathered one.

        Args:
            computes: whether it reads values, and writes to no parameter.

        Raises:
            HandleError: the kind refuses it.
        """
        return None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # This runs for every use of a parameter: hence the inlined look-up, the order of cases, and the flat code.
        kind = _KINDS.get(func) or _kind_of(func)
        if cls is not Handle:
            computes = kind == "operation" or (kind == "in-place" and not isinstance(args[0], Handle))
            if (layer := cls._layer(func, computes, args, kwargs or {})) is not None:
                return layer(*args, **(kwargs or {}))
        if kind == "operation" and not kwargs:
            real: list[Any] = []
            for value in args:
                if type(value) is _T:
                    real.append(value)
                elif isinstance(value, Handle):
                    real.append(value._source.leaf(value._index))
                else:
                    real.append(materialise(value) if type(value) in _CONTAINERS else value)
            return func(*real)
        if kind == "metadata":
            with no_torch_function():
                return func(*args, **(kwargs or {}))
        if kind == "special":
            return _SPECIAL[func](*args, **(kwargs or {}))
        if kind == "in-place" and isinstance(args[0], Handle):
            raise written(func.__name__, args[0]._path)
        kwargs = kwargs or {}
        if kwargs.get("max_norm") is not None and func in _LOOK_UPS:
            refuse_max_norm(*args, *kwargs.values())
        if isinstance(kwargs.get("out"), Handle):
            raise HandleError(f"out= names parameter {kwargs['out']._path}; write to a new tensor instead")
        args, kwargs = materialise((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def data(handle: Handle) -> torch.Tensor:
            return handle._source.data(handle._index)

        args, kwargs = pytree.tree_map_only(Handle, data, (args, kwargs or {}))
        return func(*args, **kwargs)


def materialise(value: Any) -> Any:
    """Replace every handle in a pytree by its gathered parameter."""
    return with_handles(lambda handle: handle._source.leaf(handle._index), value)


def with_handles(fn: Callable[[Handle], Any], value: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """A pytree with ``fn(handle)`` for every handle. ``is_leaf``: of nodes that stay as they are."""
    if isinstance(value, torch.Tensor):  # the most frequent cases: torch's flattening costs more than all the rest
        return fn(value) if isinstance(value, Handle) else value
    kind = type(value)
    if kind is dict:
        return {key: with_handles(fn, each, is_leaf) for key, each in value.items()}
    if kind is list or kind is tuple:
        return kind([with_handles(fn, each, is_leaf) for each in value])
    return pytree.tree_map_only(Handle, fn, value, is_leaf=is_leaf)


def used_elsewhere(label: str) -> HandleError:
    """The error of gathered parameters that are used where nothing is gathered. ``label`` names them."""
    return HandleError(
        f"parameters of {label} are used on another rank, or after their call. Make the module inside the simulated "
        "function, or use sl.from_module(module); return as aux what you keep"
    )


def layers(
    what: str,
    linear: Callable[..., torch.Tensor],
    product: Callable[[Any, Any, Any], torch.Tensor],
    look_up: Callable[[Any, Any, int | None, bool, bool], torch.Tensor],
    part_of: Callable[[Any, Any], Any],
    cross_entropy: Callable[..., torch.Tensor],
) -> dict[Any, Callable[..., Any]]:
    """The layers' functions -> what they do with weights of a kind, ``what`` in messages.

    Args:
        linear: of x, weight and bias.
        product: x @ weight + bias, of bias (or None), x and weight.
        look_up: of ids and a table; with the padding's id, whether gradients are scaled, and whether they are sparse.
        part_of: the ids that this rank looks up for its part of the sequence, of all ids and the table.
        cross_entropy: as `linear_cross_entropy`.
    """

    def matmul(x: Any, weight: Any) -> torch.Tensor:
        return product(None, x, weight)

    def addmm(bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
        if beta != 1 or alpha != 1:
            raise HandleError(f"addmm of {what} takes beta=1 and alpha=1; scale the factors instead")
        return product(bias, x, weight)

    def embed(
        ids: torch.Tensor,
        weight: Any,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> torch.Tensor:
        if max_norm is not None:
            refuse_max_norm(weight)
        return look_up(ids, weight, padding_idx, scale_grad_by_freq, sparse)

    matmuls = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
    return {
        F.linear: linear,
        **dict.fromkeys(matmuls, matmul),
        torch.addmm: addmm,
        F.embedding: embed,
        embedding: lambda ids, weight: embed(part_of(ids, weight), weight),
        linear_cross_entropy: cross_entropy,
    }


def refuse_max_norm(*values: Any) -> NoReturn:
    """Raise for a look-up with ``max_norm``, which would write to the parameter among ``values``."""
    raise written("max_norm=", *(value._path for value in values if isinstance(value, Handle)))


_LOOK_UPS = (F.embedding, F.embedding_bag)

# The end of a message.
FLAGS = (
    "inside a function, whose parameters are trained as the plan says: sl.freeze(globs) leaves some out. Where no gradient "
    "is to pass use p.detach(), and for one inside the loss p.clone().requires_grad_()"
)


def _describe(handle: Any, *_: Any, **__: Any) -> str:
    """A handle as text, without a gather, since one rank may print a handle that others do not."""
    with no_torch_function():
        shape, dtype = tuple(handle.shape), handle.dtype
    return f"Handle({handle._path}, shape={shape}, dtype={dtype}, sharded; p.clone() gathers it on every rank)"


def _mark(handle: Any, requires_grad: bool = True) -> Any:
    """``requires_grad_`` of a handle, whose parameter it does not reach: refused unless it changes nothing."""
    with no_torch_function():
        trained = handle.requires_grad
    if requires_grad != trained:
        raise HandleError(f"requires_grad of {handle._path} is set to {requires_grad} {FLAGS}")
    return handle


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """torch.autograd.grad with respect to handles, inside the loss: differentiates to the roots of the handles' units."""
    wanted = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    roots = [
        value._source.root_gradient(value._index) if isinstance(value, Handle) else (value, None) for value in wanted
    ]
    grads = torch.autograd.grad(materialise(outputs), [root for root, _ in roots], *args, **kwargs)
    return tuple(
        grad if read is None or grad is None else read(grad) for grad, (_, read) in zip(grads, roots, strict=True)
    )


_CONTAINERS = {list, tuple, dict}
_T = torch.Tensor
_METADATA = {
    *(
        getattr(_T, name).__get__
        for name in (
            "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "is_cuda", "is_cpu", "is_meta",
            "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xla", "is_mps", "itemsize", "nbytes", "grad",
            "grad_fn", "names", "output_nr", "retains_grad",
        )
        if hasattr(_T, name)
    ),
    _T.size, _T.dim, _T.numel, _T.nelement, _T.stride, _T.is_floating_point, _T.is_complex, _T.element_size,
    _T.is_contiguous, _T.get_device, _T.ndimension, _T.__len__, _T.__hash__, _T.storage_offset,
    torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor, read_backward_hooks,
}  # fmt: skip
_SPECIAL: dict[Any, Any] = {
    _T.__repr__: _describe,
    _T.__format__: _describe,
    torch.autograd.grad: _grad,
    _T.requires_grad_: _mark,
    _T.requires_grad.__set__: _mark,  # type: ignore[attr-defined]
}
_KINDS: dict[Any, str] = dict.fromkeys(_METADATA, "metadata") | dict.fromkeys(_SPECIAL, "special")
_IN_PLACE_DUNDERS = {"__setitem__", "__set__"}


def _kind_of(func: Any) -> str:
    """How a handle treats a function: as "metadata", "special", "in-place" or "operation"."""
    kind = _KINDS.get(func)
    if kind is None:
        kind = _KINDS[func] = _classify(func)
    return kind


def _classify(func: Any) -> str:
    name = getattr(func, "__name__", "")
    augmented = (
        name.startswith("__i")
        and name.endswith("__")
        and name not in ("__index__", "__int__", "__invert__", "__iter__")
    )
    if name in _IN_PLACE_DUNDERS or augmented or (name.endswith("_") and not name.endswith("__")):
        return "in-place"
    return "operation"
