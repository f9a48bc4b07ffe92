"""This rank's slice of a leaf, and the dual pairs before and after a sliced layer, from which styles are made.

The pairs are those of Megatron-LM: a copy before the layer and an all-reduce after it. Where sequences are cut over the same
axis (arXiv 2205.05198) they are a gather and a reduce-scatter along the sequence, which together send as many bytes.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from shardlib.collectives import pairs
from shardlib.collectives.sequence.base import SequenceKind
from shardlib.common._compat import differentiated, version_of
from shardlib.errors import HandleError, SpecError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.specs import Window, chunk_size


class Slices:
    """The state that all sliced leaves share in one run of the loss function.

    Args:
        mesh: the mesh.
        sequence: the kind by which sequences are cut; None if they are not.
    """

    mesh: Mesh

    def __init__(self, mesh: Mesh, sequence: SequenceKind | None) -> None:
        self.mesh, self._sequence = mesh, sequence
        # Axis -> the input that `enter` was last called with, its version and whether it had a gradient, and the result.
        self._last: dict[str, tuple[weakref.ref[torch.Tensor], tuple[int, bool], torch.Tensor]] = {}
        # Path -> description of the share of a layer's outputs, of layers since the last `leave`.
        self._shares: dict[str, str] = {}
        self._parts: MutableMapping[torch.Tensor, str] = WeakTensorKeyDictionary()  # share of outputs -> layer's path

    def cuts_sequence(self, axis: str) -> bool:
        """Whether activations outside the slices over ``axis`` are parts of the sequence."""
        return self._sequence is not None and self._sequence.gathers_for_slices and self._sequence.axis == axis

    def enter(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        """See `Slice.enter`. Layers that read the same input (query, key, value) get the same result, of one exchange."""
        grad = torch.is_grad_enabled() and differentiated(x)
        if not grad and not self.cuts_sequence(axis):
            return x
        known = self._last.get(axis)
        if known is not None and known[0]() is x and known[1] == (version_of(x), grad):
            return known[2]
        if self.cuts_sequence(axis):
            entered = pairs.all_gather(self._with_sequence(x), axis, dim=1, mesh=self.mesh)
        else:
            entered = pairs.copy(x, axis, mesh=self.mesh)
        self._last[axis] = (weakref.ref(x), (version_of(x), grad), entered)
        return entered

    def let_go(self) -> None:
        """Drop what was entered last, and with it the graph that it came from: what follows reads other inputs."""
        self._last.clear()

    def leave(self, y: torch.Tensor, axis: str) -> torch.Tensor:
        self._shares.clear()
        if self.cuts_sequence(axis):
            return pairs.reduce_scatter(self._with_sequence(y), axis, dim=1, mesh=self.mesh)
        return pairs.all_reduce(y, axis, dst="invariant", mesh=self.mesh)

    def whole_outputs(self, y: torch.Tensor, axis: str, outputs: int) -> torch.Tensor:
        """See `Slice.whole_outputs`. Shares that are shorter than others are sent padded."""
        share = chunk_size(outputs, self.mesh.shape[axis])
        if y.shape[-1] < share:
            y = F.pad(y, (0, share - y.shape[-1]))
        if self.cuts_sequence(axis):
            whole = pairs.all_to_all(self._with_sequence(y), axis, split_dim=1, concat_dim=-1, mesh=self.mesh)
        else:
            whole = pairs.all_gather(y, axis, dim=-1, dst="invariant", mesh=self.mesh)
        return whole if whole.shape[-1] == outputs else whole[..., :outputs].contiguous()

    def input_share(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        if self.cuts_sequence(axis):
            return pairs.all_to_all(self._with_sequence(x), axis, split_dim=-1, concat_dim=1, mesh=self.mesh)
        return pairs.split(x, axis, dim=-1, mesh=self.mesh)

    def note_share(self, path: str, axis: str, y: torch.Tensor, outputs: int) -> None:
        self._shares[path] = f"{y.shape[-1]} of {outputs} outputs (axis {axis!r} of size {self.mesh.shape[axis]})"
        self._parts[y] = path

    def layer_of(self, y: torch.Tensor) -> str | None:
        """The path of the layer's weight, if ``y`` is what a layer returned as this rank's share of its outputs."""
        return self._parts.get(y)

    def explain(self, error: Exception) -> HandleError | None:
        """An error to raise for ``error``, if it is about a shape that may not fit because layers returned shares of
        outputs."""
        if isinstance(error, HandleError) or not self._shares or not re.search("shape|size|dimension", str(error)):
            return None
        shares = listing([f"{path}: {share}" for path, share in self._shares.items()])
        return HandleError(
            f"a shape does not fit ({error}) after layers that return this rank's share of their "
            f"outputs:\n{shares}\nTake sizes from the input, view(..., -1, head_size), and give heads, "
            "sl.column(heads=...) (transformers: sl.models.huggingface.slicing_rules and sliceable); or give these "
            "layers 'replicated' and sl.row(split=True) after them"
        )

    def clear(self) -> None:
        self.let_go()
        self._shares.clear()
        self._parts.clear()

    def _with_sequence(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() < 3:
            raise SpecError(
                f"a sliced layer under {self._sequence} got shape {tuple(x.shape)}; pass (batch, sequence, width), or "
                "leave the layer whole"
            )
        return x


@dataclass(frozen=True)
class Slice:
    """This rank's slice of a leaf, as a layer uses it.

    Activations outside sliced layers are whole on every rank; or, under kind="megatron" of `shardlib.sequence` over the same
    axis, sequence parts (batch, part, width). `enter`, `leave`, `whole_outputs` and `input_share` take care of either.

    Attributes:
        path: the leaf's path.
        axis: the axis that the leaf is sliced over.
        window: the slice's elements in the whole leaf.
        local: the slice's values, without padding; one row of zeros for a slice that is only padding.
    """

    path: str
    axis: str
    window: Window
    local: torch.Tensor
    _run: Slices

    @property
    def mesh(self) -> Mesh:
        return self._run.mesh

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's whole input on every rank. Backward sums the gradients that the slices give it.

        Consecutive layers that read the same tensor share one exchange each way.
        """
        return self._run.enter(x, self.axis)

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of the partial results ``y``."""
        return self._run.leave(y, self.axis)

    def whole_outputs(self, y: torch.Tensor, outputs: int) -> torch.Tensor:
        """All ``outputs`` outputs (the last dimension), from every rank's share ``y``."""
        return self._run.whole_outputs(y, self.axis, outputs)

    def input_share(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's share of the inputs (the last dimension) from the whole inputs ``x``, for all positions."""
        return self._run.input_share(x, self.axis)

    def share(self, y: torch.Tensor, outputs: int) -> torch.Tensor:
        """``y``, recorded as this rank's share of ``outputs`` outputs, to explain a shape that does not fit later, and to
        refuse parts of it."""
        self._run.note_share(self.path, self.axis, y, outputs)
        return y
