"""A look at a loss function's first run, for uses of sliced activations that train and are wrong, as all shapes fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from shardlib.collectives.sequence.base import SequenceKind
from shardlib.collectives.styles.base import Style
from shardlib.collectives.styles.slices import Slices
from shardlib.errors import HandleError, LossError, listing
from shardlib.execute.last_dimension import HALVING, NUMBER_BY_NUMBER, SOFTMAX, SUMMING
from shardlib.execute.sequence import SequenceParts
from shardlib.execute.slicing import SlicedHandle


class Watch(TorchFunctionMode):
    """A mode that refuses attention within this rank's part of the sequence, and parts and sums of its share of a layer's
    outputs.

    In such attention no position ever sees those of other ranks. It is known by the shapes of queries and keys: the batch and
    the part of a sequence that entered. And where a layer is two in one (gate and up of Phi-3), the first half of a rank's
    share is not its share of the first half. A softmax or a norm of a share knows no outputs of other ranks.

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
        self._styles, self._slices, self._parts = styles, slices, parts
        self._paths = {id(leaf): path for path, leaf in leaves.items()}
        self._layers: list[str] = []  # the paths of the last layers that are not sliced, since the last attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*args, *kwargs.values()]
        if self._parts is not None:
            self._look_for_attention(self._parts, func, given)
        shares = {id(x): path for x in given if isinstance(x, torch.Tensor) and (path := self._slices.layer_of(x))}
        if args and (path := shares.get(id(args[0]))):
            if func in HALVING:
                self._refuse_halves(path, args[0], HALVING[func](*args, **kwargs))
            if func in SUMMING:
                self._refuse_sums(path, args[0], func, SUMMING[func](*args, **kwargs))
        result = func(*args, **kwargs)
        if shares and getattr(func, "__name__", "").strip("_") in NUMBER_BY_NUMBER:
            self._slices.hand_on(next(iter(shares.values())), result)
        return result

    def _look_for_attention(self, parts: SequenceParts, func: Any, given: list[Any]) -> None:
        if func in _LAYERS:
            matrices = (x for x in given if id(x) in self._paths and not isinstance(x, SlicedHandle) and x.dim() > 1)
            self._layers += [self._paths[id(x)] for x in matrices]
        elif func in _ATTENTION:
            if all(isinstance(x, torch.Tensor) and x.dim() == 4 and parts.is_part(x, 2) for x in given[:2]):
                _refuse(parts.kind, self._layers)
            self._layers.clear()
        elif func in SOFTMAX and given[0].dim() == 4 and all(parts.is_part(given[0], dim) for dim in (2, 3)):
            _refuse(parts.kind, self._layers)

    def _refuse_halves(self, path: str, share: torch.Tensor, cuts: int) -> None:
        """Raise if ``cuts`` equal parts of a share are taken and are not its heads."""
        style, axis = self._styles[path], self._styles[path].axis
        heads = getattr(style, "heads", 0) // self._slices.mesh.shape[axis]
        if cuts > 1 and cuts != heads:
            raise HandleError(
                f"{path} is sliced ({style} over axis {axis!r}), and the model takes its {share.shape[-1]} outputs on this "
                f"rank in {cuts} parts: where a layer is several in one (gate and up), a rank's parts are outputs of others. "
                "Make them leaves of their own, or give sl.column(gather=True) for it and sl.row(split=True) for the layer "
                "after it, or 'replicated' for both; where the parts are heads, give their number: sl.column(heads=...)"
            )

    def _refuse_sums(self, path: str, share: torch.Tensor, func: Any, over_last: bool) -> None:
        """Raise if ``func`` sums ``share`` over its outputs, of which other ranks have more."""
        style, axis = self._styles[path], self._styles[path].axis
        if over_last and self._slices.mesh.shape[axis] > 1:
            raise HandleError(
                f"{func.__name__} takes all outputs of {path} together, and this rank has {share.shape[-1]} of them ({style} "
                f"over axis {axis!r}): the result would be wrong. Give sl.column(gather=True) for it and sl.row(split=True) "
                "for the layer after it, or 'replicated' for both; a number to look at can be taken of the share's detach()"
            )


_LAYERS = {F.linear, torch.addmm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}
_ATTENTION = {F.scaled_dot_product_attention}


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
