"""Handles of sliced leaves, through which layers run in parallel, so that a model needs no parallel code.

A layer's function (``F.linear``, ``F.embedding``, ``x @ weight``) of such a handle calls the slice's style, which computes
this rank's share of the layer between the two collectives of a pair. Any other function of a sliced weight is refused, since
its result would be that of a slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from shardlib.collectives.styles.base import Compute, Style
from shardlib.collectives.styles.slices import Slice, Slices
from shardlib.common._compat import no_torch_function, outside_of_graphs, pytree, run_first
from shardlib.common.environment import environment
from shardlib.errors import HandleError
from shardlib.execute.handles import Handle, Present, Source, layers, materialise, with_handles
from shardlib.mesh.specs import Window
from shardlib.nn.functional import local_slice, slice_of
from shardlib.nn.moe.experts import Groups, expert_linear
from shardlib.nn.moe.placement import ShardedExperts
from shardlib.nn.scaled import scaled_linear, scaled_matmul
from shardlib.nn.sequence import shard_sequence
from shardlib.plan.placement import Placement
from shardlib.sharded.tree import Sharded


class SlicedHandle(Handle):
    """A handle that stands for this rank's slice of a leaf, padding included. Its products may be in 8 bits (``_scaled``)."""

    _style: Style
    _slices: Slices
    _window: Window
    _scaled: bool

    @staticmethod
    def make(
        source: Source,
        index: int,
        placement: Placement,
        shape: tuple[int, ...],
        like: torch.Tensor,
        trained: bool,
        slices: Slices,
    ) -> SlicedHandle:
        handle = SlicedHandle(source, index, placement.path, shape, like, trained)
        compute, mesh = placement.compute, slices.mesh
        assert placement.style is not None
        handle._style, handle._slices, handle._scaled = placement.style, slices, placement.scaled
        handle._window = compute.spec.window(compute.shape, mesh.shape, mesh.coords)
        return handle

    def of_rows(self, leaf: torch.Tensor) -> SlicedHandle:
        """A handle of other rows, which are there: ``leaf``, without padding."""
        handle = SlicedHandle(Present(leaf), 0, self._path, tuple(leaf.shape), leaf, leaf.requires_grad)
        handle._style, handle._slices, handle._scaled = self._style, self._slices, self._scaled
        handle._window = self._window._replace(sizes=(len(leaf), *self._window.sizes[1:]))
        return handle

    def arrived(self) -> SlicedHandle:
        super().arrived()
        return self

    @classmethod
    def _layer(cls, func: Any, computes: bool, args: Any, kwargs: Any) -> Callable[..., Any] | None:
        layer = _LAYERS.get(func)
        if layer is None and computes:
            values = [*args, *kwargs.values()]
            if func not in _ADDITIONS or not _adds_bias(*values[:2]):
                refuse_operands(func, values)
        return layer


def gathered(value: Any) -> Any:
    """The arguments of a block, gathered: plain tensors for handles of whole leaves; those of slices and experts stay."""
    # A further tree that a block is given, in its batch, say, is gathered where it is used.
    return with_handles(lambda handle: handle.arrived(), value, is_leaf=lambda each: isinstance(each, Sharded))


def refuse_slices(value: Any) -> None:
    """Raise if a compiled block is given slices, or experts: their collectives are added at each call, unseen by compile."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, ShardedExperts):
            raise HandleError(
                f"a compiled block is given {leaf.path}, of sl.experts; compile functions without experts"
            )
        if isinstance(leaf, SlicedHandle) and not leaf._style.sums:
            raise HandleError(
                f"a compiled block is given {leaf._path}, which is sliced ({leaf._style}); do not compile it, or do "
                "not slice it"
            )


def _held(value: Any) -> Any:
    """The tensor that a layer computes with: a slice's rows without padding, or any other tensor unchanged.

    Padding is thus never multiplied, and its gradient is zero. A slice of only padding keeps one row, so that every rank uses
    the same parameters; the row's results are cut off or masked. Backward runs the cut's node as early as possible, so that a
    gradient is complete at the same point, relative to other exchanges, as on ranks whose slice has no padding.
    """
    local = materialise(value)
    if isinstance(value, SlicedHandle) and value.dim() and value._window.sizes[0] < len(local):
        return run_first(local[: max(value._window.sizes[0], 1)])
    return local


def _linear(x: Any, weight: Any, bias: Any = None) -> torch.Tensor:
    return _layer(scaled_linear if _is_scaled(weight) else F.linear, False, x, weight, bias)


def _product(bias: Any, x: Any, weight: Any) -> torch.Tensor:
    multiply = scaled_matmul if _is_scaled(weight) else torch.matmul

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = multiply(x, weight)
        return y if bias is None else y + bias

    return _layer(product, True, x, weight, bias)


def _is_scaled(weight: Any) -> bool:
    return isinstance(weight, SlicedHandle) and weight._scaled


def _layer(compute: Compute, transposed: bool, x: Any, weight: Any, bias: Any) -> torch.Tensor:
    """``compute(x, weight, bias)``, or this rank's share of it if ``weight`` is sliced."""
    refuse_operands("a layer as its input", [x])
    style = _style(weight)
    if style is None or style.sums:
        require_whole_layer(weight, bias)
    x, bias = materialise(x), _held(bias)
    if style is None:
        return compute(x, materialise(weight), bias)
    return style.linear(_slice(weight), x, bias, compute, transposed)


def _expert_linear(rows: Any, weight: Any, bias: Any, groups: Groups) -> torch.Tensor:
    """`shardlib.nn.moe.experts.expert_linear`, of which a leaf may be sliced."""
    refuse_operands("a layer of experts as its input", [rows])
    style = _style(weight)
    if style is None or style.sums:
        require_whole_layer(weight, bias)

    if style is None:
        return expert_linear(materialise(rows), materialise(weight), _held(bias), groups)

    def compute(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = expert_linear(rows, weight, None, groups)
        return y if bias is None else y + bias

    of_rows = None if bias is None else _held(bias)[groups.experts]
    return style.grouped(_slice(weight), materialise(rows), of_rows, compute)


def _look_up(ids: torch.Tensor, weight: Any, padding_idx: int | None, scaled: bool, sparse: bool) -> torch.Tensor:
    if scaled:
        raise HandleError(f"{weight._path}: scale_grad_by_freq needs the whole embedding; do not slice it")
    parts = environment().parts
    if parts is not None and _cuts_sequence(weight):  # ``ids`` are whole, the result is this rank's sequence part
        parts.shard(ids, 1)
    return weight._style.embedding(_slice(weight), ids, padding_idx, sparse)


def _part_of(ids: torch.Tensor, weight: Any) -> torch.Tensor:
    return ids if _cuts_sequence(weight) else shard_sequence(ids)


def _cross_entropy(x: Any, weight: Any, targets: torch.Tensor, *, reduction: str, **options: Any) -> torch.Tensor:
    x, parts = materialise(x), environment().parts
    losses = weight._style.cross_entropy(_slice(weight), x, **options)
    if parts is None:
        return losses(targets, reduction)
    if _cuts_sequence(weight):  # the layer has gathered all positions
        parts.note("leave")
        return losses(targets, reduction)
    return parts.loss(losses, x, targets, options["ignore_index"], reduction)


def _slice_of(weight: SlicedHandle, dim: int) -> tuple[int, int]:
    return weight._window.first[dim], weight._window.shape[dim]


def _style(weight: Any) -> Style | None:
    return weight._style if isinstance(weight, SlicedHandle) else None


def _slice(weight: SlicedHandle) -> Slice:
    return Slice(weight._path, weight._style.axis, weight._window, _held(weight), weight._slices)


def _cuts_sequence(weight: SlicedHandle) -> bool:
    """Whether activations are sequence parts outside the layer and whole sequences inside."""
    return weight._slices.cuts_sequence(weight._style.axis)


def require_whole_layer(weight: Any, bias: Any) -> None:
    style = _style(bias)
    if style is not None and not style.sums:
        name = getattr(weight, "_path", "a tensor that is not sliced")
        raise HandleError(f"{bias._path} is sliced and its weight ({name}) is not; give both the same rule")


def refuse_operands(func: Any, values: list[Any]) -> None:
    """Raise if one of ``values``, which ``func`` uses as they are, is a slice."""
    for handle in pytree.tree_leaves(values):
        if isinstance(handle, SlicedHandle) and not handle._style.sums:
            name, style = getattr(func, "__name__", None) or func, handle._style
            raise HandleError(
                f"{name} uses {handle._path}, of which this rank holds a slice ({style} over axis {style.axis!r}). "
                "Use F.linear, F.embedding, x @ weight or sl.nn.linear_cross_entropy, or put "
                f"{_layer_of(handle._path)!r}: 'replicated' first"
            )


def _adds_bias(a: Any, b: Any) -> bool:
    """Whether each sliced summand can be a bias: it has one dimension, or fewer than the tensor to which it is added."""

    def bias(value: Any, outputs: Any) -> bool:
        if not isinstance(value, SlicedHandle) or value.dim() < 2:
            return True
        return isinstance(outputs, torch.Tensor) and not isinstance(outputs, Handle) and outputs.dim() > value.dim()

    return bias(a, b) and bias(b, a)


def _layer_of(path: str) -> str:
    return path.rpartition("/")[0] or path


_LAYERS = layers("a sliced weight", _linear, _product, _look_up, _part_of, _cross_entropy) | {
    expert_linear: _expert_linear,
    local_slice: _held,
    slice_of: _slice_of,
}
# Additions of a bias outside F.linear: the bias' slice is added to a slice of outputs.
_ADDITIONS = {
    torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, torch.Tensor.add_, torch.Tensor.__iadd__,
}  # fmt: skip


# Handles of leaves of experts that are dealt out over the mesh: layers of experts open them, other uses are refused.
# A rank's share of such a leaf is for the tokens of all ranks. A function that used it as it is would give each rank's
# tokens the experts that happen to be there, and nothing would fail.


class _Shut:
    """The source of a handle that gives nothing."""

    def __init__(self, path: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
        self._path, self._shape, self._axes = path, shape, axes

    def _refuse(self, index: int) -> NoReturn:
        path, held, over = self._path, (*self._shape, 1)[0], " and ".join(map(repr, self._axes))
        raise HandleError(
            f"{path} is used outside of a layer of experts ({held} here over axis {over}). Stack experts along "
            "dimension 0 for sl.nn.moe or sl.nn.run_experts, or leave it out of sl.experts"
        )

    leaf = data = root_gradient = _refuse


class DealtHandle(Handle, ShardedExperts):
    """A handle that stands for this rank's experts of a leaf.

    Attributes:
        _inside: what it opens to: a handle, or the leaf.
    """

    _inside: torch.Tensor

    @staticmethod
    def make(inside: torch.Tensor, path: str, axes: tuple[str, ...]) -> DealtHandle:
        """The handle that only a layer of experts exchanges for ``inside``, a handle or the leaf itself."""
        with no_torch_function():
            shape, trained = tuple(inside.shape), inside.requires_grad
        handle = DealtHandle(_Shut(path, shape, axes), 0, path, shape, inside, trained)
        handle._inside, handle.path = inside, path
        return handle

    def arrived(self) -> DealtHandle:
        inside = self.local()
        inside = inside.arrived() if isinstance(inside, Handle) else inside
        with no_torch_function():
            shape, trained = tuple(self.shape), self.requires_grad
        handle = DealtHandle(self._source, self._index, self._path, shape, inside, trained)
        handle._inside, handle.path = inside, self.path
        return handle

    @outside_of_graphs
    def local(self) -> torch.Tensor:
        inside = self._inside
        if not isinstance(inside, Handle) or isinstance(inside, SlicedHandle):
            return inside
        source: Any = inside._source
        return inside if source.gathers else source.leaf(inside._index)

    def rows_for_replicas(self, rows: Sequence[int]) -> torch.Tensor:
        leaf = materialise(self._inside)
        chosen = leaf.index_select(0, torch.tensor(rows, dtype=torch.int64, device=leaf.device))
        return chosen.view(len(rows), math.prod(leaf.shape[1:]))

    def replicas(self, rows: torch.Tensor) -> torch.Tensor:
        inside = self._inside
        with no_torch_function():
            leaf = rows.view(len(rows), *inside.shape[1:])
        return inside.of_rows(leaf) if isinstance(inside, SlicedHandle) else leaf


def as_used(leaf: Any, placement: Placement, trained: bool, slices: Slices) -> Any:
    """A leaf that is there, and need not be a tensor, as a function gets it: itself, or a handle of a slice or of experts
    that are dealt out."""
    if placement.style is not None:
        leaf = SlicedHandle.make(Present(leaf), 0, placement, tuple(leaf.shape), leaf, trained, slices)
    return DealtHandle.make(leaf, placement.path, placement.dealt) if placement.dealt else leaf
