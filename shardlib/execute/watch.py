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
from shardlib.errors import LossError, listing
from shardlib.execute.following import Following
from shardlib.execute.output_shares import OutputShares
from shardlib.execute.position_parts import PositionParts
from shardlib.execute.sequence import SequenceParts
from shardlib.execute.slicing import SlicedHandle


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
