"""Attention whose keys and values travel around a ring of ranks (Liu, Zaharia, Abbeel, arXiv 2310.01889).

Each rank keeps its queries. In P steps it receives the keys and values of every rank, and combines the blocks' results by the
online softmax: with scores s of one block, L' = log(e^L + Σe^s) and O' = O·e^(L−L') + Σe^(s−L')·v, in fp32 or wider.
In backward keys and values travel once more, p = e^(s−L) is computed anew, and the gradients of keys and values travel with
them:

    dV = pᵀ dO        dS = p ∘ (dO Vᵀ − rowsum(dO ∘ O))        dQ = dS K        dK = dSᵀ Q

Rank r holds chunks r and 2P−1−r of 2P (zig-zag). Under a causal mask it then computes half a block with every other rank, so
that no rank waits for another with more work.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from shardlib.collectives import ops
from shardlib.collectives.ops import Place, mesh_of, place_of
from shardlib.collectives.sequence.base import Attend, Attention, SequenceKind
from shardlib.common._compat import no_modes, traced, whole_in_graphs
from shardlib.common.boundaries import DifferentiatedOnce
from shardlib.errors import SpecError
from shardlib.mesh.mesh import Mesh


class Ring(SequenceKind):
    """A kind in which keys and values travel around the ring of ranks, each of which holds two chunks of the sequence.

    Memory: two other ranks' keys and values (one in use, one arriving), and the scores of one block. Payload per rank: P−1
    times its keys and values in forward; in backward the same again, and as many gradients (in fp32 or wider).
    """

    name: ClassVar[str] = "ring"

    def chunks(self, rank: int, size: int, length: int) -> list[tuple[int, int]]:
        """Two chunks, equally far from either end of the sequence.

        Under a causal mask early positions see few keys and late ones many, so this gives every rank the same work.
        """
        chunks = 2 * size
        step = self.step(length, size, chunks, f": two chunks a rank, {chunks} in all")
        return [(chunk * step, step) for chunk in (rank, chunks - 1 - rank)]

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Attention, attend: Attend, mesh: Mesh
    ) -> torch.Tensor:
        """See `SequenceKind.attention`.

        Raises:
            SpecError: keys and queries of different lengths, or of an odd length; a layout.
            ValueError: segments or a key mask of another shape.
            LossError: a second derivative, or forward mode.
        """
        if k.shape[2] != q.shape[2] or q.shape[2] % 2:
            raise SpecError(
                f"ring attention over axis {self.axis!r} got {k.shape[2]} keys and {q.shape[2]} queries; pad both to "
                "one even number, or use kind='ulysses'"
            )
        if how.layout is not None:
            raise SpecError(f"ring attention over axis {self.axis!r} takes no layout; use kind='ulysses' or 'megatron'")
        groups = _groups(how, q.shape[0], q.shape[2] * mesh.shape[self.axis])
        scale = q.shape[-1] ** -0.5 if how.scale is None else how.scale
        return _Ring.apply(q, k, v, groups, place_of(mesh, self.axis), self.axis, how.causal, scale)[0]


def _groups(how: Attention, batch: int, length: int) -> torch.Tensor | None:
    """(batch, 2, whole sequence): numbers of queries, and of keys; a query sees the keys with its own number."""
    how.require_segments(batch, length)
    if how.key_mask is None:
        return None if how.segments is None else how.segments.long()[:, None].expand(-1, 2, -1)
    if how.key_mask.shape != (batch, length):
        raise ValueError(
            f"key_mask is (batch, sequence) = {(batch, length)}, of the whole sequence on every rank, and got "
            f"{tuple(how.key_mask.shape)}"
        )
    queries = torch.zeros_like(how.key_mask, dtype=torch.long) if how.segments is None else how.segments.long()
    return torch.stack([queries, queries.where(how.key_mask, queries.amin() - 1)], 1)


class _Attention(DifferentiatedOnce):
    """A Function of tensors (or None), whose first dimension is the batch, and of the mesh, axis, mask and scale."""

    what, remedy = "ring attention", "Take sequence(kind='ulysses'), which has them all"

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        """One trip for all samples: their batches become one."""
        size = info.batch_size
        tensors = [
            None if x is None else (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
            for x, dim in zip(inputs[:-4], in_dims)
        ]
        outputs = cls.apply(*tensors, *inputs[-4:])
        return tuple(each.unflatten(0, (size, -1)) for each in outputs), (0,) * len(outputs)


@whole_in_graphs
class _Ring(_Attention):
    @staticmethod
    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        groups: torch.Tensor | None,
        place: Place,
        axis: str,
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with _hidden(q):
            return _forward(q, k, v, _Trip(mesh_of(place), axis, causal, groups), scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[:4], *output)
        ctx.static = inputs[4:]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        return *_RingGradients.apply(*ctx.saved_tensors, grad, *ctx.static), None, None, None, None, None


class _RingGradients(_Attention):
    @staticmethod
    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        groups: torch.Tensor | None,
        out: torch.Tensor,
        total: torch.Tensor,
        grad: torch.Tensor,
        place: Place,
        axis: str,
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with _hidden(q):
            return _backward(q, k, v, out, total, grad, _Trip(mesh_of(place), axis, causal, groups), scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass


def _hidden(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Hides from recompute policies, which would keep the products of all blocks: the scores of the whole sequence."""
    return nullcontext() if traced(x) else no_modes()


class _Trip:
    """One way around the ring: which queries and keys a rank combines at each step, and the sends to the next rank.

    Args:
        groups: as `_groups` returns them.
    """

    def __init__(self, mesh: Mesh, axis: str, causal: bool, groups: torch.Tensor | None) -> None:
        self._mesh, self._axis, self._causal = mesh, axis, causal
        self.size, self._rank = mesh.shape[axis], mesh.coords[axis]
        self._chunks = None if groups is None else groups.unflatten(-1, (2 * self.size, -1))
        self._ends = [end for rank in range(self.size) for end in (rank, (rank + 1) % self.size)]

    def block(self, step: int, length: int) -> tuple[slice, slice, bool]:
        """The rows of queries and columns of keys at ``step``, and whether the causal mask cuts through this block."""
        everything, half = slice(0, length), length // 2
        source = self._source(step)
        if not self._causal or source == self._rank:
            return everything, everything, self._causal
        # A lower rank's first chunk lies before both of this rank's chunks and its second behind them; a higher rank's two
        # lie between them.
        return (everything, slice(0, half), False) if source < self._rank else (slice(half, length), everything, False)

    def _source(self, step: int) -> int:
        """The rank whose keys and values are here at ``step``."""
        return (self._rank - step) % self.size

    def scores(self, queries: torch.Tensor, keys: torch.Tensor, step: int, length: int) -> torch.Tensor:
        """The scores of the block at ``step``, of its rows of queries and columns of keys; −∞ where a query sees no key."""
        rows, columns, masked = self.block(step, length)
        scores = queries @ keys.mT
        if masked:  # a rank's own positions are in order, though not contiguous
            scores = scores.masked_fill(scores.new_ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
        if self._chunks is not None:
            (asking, _), (_, asked) = (self._groups_of(rank).unbind(1) for rank in (self._rank, self._source(step)))
            apart = asking[:, rows, None] != asked[:, None, columns]
            scores = scores.masked_fill(apart[:, None, None], float("-inf"))
        return scores

    def _groups_of(self, rank: int) -> torch.Tensor:
        """(batch, 2, length) of the two chunks of a rank."""
        assert self._chunks is not None
        return self._chunks[:, :, [rank, 2 * self.size - 1 - rank]].flatten(2)

    def send_on(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to send ``x`` to the next rank; returns a function that waits for the previous rank's ``x``."""
        return ops.permute.start(x, self._mesh, self._axis, *self._ends)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, trip: _Trip, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the logarithm of each query's sum of exponentials over all keys."""
    queries, length = _grouped(q, k.shape[1]) * scale, q.shape[2]
    out = queries.new_zeros(*queries.shape[:-1], v.shape[-1])
    total = queries.new_full((*queries.shape[:-1], 1), float("-inf"))
    held = torch.cat([k, v], -1)
    for step in range(trip.size):
        coming = trip.send_on(held) if step + 1 < trip.size else None
        keys, values = _wide(held).split([k.shape[-1], v.shape[-1]], -1)
        rows, columns, _ = trip.block(step, length)
        scores = trip.scores(queries[..., rows, :], keys[..., columns, :], step, length)
        block = scores.logsumexp(-1, keepdim=True)
        before = total[..., rows, :]
        after = torch.logaddexp(before, block)
        least = _finite(after)
        weighted = (scores - least).exp() @ values[..., columns, :]
        out[..., rows, :] = out[..., rows, :] * (before - least).exp() + weighted
        total[..., rows, :] = after
        if coming is not None:
            held = coming()
    # Laid out as (batch, length, heads, size), as the next layer reads it, so that this is the only copy.
    return out.flatten(1, 2).transpose(1, 2).to(q.dtype).contiguous().transpose(1, 2), total


def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    grad: torch.Tensor,
    trip: _Trip,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    queries, grad, length = _grouped(q, k.shape[1]) * scale, _grouped(grad, k.shape[1]), q.shape[2]
    total = _finite(total)
    inner = (grad * _grouped(out, k.shape[1])).sum(-1, keepdim=True)
    into_queries = torch.zeros_like(queries)
    sizes = [k.shape[-1], v.shape[-1]]
    held = torch.cat([k, v], -1)
    # `home`: this rank's own gradients of its keys and values, from step 0. `gathered`: the gradients of the keys and values
    # held now, from the ranks that held them before; these start at step 1.
    gathered = home = torch.zeros_like(_wide(held)[:, :, 0])
    arrival = None
    for step in range(trip.size):
        coming = trip.send_on(held) if step + 1 < trip.size else None
        keys, values = _wide(held).split(sizes, -1)
        rows, columns, _ = trip.block(step, length)
        keys, values, given = keys[..., columns, :], values[..., columns, :], grad[..., rows, :]
        p = (trip.scores(queries[..., rows, :], keys, step, length) - total[..., rows, :]).exp()
        into_scores = p * (given @ values.mT - inner[..., rows, :])
        into_queries[..., rows, :] += into_scores @ keys
        added = torch.cat([into_scores.mT @ queries[..., rows, :], p.mT @ given], -1).sum(2)
        if arrival is not None:
            gathered = arrival()
        elif step:
            gathered = torch.zeros_like(home)
        gathered[:, :, columns] += added
        if step:
            arrival = trip.send_on(gathered)
        if coming is not None:
            held = coming()
    if arrival is not None:
        gathered = arrival()
    into_keys, into_values = (home if gathered is home else home + gathered).split(sizes, -1)
    return (into_queries * scale).flatten(1, 2).to(q.dtype), into_keys.to(k.dtype), into_values.to(v.dtype)


def _finite(total: torch.Tensor) -> torch.Tensor:
    """Logarithms of sums, 0 for queries that see no key so far, whose weights are 0 then."""
    return total.masked_fill(total == float("-inf"), 0)


def _grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    """(batch, heads, length, size) to (batch, groups, heads of one group, length, size), in fp32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(1, (groups, -1))


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Keys or values for `_grouped` queries: one head per group."""
    return _grouped(x, x.shape[1])
