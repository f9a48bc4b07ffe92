"""The functions of `shardlib.nn.sequence` under a plan that cuts sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from shardlib.collectives import pairs, primitives
from shardlib.collectives.sequence.base import Attention, SequenceKind
from shardlib.errors import LossError, SpecError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.nn.attention import plain_attention
from shardlib.nn.functional import Mean


class SequenceParts:
    """One rank's sequence parts.

    Args:
        done: a set to which the steps ("enter", "mix", "leave") that a loss function takes are added. A loss function that
            leaves one out is wrong: see `require_whole_loss`.

    Attributes:
        size: how many parts there are.
        busy: whether one of these functions runs, which know that a part is one.
    """

    busy: bool
    kind: SequenceKind
    size: int

    def __init__(self, kind: SequenceKind, mesh: Mesh, done: set[str]) -> None:
        self.kind, self._mesh = kind, mesh
        self._axis, self.size, self._rank = kind.axis, mesh.shape[kind.axis], mesh.coords[kind.axis]
        self._done = done
        # Batch and length of whole sequences of which this rank took its part.
        self._entered: list[tuple[int, int]] = []
        self._made: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()  # part -> dimension of positions
        self.busy = False

    def note(self, what: str) -> None:
        """Note that the loss function took the step ``what``."""
        self._done.add(what)

    def shard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        self.note("enter")
        if (entered := (x.shape[0], x.shape[dim])) not in self._entered:  # which a trace cannot hash
            self._entered.append(entered)
        chunks = [x.narrow(dim, start, length) for start, length in self.chunks(x.shape[dim])]
        part = chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim)
        self._made[part] = dim if dim < 0 else dim - x.dim()
        return part

    def dim_of(self, x: torch.Tensor) -> int | None:
        """The dimension of positions, counted from the end, of what `shard` has returned; None of other tensors."""
        return self._made.get(x)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    def chunks(self, length: int) -> list[tuple[int, int]]:
        return self.kind.chunks(self._rank, self.size, length)

    def is_part(self, x: torch.Tensor, dim: int) -> bool:
        """Whether ``x`` (batch, ...) has the length of a part of a sequence along ``dim``, and of no whole one."""
        batch, length = x.shape[0], x.shape[dim]
        return (batch, length * self.size) in self._entered and (batch, length) not in self._entered

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        self.note("leave")
        whole = pairs.all_gather(x, self._axis, dim=dim, dst="invariant", mesh=self._mesh)
        chunks = [chunk for rank in range(self.size) for chunk in self.kind.chunks(rank, self.size, whole.shape[dim])]
        if chunks == sorted(chunks):
            return whole
        tensors = whole.split([length for _, length in chunks], dim)
        return torch.cat([tensor for _, tensor in sorted(zip(chunks, tensors), key=lambda pair: pair[0])], dim)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.note("leave")
        return pairs.all_reduce(x, self._axis, dst="invariant", mesh=self._mesh)

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Attention) -> torch.Tensor:
        self.note("mix")
        with self._inside():
            return self.kind.attention(q, k, v, how, plain_attention, self._mesh)

    def loss(
        self,
        part: Callable[[torch.Tensor, str], torch.Tensor],
        x: torch.Tensor,
        targets: torch.Tensor,
        ignore_index: int,
        reduction: str,
    ) -> torch.Tensor:
        """The loss of all positions, equal on all ranks.

        Args:
            part: ``part(targets, reduction)`` gives the loss of this rank's positions.
        """
        if targets.dim() < 2 or x.shape[:-1] != (targets.shape[0], targets.shape[1] // self.size, *targets.shape[2:]):
            raise SpecError(
                f"linear_cross_entropy under {self.kind} got targets {tuple(targets.shape)} and x {tuple(x.shape)}; "
                f"pass (batch, sequence) and (batch, sequence / {self.size}, width)"
            )
        with self._inside():
            local_targets = self.shard(targets, 1)
            if reduction == "none":
                return self.gather(part(local_targets, "none"), 1)
            total = self.sum(part(local_targets, "sum"))
            return total if reduction == "sum" else total / (targets != ignore_index).sum()

    def positions(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The position in the whole sequence of each element of dimension 1 of ``x``, and the whole sequence's length."""
        whole = x.shape[1] * self.size
        return torch.cat(
            [torch.arange(start, start + length, device=x.device) for start, length in self.chunks(whole)]
        ), whole


def require_whole_loss(
    kind: SequenceKind,
    mesh: Mesh,
    done: Iterable[str],
    loss: Sequence[Mean] | None,
    along: Sequence[str] = (),
) -> None:
    """Refuse a loss function that would train wrongly without a sign. Collective; called after the function's first call.

    Args:
        done: the steps that the function took on this rank.
        loss: the means of the loss; None on a rank that does not compute it.
        along: axes along which ranks run different code, and so take different steps of the same call.

    Raises:
        LossError: a step that is left out, or a loss that differs between the ranks that share a batch.
    """
    numbers = None
    if loss is not None and not mesh.abstract:
        numbers = torch.stack([number.detach().double().to(mesh.device) for mean in loss for number in mean]).tolist()
    everyone = primitives.all_gather_object(mesh, [*along, kind.axis], (set(done), numbers))
    taken = {step for steps, _ in everyone for step in steps}
    if not kind.needs_attention:
        taken.add("mix")
    missing = [functions for name, functions in _STEPS.items() if name not in taken]
    if missing:
        raise LossError(
            f"the plan cuts sequences ({kind}) and the loss function never calls\n{listing(missing)}\nUse these, or "
            "leave out sequence(...)."
        )
    losses = [of_rank for _, of_rank in everyone if of_rank is not None]
    # Equal losses are sums of the same numbers in the same order. A difference beyond rounding means partial losses.
    if any(abs(a - b) > 1e-6 * abs(b) for of_rank in losses for a, b in zip(of_rank, losses[0])):
        values = ", ".join(f"rank {rank}: {total:g} (weight {w:g})" for rank, (total, w) in enumerate(losses))
        raise LossError(
            f"the loss differs along axis {kind.axis!r} ({kind}): {values}. Use sl.nn.linear_cross_entropy, or add "
            "the ranks' parts by sl.nn.sum_sequence"
        )


_STEPS = {
    "enter": "sl.nn.shard_sequence or sl.nn.embedding (this rank's part of the sequence)",
    "mix": "sl.nn.attention (attention over the whole sequence)",
    "leave": "sl.nn.linear_cross_entropy, sl.nn.sum_sequence or sl.nn.gather_sequence (the loss of the whole sequence)",
}
