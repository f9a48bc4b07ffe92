"""What a style computes with: this rank's slice of a leaf, and the dual pairs around what slices do.

The pairs are those of Megatron-LM: a copy before and an all-reduce after the slices; or, where sequences are cut over the
same axis (arXiv 2205.05198), a gather and a reduce-scatter along the sequence, which together send as much.
"""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shardlib._compat import version_of
from shardlib.collectives import pairs
from shardlib.collectives.sequence.base import SequenceKind
from shardlib.errors import HandleError, SpecError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.specs import Window, chunk_size


class Slices:
    """What the sliced leaves of one run share: the mesh, and the pair of the input that was last consumed.

    Args:
        sequence: how sequences are cut, where they are.
    """

    def __init__(self, mesh: Mesh, sequence: SequenceKind | None) -> None:
        self.mesh, self._sequence = mesh, sequence
        self._last: dict[str, tuple[weakref.ref[torch.Tensor], tuple[int, bool], torch.Tensor]] = {}
        self._shares: dict[str, str] = {}  # of outputs that no sum has taken up yet: by the layer's path

    def cuts_sequence(self, axis: str) -> bool:
        """Whether activations outside the slices over ``axis`` are parts of the sequence."""
        return self._sequence is not None and self._sequence.gathers_for_slices and self._sequence.axis == axis

    def enter(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        """One pair per input: several layers that read it (query, key, value) then share one exchange each way."""
        grad = x.requires_grad and torch.is_grad_enabled()
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

    def leave(self, y: torch.Tensor, axis: str) -> torch.Tensor:
        self._shares.clear()
        if self.cuts_sequence(axis):
            return pairs.reduce_scatter(self._with_sequence(y), axis, dim=1, mesh=self.mesh)
        return pairs.all_reduce(y, axis, dst="invariant", mesh=self.mesh)

    def whole_outputs(self, y: torch.Tensor, axis: str, outputs: int) -> torch.Tensor:
        """Shares that are shorter than others travel padded."""
        share = chunk_size(outputs, self.mesh.shape[axis])
        if y.shape[-1] < share:
            y = F.pad(y, (0, share - y.shape[-1]))
        if self.cuts_sequence(axis):
            whole = pairs.all_to_all(self._with_sequence(y), axis, split_dim=1, concat_dim=-1, mesh=self.mesh)
        else:
            whole = pairs.all_gather(y, axis, dim=-1, dst="invariant", mesh=self.mesh)
        return whole if whole.shape[-1] == outputs else whole[..., :outputs].contiguous()

    def own_inputs(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        if self.cuts_sequence(axis):
            return pairs.all_to_all(self._with_sequence(x), axis, split_dim=-1, concat_dim=1, mesh=self.mesh)
        return pairs.split(x, axis, dim=-1, mesh=self.mesh)

    def note_share(self, path: str, axis: str, share: int, outputs: int) -> None:
        self._shares[path] = f"{share} of {outputs} outputs (axis {axis!r} of size {self.mesh.shape[axis]})"

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

    def _with_sequence(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() < 3:
            raise SpecError(
                f"a sliced layer where sequences are cut ({self._sequence}) takes activations (batch, sequence, width) and "
                f"gets shape {tuple(x.shape)}; keep the three dimensions, or leave the layer whole"
            )
        return x


@dataclass(frozen=True)
class Slice:
    """This rank's slice of a leaf, where a layer consumes it.

    Activations outside sliced layers are whole on every rank, or under kind="megatron" of `shardlib.sequence` over the same
    axis parts of the sequence (batch, part, width): `enter`, `leave`, `whole_outputs` and `own_inputs` know which.

    Attributes:
        path: the leaf's.
        axis: what it is sliced over.
        window: which part of the whole leaf it is.
        local: its values, without what pads it; of a slice that is padding alone one row of zeros.
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
        """``x`` as slices read it, all of it on every rank: backward sums the slices' gradients.

        Layers that read the same tensor one after the other share one exchange each way.
        """
        return self._run.enter(x, self.axis)

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        """The sum of the slices' partial results."""
        return self._run.leave(y, self.axis)

    def whole_outputs(self, y: torch.Tensor, outputs: int) -> torch.Tensor:
        """Every rank's share of so many outputs (the last dimension), put together."""
        return self._run.whole_outputs(y, self.axis, outputs)

    def own_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's share of inputs (the last dimension) that come whole; of all positions."""
        return self._run.own_inputs(x, self.axis)

    def share(self, y: torch.Tensor, outputs: int) -> torch.Tensor:
        """``y``, noted as this rank's share of so many outputs: what to say of a shape that then does not fit."""
        self._run.note_share(self.path, self.axis, y.shape[-1], outputs)
        return y
