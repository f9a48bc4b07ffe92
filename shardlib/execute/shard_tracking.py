"""A look at a loss function's first run, for what trains and is wrong: writes to parameters that no version counts, and uses
of a rank's share of activations, as all shapes fit.

Two kinds of shares are tracked through the functions that keep them: a sliced layer's outputs, and the positions of a
sequence's part. Each is a tag of one dimension of a tensor; `shardlib.execute.dim_rules` has what functions do along it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from shardlib.collectives.sequence.base import SequenceKind
from shardlib.collectives.styles.base import Style
from shardlib.collectives.styles.slices import Slices
from shardlib.common._compat import estimated
from shardlib.common.originals import differentiated
from shardlib.common.writes import Observer, owner_of, place_for, written
from shardlib.errors import HandleError, LossError, listing
from shardlib.execute.dim_rules import (
    CONVOLUTIONS,
    PRODUCTS,
    RECURRENT,
    DimView,
    name_of,
    pointwise,
    summed,
    together,
    views,
)
from shardlib.execute.handles import Handle
from shardlib.execute.sequence import SequenceParts
from shardlib.execute.slicing import SlicedHandle
from shardlib.execute.units import BucketState
from shardlib.nn.functional import embedding


@contextmanager
def watched(
    leaves: Mapping[str, torch.Tensor],
    path_of: Callable[[torch.Tensor], str | None],
    styles: Mapping[str, Style],
    slices: Slices,
    parts: SequenceParts | None,
    updates: set[str],
) -> Iterator[None]:
    """A context for a call that is looked at.

    Args:
        leaves: path -> what the function is given for each parameter.
        path_of: the path of the parameter in whose memory a tensor lies, or None.
        styles, slices, parts: see `ShardTracker`.
        updates: is added the names of the operators that update running statistics.

    Raises:
        HandleError, LossError: a write to a parameter, or what `ShardTracker` refuses.
    """

    def look(tensor: torch.Tensor, operator: str) -> None:
        if operator.endswith("batch_norm"):
            updates.add(operator)
        if (path := path_of(tensor)) is not None:
            raise written(operator, path)

    with Observer(look), ShardTracker(leaves, styles, slices, parts) if styles or parts else nullcontext():
        yield


class FirstRun:
    """The context of a function's calls. All of the first one's operations are looked at, and all calls for assignments to
    ``.data``.

    Args:
        states: the buckets of the parameters.
        around: ``styles, slices, parts, updates`` of `watched`.
    """

    def __init__(self, states: Sequence[BucketState], *around: Any) -> None:
        self._states, self._around = states, around
        self._over = self._looked = False

    @contextmanager
    def call(self, leaves: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """A context for one call. ``leaves``: path -> what the function is given for each parameter.

        Raises:
            HandleError: the function writes to a parameter; names it.
        """
        plain = {path: leaf for path, leaf in leaves.items() if not isinstance(leaf, Handle)}
        place = place_for(next(iter(plain.values()), None))
        before = [*map(place, plain.values())]
        with nullcontext() if self._over else watched(leaves, self._path_of, *self._around):
            yield
        self._over = True
        after = [*map(place, plain.values())]
        if after != before:
            assigned = [path for path, was, now in zip(plain, before, after) if was != now]
            raise written("an assignment to .data", *assigned)

    def require_own(self, result: Any) -> None:
        """Refuse a function whose result is differentiated to the parameters of a module that from_module copied.

        Raises:
            LossError: see above.
        """
        if found := [] if self._looked else differentiated(result):
            raise LossError(
                f"the module's own parameters are differentiated, not those given:\n{listing(found)}\nCall "
                "apply(params, ...), and a teacher in torch.no_grad()"
            )
        self._looked = True

    def _path_of(self, tensor: torch.Tensor) -> str | None:
        """The path of the parameter in whose memory, as the function sees it, a tensor lies."""
        if isinstance(tensor, Handle):
            return tensor._path
        for state in self._states:
            if state.whole is not None and owner_of(tensor, [("", state.whole)]) is not None:
                return owner_of(tensor, zip(state.bucket.paths, state.bucket.leaves(state.whole)))
        return None


class ShardTracker(TorchFunctionMode):
    """A mode that refuses attention within this rank's part of the sequence, and what `_OutputShares` and `_PositionParts`
    refuse.

    In such attention no position ever sees those of other ranks. It is known by the shapes of queries and keys: the batch and
    the part of a sequence that entered.

    Args:
        leaves: path -> what the function is given for each parameter.
        styles: path -> style of each sliced leaf.
        parts: None if sequences are whole.
    """

    def __init__(
        self,
        leaves: Mapping[str, torch.Tensor],
        styles: Mapping[str, Style],
        slices: Slices,
        parts: SequenceParts | None,
    ) -> None:
        super().__init__()
        self._parts = parts
        self._tags: list[_Tags] = [_OutputShares(styles, slices), *([_PositionParts(parts)] if parts else [])]
        self._paths = {id(leaf): path for path, leaf in leaves.items()}
        self._layers: list[str] = []  # the paths of the last layers that are not sliced, since the last attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._parts is not None:
            self._look_for_attention(self._parts, func, [*args, *kwargs.values()])
        follows = [follow for tags in self._tags if (follow := tags.look(func, args, kwargs))]
        result = func(*args, **kwargs)
        for follow in follows:
            follow(result)
        return result

    def _look_for_attention(self, parts: SequenceParts, func: Any, given: list[Any]) -> None:
        name = name_of(func)
        if name in ("linear", "matmul", "addmm"):
            matrices = (x for x in given if id(x) in self._paths and not isinstance(x, SlicedHandle) and x.dim() > 1)
            self._layers += [self._paths[id(x)] for x in matrices]
        elif func is F.scaled_dot_product_attention:
            if all(isinstance(x, torch.Tensor) and x.dim() == 4 and parts.is_part(x, 2) for x in given[:2]):
                _refuse_attention(parts.kind, self._layers)
            self._layers.clear()
        elif name == "softmax" and given[0].dim() == 4 and all(parts.is_part(given[0], dim) for dim in (2, 3)):
            _refuse_attention(parts.kind, self._layers)


def _refuse_attention(kind: SequenceKind, layers: list[str]) -> NoReturn:
    if not kind.gathers_for_slices:
        remedy = "Call sl.nn.attention for it, or take sequence(...) out of the plan"
    elif layers:
        remedy = (
            f"Slice them ('column', with heads=) and the layer after ('row') in tensor_slicing(rules, axis={kind.axis!r}), "
            "or use kind='ulysses' or 'ring' with sl.nn.attention"
        )
    else:
        remedy = (
            "Take the sequence's length from a sliced layer's output, not its input (transformers' modules cannot be used "
            "here), or take sequence(...) out of the plan"
        )
    made = f", made by layers that are whole on every rank:\n{listing(layers)}\n" if layers else ". "
    raise LossError(f"attention has queries and keys of this rank's part of the sequence only ({kind}){made}{remedy}.")


class DimTag(NamedTuple):
    """What a dimension of a tensor is.

    Attributes:
        of: what this rank has a share of along it: a sliced layer, by its weight's path, or positions.
        dim: counted from the end.
        groups: whether it counts groups, such as heads, and what follows it the elements of each.
        joined: whether several shares follow each other along it, in an order that no slice of a weight has.
    """

    of: str
    dim: int = -1
    groups: bool = False
    joined: bool = False


class _Tags(ABC):
    """Tags of tensors, and of what activations, views, products and the like make of them. A subclass says where tags come
    from, and what is refused."""

    def __init__(self) -> None:
        self._known: MutableMapping[torch.Tensor, DimTag] = WeakTensorKeyDictionary()

    @abstractmethod
    def _origin(self, x: torch.Tensor) -> DimTag | None:
        """The tag of a tensor that no function was seen to make of tagged ones."""

    @abstractmethod
    def _ways(self, tag: DimTag) -> int:
        """How many ranks have a share."""

    @abstractmethod
    def _refuse(self, tag: DimTag, call: _TaggedCall) -> None:
        """Raise if a call with a tagged tensor as its first argument is wrong."""

    @abstractmethod
    def _join(self, tags: Sequence[DimTag | None]) -> DimTag:
        """The tag of tensors with these, of which one at least has one, joined along that dimension; or raise."""

    def of(self, x: Any) -> DimTag | None:
        """The tag of a tensor, if it has one. One without elements has none."""
        if not isinstance(x, torch.Tensor) or not estimated(x.numel()):
            return None
        return self._known.get(x) or self._origin(x)

    def look(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[Any], None] | None:
        """Look at a call before it is made; returns what is to be given its result, if anything.

        Raises:
            ShardlibError: it is refused.
        """
        given, name = (*args, *kwargs.values()), name_of(func)
        if name in _JOINS:
            return self._look_at_join(args, kwargs, name == "stack")
        tags = [tag for x in given if (tag := self.of(x))]
        if not tags or (name in PRODUCTS and any(isinstance(x, SlicedHandle) for x in given)):
            return None  # or a sliced layer, which takes a part up
        found, call = tags[0], None
        if (first := self.of(args[0]) if args else None) is not None:
            call = _TaggedCall.of(first, self._ways(first), func, args, kwargs)
            self._refuse(first, call)

        def follow(result: Any) -> None:
            if isinstance(result, torch.Tensor) and not isinstance(result, SlicedHandle):
                tag = found if pointwise(func, args, kwargs) else None if call is None else call.kept(found, result)
                if tag is not None and tag.dim >= -result.dim():
                    self._known[result] = tag

        return follow

    def _look_at_join(self, args: Sequence[Any], kwargs: dict[str, Any], stacked: bool) -> Callable[[Any], None] | None:
        tensors = args[0] if args else kwargs.get("tensors", ())
        dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
        tags = [(x, self.of(x)) for x in tensors]
        if stacked:
            tag = next((tag for _, tag in tags if tag), None)
            place = None if tag is None else dim % (tensors[0].dim() + 1) - tensors[0].dim() - 1
            if tag is None or place is None:
                return None
            tag = tag if place < tag.dim else tag._replace(dim=tag.dim - 1)
            return lambda result: self._known.__setitem__(result, tag)
        if not any(tag and tag.dim == dim % x.dim() - x.dim() for x, tag in tags):
            return None
        joined = self._join([tag for x, tag in tags if estimated(x.numel())])
        return lambda result: self._known.__setitem__(result, joined)


class _TaggedCall(NamedTuple):
    """A call whose first argument is tagged.

    Attributes:
        args: what follows that one.
        size: of the tagged dimension.
        ways: how many ranks have a share of it.
        shown: what the call's results show of it; see `views`.
        whole: the same, of all ranks' shares together; None where such a call is refused.
        takes: the dimensions that the call takes together.
    """

    func: Any
    x: torch.Tensor
    args: Sequence[Any]
    kwargs: dict[str, Any]
    size: int
    ways: int
    shown: list[DimView]
    whole: list[DimView] | None
    takes: frozenset[int]

    @classmethod
    def of(cls, tag: DimTag, ways: int, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _TaggedCall:
        x, rest = args[0], args[1:]
        shown = views(func, x, tag.dim, rest, kwargs)
        whole = views(func, x, tag.dim, rest, kwargs, ways) if shown else None
        takes = together(func, x, rest, kwargs)
        return cls(func, x, rest, kwargs, estimated(x.shape[tag.dim]), ways, shown or [], whole, takes)

    @property
    def fixed(self) -> bool | None:
        """Whether a view keeps the number of what the dimension is put into where it is larger, rather than their size; None
        where that cannot be told."""
        if not self.whole or not self.whole[0].dims:
            return None
        first, whole = self.whole[0].dims[0], self.whole[0].shape
        return whole[first] != self.ways * self.shown[0].shape[first]

    def picks(self, tag: DimTag) -> bool:
        """Whether it takes some of the tagged dimension by a tensor of their numbers."""
        name = name_of(self.func)
        if name == "getitem":
            item = _item(self.args[0], self.x.dim(), tag.dim)
            return isinstance(item, torch.Tensor | list) and not _is_mask(item)
        return name in _PICKING and tag.dim == _picked(self.x, name, *self.args, **self.kwargs)

    def kept(self, tag: DimTag, result: torch.Tensor) -> DimTag | None:
        """The tag of the call's result."""
        if len(self.shown) == 1:
            return self._in_view(tag, self.shown[0])
        if name_of(self.func) in PRODUCTS:
            return tag if tag.dim < -1 else None
        if self.func is F.embedding:
            return tag._replace(dim=tag.dim - 1)
        return tag if self.takes and result.shape == self.x.shape else None  # it takes other dimensions together

    def _in_view(self, tag: DimTag, view: DimView) -> DimTag | None:
        dims = view.dims
        if self.whole and self.fixed is False:
            dims = self.whole[0].dims
        elif self.whole is None and view.shape.count(1) > self.x.shape.count(1):
            return None  # a dimension of size 1 may be the groups, or a new one
        if not dims:
            return None
        return DimTag(tag.of, dims[0], len(dims) > 1 or (tag.groups and view.shape[dims[0]] == self.size))


class _OutputShares(_Tags):
    """Shares of sliced layers' outputs.

    Args:
        styles: path -> style of each sliced leaf.
    """

    def __init__(self, styles: Mapping[str, Style], slices: Slices) -> None:
        super().__init__()
        self._styles, self._slices = styles, slices

    def look(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[Any], None] | None:
        name = name_of(func)
        if func is torch.einsum and isinstance(args[0], str):
            for place, x in enumerate(args[1:]):
                tag = self.of(x)
                if tag is not None and summed(args[0], place, tag.dim):
                    self._refuse_sum(tag, f"einsum({args[0]!r})", x.shape[tag.dim])
        if name in PRODUCTS or name == "addmm":
            self._require_one_layer(args, kwargs)
        follow = super().look(func, args, kwargs)
        tag = self.of(args[0]) if name in _MERGES and args else None
        if tag is None or tag != DimTag(tag.of):
            return follow

        def merged(result: Any) -> None:
            if follow is not None:
                follow(result)
            if self.of(result) is None and result.dim() > 1 and result.shape[-1] > args[0].shape[-1]:
                self._known[result] = tag._replace(joined=True)

        return merged

    def _join(self, tags: Sequence[DimTag | None]) -> DimTag:
        tag = next(tag for tag in tags if tag)
        return tag._replace(joined=len(tags) > 1 and not tag.groups)

    def _require_one_layer(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raise if a sliced layer is given shares that were joined."""
        given = [*args, *kwargs.values()]
        weight = next((x for x in given if isinstance(x, SlicedHandle) and not x._style.sums and x.dim() > 1), None)
        tag = next((tag for x in given if (tag := self.of(x)) and tag.joined and tag.dim == -1), None)
        if weight is not None and tag is not None:
            raise HandleError(
                f"{tag.of} is sliced ({self._sliced(tag)}), and the model gives {weight._path} its share joined with others: "
                f"this rank's slice of that weight is for other inputs. Give each share a weight of its own, and add their "
                f"products. Or {_GATHER[0].lower()}{_GATHER[1:]}"
            )

    def _origin(self, x: torch.Tensor) -> DimTag | None:
        path = self._slices.layer_of(x)
        return DimTag(path) if path and self._ways(DimTag(path)) > 1 else None

    def _ways(self, tag: DimTag) -> int:
        return self._slices.mesh.shape[self._styles[tag.of].axis]

    def _refuse(self, tag: DimTag, call: _TaggedCall) -> None:
        """Raise if a call takes together, or apart, what this rank has only some of."""
        if tag.dim in call.takes:
            self._refuse_sum(tag, name_of(call.func), call.size)
        if call.picks(tag) and not tag.groups:
            self._refuse_sum(tag, "an index by numbers", call.size)
        if tag.groups or tag.joined or not call.shown:
            return
        if len(call.shown) == 1 and len(call.shown[0].dims) > 1:
            self._require_heads(tag, call, call.shown[0])
        else:
            self._require_whole(tag, call.size, [view for view in call.shown if view.step == 1])

    def _refuse_sum(self, tag: DimTag, name: str, size: int) -> NoReturn:
        what = "heads or other groups of outputs" if tag.groups else "outputs"
        raise HandleError(
            f"{name} takes all {what} of {tag.of} together, and this rank has {size} of them ({self._sliced(tag)}). "
            f"{_GATHER}"
        )

    def _require_whole(self, tag: DimTag, size: int, pieces: Sequence[DimView]) -> None:
        """Raise if pieces of a share are neither all of it nor its heads."""
        heads = self._heads(tag)
        each = size // heads if heads else 0
        if all(piece.size in (0, size) or (piece.size == each and piece.start % each == 0) for piece in pieces):
            return
        one = pieces[0]
        taken = f"{size} outputs on this rank in {len(pieces)} parts"
        if len(pieces) == 1:
            taken = f"outputs {one.start} to {one.start + one.size - 1} of the {size} on this rank"
        raise HandleError(
            f"{tag.of} is sliced ({self._sliced(tag)}), and the model takes its {taken}. Make layers in one (gate and "
            f"up) leaves of their own, pass sl.column(heads=...), or {_GATHER[0].lower()}{_GATHER[1:]}"
        )

    def _require_heads(self, tag: DimTag, call: _TaggedCall, view: DimView) -> None:
        """Raise if the outputs are put in as many groups as all ranks together have."""
        heads, count, size = self._heads(tag), view.shape[view.dims[0]], call.size
        each = size // count
        if call.fixed is False or (heads and each == size // heads):
            return
        if call.fixed or (heads and each % (size // heads)):
            raise HandleError(
                f"{tag.of} is sliced ({self._sliced(tag)}), and the model makes {count} groups of {each} of its "
                f"{size} outputs on this rank. Use view(..., -1, {size // heads if heads else each * call.ways}), or "
                f"sl.column(heads={count * call.ways}) if a rank has {count}; for query, key and value in one "
                "'replicated', then sl.row(split=True)"
            )

    def _heads(self, tag: DimTag) -> int:
        """On this rank; 0 where the style gives none."""
        return getattr(self._styles[tag.of], "heads", 0) // self._ways(tag)

    def _sliced(self, tag: DimTag) -> str:
        style = self._styles[tag.of]
        return f"{style} over axis {style.axis!r}"


_GATHER = "Give sl.column(gather=True) for it and sl.row(split=True) for the layer after it, or 'replicated' for both"


class _PositionParts(_Tags):
    """Positions of a sequence's part. Sums over a part are right as summands of `sl.nn.sum_sequence`, and wrong beside the
    positions themselves."""

    def __init__(self, parts: SequenceParts) -> None:
        super().__init__()
        self._parts = parts
        self._sums: MutableMapping[torch.Tensor, str] = WeakTensorKeyDictionary()  # with the name of what summed

    def look(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[Any], None] | None:
        if self._parts.busy:  # the library's own code
            return None
        given, name = (*args, *kwargs.values()), name_of(func)
        by = next((self._sums[x] for x in given if isinstance(x, torch.Tensor) and x in self._sums), None)
        elementwise = pointwise(func, args, kwargs)
        if (elementwise or name in PRODUCTS or func is torch.einsum) and by and any(map(self.of, given)):
            self._fail(f"{by} over positions, whose result is used beside them,")
        tags = [self.of(x) for x in args[:2]]
        if name in PRODUCTS and all(tag and tag.dim == -2 for tag in tags):  # a matrix of positions times positions
            self._fail(f"{name} over positions")
        follow = super().look(func, args, kwargs)
        tag = self.of(args[0]) if args else None
        sums = name if tag and tag.dim in together(func, args[0], args[1:], kwargs) else by if elementwise else None
        if func is torch.einsum and isinstance(args[0], str):
            parts = [(place, tag) for place, x in enumerate(args[1:]) if (tag := self.of(x))]
            sums = name if any(summed(args[0], place, tag.dim) for place, tag in parts) else None

        def followed(result: Any) -> None:
            if follow is not None:
                follow(result)
            if func is embedding:
                self._known[result] = DimTag("positions", -2)
            for each in result if isinstance(result, tuple) else (result,):
                if sums and isinstance(each, torch.Tensor):
                    self._sums[each] = sums

        return followed if follow or sums or func is embedding else None

    def _origin(self, x: torch.Tensor) -> DimTag | None:
        dim = self._parts.dim_of(x)
        return None if dim is None else DimTag("positions", dim)

    def _ways(self, tag: DimTag) -> int:
        return self._parts.size

    def _join(self, tags: Sequence[DimTag | None]) -> DimTag:
        if None in tags:
            self._fail(
                "a join of positions with others, which every rank would have,",
                "Join the whole sequence before sl.nn.shard_sequence or sl.nn.embedding, such as with tokens before it",
            )
        return next(tag for tag in tags if tag)

    def _refuse(self, tag: DimTag, call: _TaggedCall) -> None:
        name = name_of(call.func)
        if name in _MIXING and tag.dim in call.takes:
            self._fail(f"{name} over positions")
        if call.func is F.pad and any(_padding(*call.args, **call.kwargs)[-2 - 2 * tag.dim : -2 * tag.dim]):
            self._fail("F.pad along positions")
        item = _item(call.args[0], call.x.dim(), tag.dim) if name == "getitem" else None
        if call.picks(tag):
            self._fail(
                "an index of positions by numbers",
                "Multiply by a mask, sl.nn.shard_sequence(mask), and take the sum of all positions by sl.nn.sum_sequence",
            )
        one = isinstance(item, int) or (name == "select" and bool(call.shown) and not call.shown[0].dims)
        # One group is a stretch of positions, as a loop over these takes them.
        if call.size > 1 and ((one and not tag.groups) or _leaves_out_an_end(item)):
            self._fail(
                "an index that leaves out positions at an end of the part",
                "Shift or cut the batch before sl.nn.shard_sequence; sl.nn.gather_sequence is for what has no parameters",
            )

    def _fail(self, what: str, remedy: str = "") -> NoReturn:
        remedy = remedy or "Mix positions by sl.nn.attention alone, or take sequence(...) out of the plan"
        raise LossError(f"{what} sees this rank's part of the sequence only ({self._parts.kind}). {remedy}")


def _padding(pad: Sequence[int], *args: Any, **options: Any) -> Sequence[int]:
    return pad


def _picked(x: torch.Tensor, name: str, first: Any = None, second: Any = None, **named: Any) -> int | None:
    """The dimension from which numbers are picked by a tensor of their places."""
    dim = named.get("dim", second if name == "take_along_dim" else first)
    return dim % x.dim() - x.dim() if isinstance(dim, int) else None


def _item(index: Any, dims: int, dim: int) -> Any:
    """What an index has for a dimension: a number, a slice, a tensor."""
    items = [item for item in (index if isinstance(index, tuple) else (index,)) if item is not None]
    taken = [0 if item is Ellipsis else item.dim() if _is_mask(item) else 1 for item in items]
    place = dims + dim
    for item, count in zip(items, taken):
        count = dims - sum(taken) if item is Ellipsis else count
        if place < count:
            return slice(None) if item is Ellipsis else item
        place -= count
    return slice(None)


def _is_mask(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype is torch.bool


def _leaves_out_an_end(item: Any) -> bool:
    """Whether an index is a slice that is open at one end alone, as shifts are; pieces of a loop have both ends."""
    if not isinstance(item, slice) or item.step not in (None, 1):
        return False
    return (item.start is None and bool(item.stop)) or (item.stop is None and bool(item.start))


_PICKING = {"gather", "index_select", "take_along_dim"}
_JOINS = {"cat", "concat", "concatenate", "stack"}
_MERGES = {"view", "reshape", "flatten", "repeat", "tile", "pad"}
# Functions that mix what they take together into results for each of it.
_MIXING = {
    *("softmax", "log_softmax", "normalize", "layer_norm", "rms_norm", "group_norm", *CONVOLUTIONS, *RECURRENT),
    *("cumsum", "cumprod", "logcumsumexp", "sort", "argsort", "roll", "flip", "softmin", "gumbel_softmax", "cummax"),
    *("cummin", "diff", "batch_norm", "instance_norm", "local_response_norm"),
    *("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft"),
}
