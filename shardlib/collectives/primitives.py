"""Exchanges of flat buffers along one axis, counted in `Mesh.traffic`. The library sends everything through them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from shardlib.errors import RankMismatch, listing
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport import Splits, Work


def all_gather(mesh: Mesh, axis: str, out: torch.Tensor, inp: torch.Tensor, *, scalars: bool = False) -> Work:
    """``out = concat of every rank's inp``; payload per rank: (n−1)/n of ``out``. ``scalars``: see `Traffic`."""
    _count(mesh, axis, out, 1, scalars)
    return mesh.group(axis).all_gather(out, inp)


def reduce_scatter(mesh: Mesh, axis: str, out: torch.Tensor, inp: torch.Tensor) -> Work:
    """``out = this rank's chunk of the sum of inp``; payload per rank: (n−1)/n of ``inp``."""
    _count(mesh, axis, inp, 1)
    return mesh.group(axis).reduce_scatter(out, inp)


def all_reduce(mesh: Mesh, axis: str, tensor: torch.Tensor, *, scalars: bool = False) -> Work:
    """Sum in place; payload per rank: 2·(n−1)/n of the tensor. ``scalars``: see `Traffic`."""
    _count(mesh, axis, tensor, 2, scalars)
    return mesh.group(axis).all_reduce(tensor)


def all_to_all(mesh: Mesh, axis: str, out: torch.Tensor, inp: torch.Tensor, splits: Splits | None = None) -> Work:
    """Send chunk ``j`` of ``inp`` to rank ``j``; payload per rank: (n−1)/n of ``inp``, and with ``splits`` all of it but the
    rank's own chunk."""
    group = mesh.group(axis)
    if splits is None:  # a user's own transport may know equal chunks alone
        _count(mesh, axis, inp, 1)
        return group.all_to_all(out, inp)
    if group.size > 1:
        mesh.traffic.add(axis, (inp.numel() - splits.sent[group.rank]) * inp.dtype.itemsize)
    return group.all_to_all(out, inp, splits)


def broadcast(mesh: Mesh, axis: str, tensor: torch.Tensor, source: int) -> Work:
    """Overwrite ``tensor`` with rank ``source``'s; payload: n−1 times the tensor, counted on the source."""
    group = mesh.group(axis)
    if group.rank == source:
        mesh.traffic.add(axis, (group.size - 1) * tensor.numel() * tensor.dtype.itemsize)
    return group.broadcast(tensor, source)


def permute(mesh: Mesh, axis: str, out: torch.Tensor, inp: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> Work:
    """Send ``inp`` along ``(source, destination)`` pairs; payload: the tensor for each message to another rank."""
    group = mesh.group(axis)
    messages = sum(1 for source, destination in pairs if source == group.rank != destination)
    if messages:
        mesh.traffic.add(axis, messages * inp.numel() * inp.dtype.itemsize)
    return group.permute(out, inp, pairs)


def send(mesh: Mesh, axis: str, tensor: torch.Tensor, peer: int, tag: int, *, scalars: bool = False) -> Work:
    """Send ``tensor`` to rank ``peer`` of ``axis``; payload: the tensor, counted on the sender. ``scalars``: see
    `Traffic`."""
    mesh.traffic.add(axis, tensor.numel() * tensor.dtype.itemsize, scalars)
    return mesh.group(axis).send(tensor, peer, tag)


def recv(mesh: Mesh, axis: str, out: torch.Tensor, peer: int, tag: int) -> Work:
    """Receive from rank ``peer`` of ``axis`` into ``out``. The sender counts the payload."""
    return mesh.group(axis).recv(out, peer, tag)


def sum_over(mesh: Mesh, axes: tuple[str, ...], values: torch.Tensor, *, scalars: bool = True) -> None:
    """Sum a small vector in place over several axes."""
    for axis in axes:
        if mesh.shape[axis] > 1:
            all_reduce(mesh, axis, values, scalars=scalars).wait()


def all_gather_object(mesh: Mesh, axes: Sequence[str], value: Any) -> list[Any]:
    """The values of every rank along ``axes``, in row-major order. Not counted, since only set-up uses it."""
    values = [value]
    for axis in reversed(axes):
        if mesh.shape[axis] > 1:
            gathered = mesh.group(axis).all_gather_object(values)
            values = [item for items in gathered for item in items]
    return values


def require_equal(
    mesh: Mesh,
    what: str,
    items: dict[str, Any],
    remedy: str,
    axes: Sequence[str] | None = None,
    *,
    absent: bool = False,
) -> None:
    """Raise `RankMismatch` on every rank when ``items`` differ between ranks, naming each differing item and the ranks.

    Every rank along ``axes`` (by default all axes) must call it. Costs one small exchange per axis.

    Args:
        what: what the items are, for the message.
        items: name -> value; compared as strings.
        remedy: the end of the message.
        absent: whether an item may be missing on some ranks.
    """
    problems = differences(mesh, items, axes, absent=absent)
    if problems:
        raise RankMismatch(mismatch(what, problems, remedy))


def differences(
    mesh: Mesh, items: dict[str, Any], axes: Sequence[str] | None = None, *, absent: bool = False
) -> list[str]:
    """One line per item that differs between ranks, with each rank's value. Arguments as in `require_equal`."""
    axes = list(mesh.shape) if axes is None else axes
    texts = {key: str(value) for key, value in items.items()}
    digest = hashlib.blake2b(repr(sorted(texts.items())).encode()).digest()
    if len(set(all_gather_object(mesh, axes, digest))) == 1:
        return []
    gathered = all_gather_object(mesh, axes, (mesh.rank, texts))
    problems = []
    for key in dict.fromkeys(key for _, rank_texts in gathered for key in rank_texts):
        ranks_of: dict[str, list[int]] = {}
        for rank, rank_texts in gathered:
            if key in rank_texts or not absent:
                ranks_of.setdefault(rank_texts.get(key, "(absent)"), []).append(rank)
        if len(ranks_of) > 1:
            values = "; ".join(f"rank {', '.join(map(str, ranks))}: {value}" for value, ranks in ranks_of.items())
            problems.append(f"{key}: {values}")
    return problems


def mismatch(what: str, problems: list[str], remedy: str) -> str:
    """The message of a `RankMismatch` from the lines of `differences`; ``what`` and ``remedy`` as in `require_equal`."""
    return f"the ranks' {what} differ:\n{listing(problems, 10)}\n{remedy}"


def _count(mesh: Mesh, axis: str, whole: torch.Tensor, times: int, scalars: bool = False) -> None:
    size = mesh.group(axis).size
    if size > 1:
        mesh.traffic.add(axis, times * whole.numel() * whole.dtype.itemsize * (size - 1) // size, scalars)
