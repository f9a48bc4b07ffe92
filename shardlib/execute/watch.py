"""A look at a loss function's first run, for what trains and is wrong: uses of sliced activations, as all shapes fit, and
writes to parameters that no version counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from shardlib.collectives.sequence.base import SequenceKind
from shardlib.collectives.styles.base import Style
from shardlib.collectives.styles.slices import Slices
from shardlib.common.originals import differentiated
from shardlib.common.writes import Observer, owner_of, place_for, written
from shardlib.errors import LossError, listing
from shardlib.execute.following import Following
from shardlib.execute.handles import Handle
from shardlib.execute.output_shares import OutputShares
from shardlib.execute.position_parts import PositionParts
from shardlib.execute.sequence import SequenceParts
from shardlib.execute.slicing import SlicedHandle
from shardlib.execute.units import BucketState


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
        styles, slices, parts: see `Watch`.
        updates: is added the names of the operators that update running statistics.

    Raises:
        HandleError, LossError: a write to a parameter, or what `Watch` refuses.
    """

    def look(tensor: torch.Tensor, operator: str) -> None:
        if operator.endswith("batch_norm"):
            updates.add(operator)
        if (path := path_of(tensor)) is not None:
            raise written(operator, path)

    with Observer(look), Watch(leaves, styles, slices, parts) if styles or parts else nullcontext():
        yield


class FirstRun:
    """The context of a function's calls. All of the first one's operations are looked at, and all calls for assignments to
    ``.data``.

    Args:
        states: the buckets of the parameters.
        styles, slices, parts: see `Watch`.
        updates: see `watched`.
    """

    def __init__(
        self,
        states: Sequence[BucketState],
        styles: Mapping[str, Style],
        slices: Slices,
        parts: SequenceParts | None,
        updates: set[str],
    ) -> None:
        self._states, self._styles, self._slices, self._parts = states, styles, slices, parts
        self._updates = updates
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
        about = self._styles, self._slices, self._parts, self._updates
        with nullcontext() if self._over else watched(leaves, self._path_of, *about):
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
                f"parameters of a module itself, in whose place the function is given others, are differentiated:\n"
                f"{listing(found)}\nCall apply(params, ...), and read params; where the module is to stay as it is (as a "
                "teacher), call it in torch.no_grad()"
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


class Watch(TorchFunctionMode):
    """A mode that refuses attention within this rank's part of the sequence, and what `OutputShares` and `PositionParts` do.

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
        self._followed: list[Following] = [OutputShares(styles, slices), *([PositionParts(parts)] if parts else [])]
        self._paths = {id(leaf): path for path, leaf in leaves.items()}
        self._layers: list[str] = []  # the paths of the last layers that are not sliced, since the last attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._parts is not None:
            self._look_for_attention(self._parts, func, [*args, *kwargs.values()])
        follows = [follow for each in self._followed if (follow := each.look(func, args, kwargs))]
        result = func(*args, **kwargs)
        for follow in follows:
            follow(result)
        return result

    def _look_for_attention(self, parts: SequenceParts, func: Any, given: list[Any]) -> None:
        if func in _LAYERS:
            matrices = (x for x in given if id(x) in self._paths and not isinstance(x, SlicedHandle) and x.dim() > 1)
            self._layers += [self._paths[id(x)] for x in matrices]
        elif func in _ATTENTION:
            if all(isinstance(x, torch.Tensor) and x.dim() == 4 and parts.is_part(x, 2) for x in given[:2]):
                _refuse(parts.kind, self._layers)
            self._layers.clear()
        elif func in _SOFTMAX and given[0].dim() == 4 and all(parts.is_part(given[0], dim) for dim in (2, 3)):
            _refuse(parts.kind, self._layers)


_LAYERS = {F.linear, torch.addmm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}
_ATTENTION = {F.scaled_dot_product_attention}
_SOFTMAX = {F.softmax, torch.softmax, torch.Tensor.softmax}


def _refuse(kind: SequenceKind, layers: list[str]) -> NoReturn:
    if not kind.gathers_for_slices:
        remedy = "Call sl.nn.attention for it, or take sequence(...) out of the plan"
    elif layers:
        remedy = (
            "Slice them ('column', with heads=), and the layer after attention ('row'), in tensor_slicing(rules, "
            f"axis={kind.axis!r}); or use kind='ulysses' or 'ring' with sl.nn.attention"
        )
    else:
        remedy = (
            "Code that takes the sequence's length from the input of a sliced layer, as transformers' modules do, cannot be "
            "used here: take it from the layer's output (see shardlib.models.gpt), or take sequence(...) out of the plan"
        )
    made = f", made by layers that are whole on every rank:\n{listing(layers)}\n" if layers else ". "
    raise LossError(
        f"attention has queries and keys of this rank's part of the sequence only ({kind}), so that positions of different "
        f"ranks would never see each other{made}{remedy}."
    )
