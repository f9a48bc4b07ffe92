"""Counted exchanges of flat buffers along one axis. Everything the library sends goes through here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from shardlib.errors import RankMismatch, listing
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport import Work


def all_gather(mesh: Mesh, axis: str, out: torch.Tensor, inp: torch.Tensor, *, scalars: bool = False) -> Work:
    """``out = concat of every rank's inp``; payload per rank: (n−1)/n of ``out``. ``scalars`` are counted apart."""
    _count(mesh, axis, out, 1, scalars)
    return mesh.group(axis).all_gather(out, inp)


def reduce_scatter(mesh: Mesh, axis: str, out: torch.Tensor, inp: torch.Tensor) -> Work:
    """``out = this rank's chunk of the sum of inp``; payload per rank: (n−1)/n of ``inp``."""
    _count(mesh, axis, inp, 1)
    return mesh.group(axis).reduce_scatter(out, inp)


def all_reduce(mesh: Mesh, axis: str, tensor: torch.Tensor, *, scalars: bool = False) -> Work:
    """Sum in place; payload per rank: 2·(n−1)/n of the tensor. ``scalars`` are counted apart."""
    _count(mesh, axis, tensor, 2, scalars)
    return mesh.group(axis).all_reduce(tensor)


def all_to_all(mesh: Mesh, axis: str, out: torch.Tensor, inp: torch.Tensor) -> Work:
    """Equal chunks to every rank; payload per rank: (n−1)/n of ``inp``."""
    _count(mesh, axis, inp, 1)
    return mesh.group(axis).all_to_all(out, inp)


def broadcast(mesh: Mesh, axis: str, tensor: torch.Tensor, source: int) -> Work:
    """Rank ``source``'s tensor to all; payload: (n−1) of the tensor, counted on the source."""
    group = mesh.group(axis)
    if group.rank == source:
        mesh.traffic.add(axis, (group.size - 1) * tensor.numel() * tensor.dtype.itemsize)
    return group.broadcast(tensor, source)


def permute(mesh: Mesh, axis: str, out: torch.Tensor, inp: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> Work:
    """Point to point along ``(source, destination)`` pairs; payload: the tensor per message to another rank."""
    group = mesh.group(axis)
    messages = sum(1 for source, destination in pairs if source == group.rank != destination)
    if messages:
        mesh.traffic.add(axis, messages * inp.numel() * inp.dtype.itemsize)
    return group.permute(out, inp, pairs)


def send(mesh: Mesh, axis: str, tensor: torch.Tensor, peer: int, tag: int, *, scalars: bool = False) -> Work:
    """To one rank along ``axis``; payload: the tensor, counted on the sender. ``scalars`` are counted apart."""
    mesh.traffic.add(axis, tensor.numel() * tensor.dtype.itemsize, scalars)
    return mesh.group(axis).send(tensor, peer, tag)


def recv(mesh: Mesh, axis: str, out: torch.Tensor, peer: int, tag: int) -> Work:
    """From one rank along ``axis``, into ``out``; its sender counts it."""
    return mesh.group(axis).recv(out, peer, tag)


def sum_over(mesh: Mesh, axes: tuple[str, ...], values: torch.Tensor, *, scalars: bool = True) -> None:
    """Sum a small vector in place over several axes."""
    for axis in axes:
        if mesh.shape[axis] > 1:
            all_reduce(mesh, axis, values, scalars=scalars).wait()


def all_gather_object(mesh: Mesh, axes: Sequence[str], value: Any) -> list[Any]:
    """The values of every rank along ``axes``, in row-major order. For set-up, not for steps: not counted."""
    values = [value]
    for axis in reversed(axes):
        if mesh.shape[axis] > 1:
            gathered = mesh.group(axis).all_gather_object(values)
            values = [item for part in gathered for item in part]
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
    """Raise on every rank when ``items`` differ between ranks, naming each differing item and the ranks.

    Every rank along ``axes`` (by default all) must call it. Costs one small exchange per axis. ``absent``: an item may be
    missing on ranks.
    """
    problems = differences(mesh, items, axes, absent=absent)
    if problems:
        raise RankMismatch(mismatch(what, problems, remedy))


def differences(
    mesh: Mesh, items: dict[str, Any], axes: Sequence[str] | None = None, *, absent: bool = False
) -> list[str]:
    """One line per item that differs between ranks, with what each has; what `require_equal` raises for."""
    axes = list(mesh.shape) if axes is None else axes
    mine = {key: str(value) for key, value in items.items()}
    digest = hashlib.blake2b(repr(sorted(mine.items())).encode()).digest()
    if len(set(all_gather_object(mesh, axes, digest))) == 1:
        return []
    everyone = all_gather_object(mesh, axes, (mesh.rank, mine))
    problems = []
    for key in dict.fromkeys(key for _, theirs in everyone for key in theirs):
        ranks_of: dict[str, list[int]] = {}
        for rank, theirs in everyone:
            if key in theirs or not absent:
                ranks_of.setdefault(theirs.get(key, "(absent)"), []).append(rank)
        if len(ranks_of) > 1:
            told = "; ".join(f"rank {', '.join(map(str, ranks))}: {value}" for value, ranks in ranks_of.items())
            problems.append(f"{key}: {told}")
    return problems


def mismatch(what: str, problems: list[str], remedy: str) -> str:
    """The message of a `RankMismatch`, from what `differences` found."""
    return f"the ranks' {what} differ:\n{listing(problems, 10)}\n{remedy}"


def _count(mesh: Mesh, axis: str, whole: torch.Tensor, times: int, scalars: bool = False) -> None:
    size = mesh.group(axis).size
    if size > 1:
        mesh.traffic.add(axis, times * whole.numel() * whole.dtype.itemsize * (size - 1) // size, scalars)
