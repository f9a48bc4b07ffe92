"""Handles of sliced leaves: the dual pairs go in where a leaf is consumed, so that a model needs no parallel code.

A layer's function (``F.linear``, ``F.embedding``, ``x @ weight``) finds the slice's style and does this rank's share
between the pair that the style asks for. Any other function of a sliced weight is refused: it would silently compute
with a part of it.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from shardlib._compat import pytree, run_first, version_of
from shardlib.collectives import pairs
from shardlib.collectives.cross_entropy import vocab_cross_entropy
from shardlib.errors import HandleError, SpecError, listing
from shardlib.execute.handles import Handle, Source, kind_of, materialise, refuse_max_norm
from shardlib.execute.sequence import SequenceParts
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.specs import Window, chunk_size
from shardlib.nn.functional import embedding, linear_cross_entropy, own_slice, slice_of, widened
from shardlib.nn.sequence import shard_sequence
from shardlib.plan.styles import Style


class Slices:
    """What the sliced leaves of one run share: the mesh, and the pair of the input that was last consumed.

    The pairs are those of Megatron-LM: a copy before and an all-reduce after the slices; or, where sequences are cut
    over the same axis (arXiv 2205.05198), a gather and a reduce-scatter along the sequence, which together send as much.
    """

    def __init__(self, mesh: Mesh, parts: SequenceParts | None) -> None:
        self.mesh, self.parts = mesh, parts
        self._last: dict[str, tuple[weakref.ref[torch.Tensor], tuple[int, bool], torch.Tensor]] = {}
        self._shares: dict[str, str] = {}  # of outputs that no sum has taken up yet: by the layer's path

    def cuts_sequence(self, axis: str) -> bool:
        """Whether activations outside the slices over ``axis`` are parts of the sequence."""
        return self.parts is not None and self.parts.kind.gathers_for_slices and self.parts.kind.axis == axis

    def enter(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        """One pair per input: several layers that read it (query, key, value) then share one exchange each way."""
        grad = x.requires_grad and torch.is_grad_enabled()
        if not grad and not self.cuts_sequence(axis):
            return x
        known = self._last.get(axis)
        if known is not None and known[0]() is x and known[1] == (version_of(x), grad):
            return known[2]
        if self.cuts_sequence(axis):
            entered = pairs.all_gather(_with_sequence(x), axis, dim=1, mesh=self.mesh)
        else:
            entered = pairs.copy(x, axis, mesh=self.mesh)
        self._last[axis] = (weakref.ref(x), (version_of(x), grad), entered)
        return entered

    def leave(self, y: torch.Tensor, axis: str) -> torch.Tensor:
        """The sum of the slices' partial results."""
        self._shares.clear()
        if self.cuts_sequence(axis):
            return pairs.reduce_scatter(_with_sequence(y), axis, dim=1, mesh=self.mesh)
        return pairs.all_reduce(y, axis, dst="invariant", mesh=self.mesh)

    def whole_outputs(self, y: torch.Tensor, axis: str, outputs: int) -> torch.Tensor:
        """Every rank's share of the outputs, put together; parts of the sequence stay parts.

        Shares that are shorter than others travel padded.
        """
        share = chunk_size(outputs, self.mesh.shape[axis])
        if y.shape[-1] < share:
            y = F.pad(y, (0, share - y.shape[-1]))
        if self.cuts_sequence(axis):
            whole = pairs.all_to_all(_with_sequence(y), axis, split_dim=1, concat_dim=-1, mesh=self.mesh)
        else:
            whole = pairs.all_gather(y, axis, dim=-1, dst="invariant", mesh=self.mesh)
        return whole if whole.shape[-1] == outputs else whole[..., :outputs].contiguous()

    def own_inputs(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        """This rank's share of inputs that come whole; of all positions."""
        if self.cuts_sequence(axis):
            return pairs.all_to_all(_with_sequence(x), axis, split_dim=-1, concat_dim=1, mesh=self.mesh)
        return pairs.split(x, axis, dim=-1, mesh=self.mesh)

    def share(self, weight: SlicedHandle, outputs: int) -> None:
        """Note that a layer gave this rank's share of its outputs."""
        axis, whole = weight._style.axis, weight._window.shape[int(weight._style.transposed)]
        self._shares[weight._path] = f"{outputs} of {whole} outputs (axis {axis!r} of size {self.mesh.shape[axis]})"

    def explain(self, error: Exception) -> HandleError | None:
        """What shares of outputs have to do with a shape that does not fit, where there are any."""
        if isinstance(error, HandleError) or not self._shares or not re.search("shape|size|dimension", str(error)):
            return None
        shares = listing([f"{path}: {share}" for path, share in self._shares.items()])
        return HandleError(
            f"a shape does not fit ({error}) where layers gave this rank's share of their outputs:\n{shares}\nWhat follows "
            "must take sizes from what it is given (view(..., -1, head_size)), and a share must be whole heads: say how many "
            "there are, sl.column(heads=...), and the plan refuses an axis that cuts one; use an axis of a size that divides "
            "them. shardlib.models.huggingface.slicing_rules(model) says it for transformers' models, and sliceable(model) "
            "takes GPT-2's hard-coded sizes out. Or leave these layers whole ('replicated'), and put sl.row(split=True) in "
            "the place of the rules of those after them."
        )

    def clear(self) -> None:
        self._last.clear()
        self._shares.clear()


class SlicedHandle(Handle):
    """Stands for this rank's slice of a leaf with a style; rows that pad it included."""

    _style: Style
    _slices: Slices
    _window: Window

    @staticmethod
    def make(
        source: Source, index: int, path: str, shape: tuple[int, ...], like: torch.Tensor, trained: bool,
        style: Style, window: Window, slices: Slices,
    ) -> SlicedHandle:  # fmt: skip
        handle = SlicedHandle(source, index, path, shape, like, trained)
        handle._style, handle._window, handle._slices = style, window, slices
        return handle

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        layer = _LAYERS.get(func)
        if layer is not None:
            return layer(*args, **(kwargs or {}))
        # A parameter that is written to itself is refused by every handle.
        if kind_of(func) == "operation" or (kind_of(func) == "in-place" and not isinstance(args[0], Handle)):
            values = [*args, *(kwargs or {}).values()]
            if func not in _ADDITIONS or not _adds_bias(*values[:2]):
                _refuse(func, values)
        return super().__torch_function__(func, types, args, kwargs)


def gathered(value: Any) -> Any:
    """What a block gets: plain tensors for whole leaves; slices keep their handles, their unit being here."""

    def arrive(handle: Handle) -> Any:
        tensor = handle._source.leaf(handle._index)
        return handle if isinstance(handle, SlicedHandle) else tensor

    return pytree.tree_map_only(Handle, arrive, value)


def refuse_slices(value: Any) -> None:
    """Raise where a compiled block is given sliced parameters: its pairs go in call by call, which compiling skips."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, SlicedHandle) and not leaf._style.sums:
            raise HandleError(
                f"a compiled block is given {leaf._path}, which is sliced ({leaf._style}); compile functions that use no "
                "sliced parameter, or take its layer out of tensor_slicing's rules"
            )


def _held(value: Any) -> Any:
    """What a layer computes with: a tensor as it is, of a slice this rank's part without the rows that pad it.

    So these are never multiplied, and their gradient is zero. Of a slice that is padding alone one row stays: every rank
    uses the same parameters. What it gives is cut off, or masked. Backward passes the cut at once: a gradient is to be
    complete where it is on ranks whose slice is not padded, before or after the same exchanges.
    """
    local = materialise(value)
    if isinstance(value, SlicedHandle) and value.dim() and value._window.sizes[0] < len(local):
        return run_first(local[: max(value._window.sizes[0], 1)])
    return local


def _linear(x: Any, weight: Any, bias: Any = None) -> torch.Tensor:
    return _layer(F.linear, False, x, weight, bias)


def _matmul(x: Any, weight: Any) -> torch.Tensor:
    return _layer(lambda x, weight, bias: _add(x @ weight, bias), True, x, weight, None)


def _addmm(bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    if beta != 1 or alpha != 1:
        raise HandleError("addmm of a sliced weight takes beta=1 and alpha=1; scale the factors instead")
    return _layer(lambda x, weight, bias: _add(x @ weight, bias), True, x, weight, bias)


def _layer(
    compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
    transposed: bool, x: Any, weight: Any, bias: Any,
) -> torch.Tensor:  # fmt: skip
    """``compute(x, weight, bias)`` by this rank's slice of ``weight``."""
    _refuse("a layer as its input", [x])
    x, added = materialise(x), _held(bias)
    style = _style(weight)
    if style is None or style.sums:
        _require_whole_layer(weight, bias)
        return compute(x, materialise(weight), added)
    slices, name = weight._slices, weight._path
    if style.kind == "vocab":
        style = Style("column", style.axis, whole=True)
    if style.transposed != transposed:
        order = "(in, out)" if transposed else "(out, in)"
        raise HandleError(
            f"{name} is consumed as {order} and sliced as the other order; give its layer sl.{style.kind}(transposed="
            f"{transposed}) in tensor_slicing's rules"
        )
    local, axis = _held(weight), style.axis
    if style.kind == "column":
        y = compute(slices.enter(x, axis), local, added)
        if style.whole:
            return slices.whole_outputs(y, axis, weight._window.shape[int(transposed)])
        slices.share(weight, y.shape[-1])
        return y
    if style.whole:
        x = slices.own_inputs(x, axis)
    inputs = local.shape[0 if transposed else 1]
    if x.shape[-1] != inputs:
        raise HandleError(
            f"{name} has the style row and takes {inputs} inputs on this rank, but gets {x.shape[-1]}: its input must "
            "come from column-sliced layers; use sl.row(split=True) where it comes whole"
        )
    # The bias is whole, and added once: after the sum.
    return _add(slices.leave(compute(x, local, None), axis), added)


def _embedding(
    ids: torch.Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    style = _style(weight)
    if style is None or style.kind != "vocab":
        raise HandleError(f"{weight._path} is looked up and has the style {style}; give its layer the style 'vocab'")
    if max_norm is not None:
        refuse_max_norm(weight)
    if scale_grad_by_freq:
        raise HandleError(f"{weight._path}: scale_grad_by_freq needs the whole embedding; do not slice it")
    slices, local = weight._slices, _held(weight)
    if slices.cuts_sequence(style.axis):  # ``ids`` are whole, what is found is this rank's part
        slices.parts.note("enter")
        slices.parts.chunks(ids.shape[1])
    words, first, held = weight._window.shape[0], weight._window.first[0], weight._window.sizes[0]
    mine = (ids >= first) & (ids < first + held)
    padding = None
    if padding_idx is not None:
        whole = padding_idx % words - first
        padding = whole if 0 <= whole < held else None
    # What is no word at all is left to F.embedding to refuse, on every rank.
    found = F.embedding(
        (ids - first).where(mine, 0).where((ids >= 0) & (ids < words), -1), local, padding, sparse=sparse
    )
    return slices.leave(found.masked_fill(~mine[..., None], 0), style.axis)


def _embedding_of_part(ids: torch.Tensor, weight: Any) -> torch.Tensor:
    style = _style(weight)
    whole = style is not None and weight._slices.cuts_sequence(style.axis)
    return _embedding(ids if whole else shard_sequence(ids), weight)


def _cross_entropy(
    x: Any, weight: Any, targets: torch.Tensor, *, ignore_index: int, label_smoothing: float, reduction: str
) -> torch.Tensor:
    style = _style(weight)
    if style is None or style.kind != "vocab":
        raise HandleError(f"{weight._path} is an output layer with the style {style}; give it the style 'vocab'")
    slices, axis = weight._slices, style.axis
    x = slices.enter(materialise(x), axis)
    scores, words = widened(F.linear(x, _held(weight))), weight._window.shape[0]

    def losses(targets: torch.Tensor, reduction: str) -> torch.Tensor:
        options: dict[str, Any] = {"words": words, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
        return vocab_cross_entropy(scores, targets, axis, **options, reduction=reduction, mesh=slices.mesh)

    if slices.parts is None:
        return losses(targets, reduction)
    if slices.cuts_sequence(axis):  # all positions are here again
        slices.parts.note("leave")
        return losses(targets, reduction)
    return slices.parts.loss(losses, x, targets, ignore_index, reduction)


def _slice_of(weight: SlicedHandle, dim: int) -> tuple[int, int]:
    return weight._window.first[dim], weight._window.shape[dim]


def _style(weight: Any) -> Style | None:
    return weight._style if isinstance(weight, SlicedHandle) else None


def _with_sequence(x: torch.Tensor) -> torch.Tensor:
    if x.dim() < 3:
        raise SpecError(
            f"a sliced layer under sequence(kind='megatron') takes activations (batch, sequence, width) and gets shape "
            f"{tuple(x.shape)}; keep the three dimensions, or leave the layer whole"
        )
    return x


def _add(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y + bias


def _require_whole_layer(weight: Any, bias: Any) -> None:
    style = _style(bias)
    if style is not None and not style.sums:
        told = getattr(weight, "_path", "a tensor that is not sliced")
        raise HandleError(f"{bias._path} is sliced and its weight ({told}) is not; give both the same rule")


def _refuse(func: Any, values: list[Any]) -> None:
    for handle in pytree.tree_leaves(values):
        if isinstance(handle, SlicedHandle) and not handle._style.sums:
            told, style = getattr(func, "__name__", None) or func, handle._style
            raise HandleError(
                f"{told} uses {handle._path}, of which this rank holds a slice ({style} over axis {style.axis!r}): the "
                "result would be wrong. Consume it by F.linear, F.embedding, x @ weight or sl.nn.linear_cross_entropy, or "
                f"leave its layer whole: put {_layer_of(handle._path)!r}: 'replicated' before its rule"
            )


def _adds_bias(one: Any, other: Any) -> bool:
    """Whether what is sliced of two values can be a bias: of one dimension, or of fewer than the outputs it is added to."""

    def bias(value: Any, outputs: Any) -> bool:
        if not isinstance(value, SlicedHandle) or value.dim() < 2:
            return True
        return isinstance(outputs, torch.Tensor) and not isinstance(outputs, Handle) and outputs.dim() > value.dim()

    return bias(one, other) and bias(other, one)


def _layer_of(path: str) -> str:
    return path.rpartition("/")[0] or path


_LAYERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.addmm: _addmm,
    linear_cross_entropy: _cross_entropy,
    embedding: _embedding_of_part,
    own_slice: _held,
    slice_of: _slice_of,
}
# A bias that is added by itself: its slice belongs to the slice it is added to.
_ADDITIONS = {
    torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, torch.Tensor.add_, torch.Tensor.__iadd__,
}  # fmt: skip
