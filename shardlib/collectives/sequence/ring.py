"""Attention whose keys and values travel around a ring of ranks (Liu, Zaharia, Abbeel, arXiv 2310.01889).

Each rank keeps its queries. In P steps it meets the keys and values of every rank, and combines what it finds by the
online softmax: with scores s of one block, L' = log(e^L + Σe^s) and O' = O·e^(L−L') + Σe^(s−L')·v, in fp32 or wider.
Backward meets them once more, computes p = e^(s−L) anew, and sends the gradients of keys and values along with them:

    dV = pᵀ dO        dS = p ∘ (dO Vᵀ − rowsum(dO ∘ O))        dQ = dS K        dK = dSᵀ Q

A rank holds chunks r and 2P−1−r of 2P (zig-zag). Under a causal mask it meets every other rank with half a block
then, so that no rank waits for one that has more to do.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from shardlib._compat import no_modes
from shardlib.collectives import primitives
from shardlib.collectives.sequence.base import Attend, Attention, SequenceKind
from shardlib.errors import LossError, SpecError
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport import Work


class Ring(SequenceKind):
    """Keys and values travel around the ring of ranks, each of which holds two chunks of the sequence (zig-zag).

    Memory: one other rank's keys and values (with the next ones coming), and the scores of one block. Payload per rank:
    (P−1) times its keys and values forward; the same and as many gradients (in fp32 or wider) backward.
    """

    name: ClassVar[str] = "ring"

    def chunks(self, rank: int, size: int, length: int) -> list[tuple[int, int]]:
        """Two chunks, one from either end.

        Under a causal mask the first positions have few keys and the last have many, so that every rank then has the same
        work.
        """
        pieces = 2 * size
        step = self.step(length, size, pieces, f": two chunks a rank, {pieces} in all")
        return [(chunk * step, step) for chunk in (rank, pieces - 1 - rank)]

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Attention, attend: Attend, mesh: Mesh
    ) -> torch.Tensor:
        """See `SequenceKind.attention`.

        Raises:
            SpecError: keys of another length than the queries, or an odd one; a key mask or a layout.
            LossError: a second derivative.
        """
        if k.shape[2] != q.shape[2] or q.shape[2] % 2:
            raise SpecError(
                f"ring attention over axis {self.axis!r} takes as many keys as queries, in two chunks a rank, and gets "
                f"{k.shape[2]} keys and {q.shape[2]} queries on each; pad both to one even number, or use kind='ulysses'"
            )
        if how.key_mask is not None or how.layout is not None:
            raise SpecError(
                f"ring attention over axis {self.axis!r} takes no key_mask and no layout: no rank ever holds the scores of "
                "a whole row; use kind='ulysses' or 'megatron'"
            )
        scale = q.shape[-1] ** -0.5 if how.scale is None else how.scale
        return _Ring.apply(q, k, v, mesh, self.axis, how.causal, scale)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mesh: Mesh, axis: str, causal: bool, scale: float
    ) -> torch.Tensor:
        # A recompute policy must not keep the products of blocks: together they are the scores of the whole sequence.
        with no_modes():
            out, total = _forward(q, k, v, _Trip(mesh, axis, causal), scale)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.static = mesh, axis, causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise LossError(
                "ring attention has no second derivative; for gradients of gradients use sequence(kind='ulysses')"
            )
        mesh, axis, causal, scale = ctx.static
        q, k, v, out, total = ctx.saved_tensors
        return *_backward(q, k, v, out, total, grad, _Trip(mesh, axis, causal), scale), None, None, None, None


class _Trip:
    """One way around the ring: whom a rank meets at each step, and what of both it looks at."""

    def __init__(self, mesh: Mesh, axis: str, causal: bool) -> None:
        self._mesh, self._axis, self._causal = mesh, axis, causal
        self.size, self._rank = mesh.shape[axis], mesh.coords[axis]
        self._pairs = tuple((rank, (rank + 1) % self.size) for rank in range(self.size))

    def block(self, step: int, length: int) -> tuple[slice, slice, bool]:
        """Rows of queries, columns of keys, and whether the mask cuts through them."""
        everything, half = slice(0, length), length // 2
        source = (self._rank - step) % self.size
        if not self._causal or source == self._rank:
            return everything, everything, self._causal
        # A lower rank's first chunk lies before both of ours and its second behind; a higher rank's lie between them.
        return (everything, slice(0, half), False) if source < self._rank else (slice(half, length), everything, False)

    def send_on(self, x: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """Start to send ``x`` to the next rank; what comes from the one before, once waited for."""
        x = x.contiguous()
        coming = torch.empty_like(x)
        with self._mesh.traffic.by_the_loss():
            return coming, primitives.permute(self._mesh, self._axis, coming, x, self._pairs)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, trip: _Trip, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the logarithm of each query's sum of exponentials over all keys."""
    queries, length = _grouped(q, k.shape[1]) * scale, q.shape[2]
    out = queries.new_zeros(*queries.shape[:-1], v.shape[-1])
    total = queries.new_full((*queries.shape[:-1], 1), float("-inf"))
    held = torch.cat([k, v], -1)
    for step in range(trip.size):
        coming, work = trip.send_on(held) if step + 1 < trip.size else (held, Work())
        keys, values = _wide(held).split([k.shape[-1], v.shape[-1]], -1)
        rows, columns, masked = trip.block(step, length)
        scores = _scores(queries[..., rows, :], keys[..., columns, :], masked)
        block = scores.logsumexp(-1, keepdim=True)
        before = total[..., rows, :]
        after = torch.logaddexp(before, block)
        found = (scores - after).exp() @ values[..., columns, :]
        out[..., rows, :] = out[..., rows, :] * (before - after).exp() + found
        total[..., rows, :] = after
        work.wait()
        held = coming
    # Laid out as (batch, length, heads, size), which is what the layer after it reads: one copy then serves both.
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
    inner = (grad * _grouped(out, k.shape[1])).sum(-1, keepdim=True)
    into_queries = torch.zeros_like(queries)
    sizes = [k.shape[-1], v.shape[-1]]
    held = torch.cat([k, v], -1)
    # Gradients of what this rank holds, from the ranks that held it before. Its own it keeps: they start at step 1.
    gathered = home = torch.zeros_like(_wide(held)[:, :, 0])
    arrival = Work()
    for step in range(trip.size):
        coming, work = trip.send_on(held) if step + 1 < trip.size else (held, Work())
        keys, values = _wide(held).split(sizes, -1)
        rows, columns, masked = trip.block(step, length)
        keys, values, given = keys[..., columns, :], values[..., columns, :], grad[..., rows, :]
        p = (_scores(queries[..., rows, :], keys, masked) - total[..., rows, :]).exp()
        into_scores = p * (given @ values.mT - inner[..., rows, :])
        into_queries[..., rows, :] += into_scores @ keys
        found = torch.cat([into_scores.mT @ queries[..., rows, :], p.mT @ given], -1).sum(2)
        arrival.wait()
        if step == 1:
            gathered = torch.zeros_like(home)
        gathered[:, :, columns] += found
        if step:
            gathered, arrival = trip.send_on(gathered)
        work.wait()
        held = coming
    arrival.wait()
    into_keys, into_values = (home if gathered is home else home + gathered).split(sizes, -1)
    return (into_queries * scale).flatten(1, 2).to(q.dtype), into_keys.to(k.dtype), into_values.to(v.dtype)


def _scores(queries: torch.Tensor, keys: torch.Tensor, masked: bool) -> torch.Tensor:
    scores = queries @ keys.mT
    if masked:  # a rank's own positions are in order, though not contiguous
        scores = scores.masked_fill(scores.new_ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    return scores


def _grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    """(batch, heads, length, size) to (batch, groups, heads of one group, length, size), in fp32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(1, (groups, -1))


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Keys or values for `_grouped` queries: one head for a whole group."""
    return _grouped(x, x.shape[1])
