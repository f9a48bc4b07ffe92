"""A transport without other ranks: exact with size one; with a larger size, as if every peer held the same tensors.

Planning uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from shardlib.common._compat import storage_id
from shardlib.errors import MeshError
from shardlib.mesh.transport.base import Splits, Work


class EchoGroup:
    """A group of ``size`` ranks of which only this one exists. Every peer is taken to hold the same tensors."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self.size = size
        self.rank = rank

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        if self.size > 1:
            tensor.mul_(self.size)
        return Work()

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> Work:
        if storage_id(inp.untyped_storage()) == storage_id(out.untyped_storage()):
            inp = inp.clone()  # a gather in place: the input is this rank's chunk of the output
        out.view(self.size, -1).copy_(inp.reshape(1, -1))
        return Work()

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor) -> Work:
        in_place = storage_id(inp.untyped_storage()) == storage_id(out.untyped_storage())
        # gloo, which serves all devices but GPUs, needs room for the other ranks' chunks.
        room = inp.new_empty(inp.numel() - out.numel() if in_place and inp.device.type != "cuda" else 0)
        out.view(-1).copy_(inp.reshape(self.size, -1)[self.rank]).mul_(self.size)
        return Work(partial(_let_go, room))

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, splits: Splits | None = None) -> Work:
        chunks = inp.reshape(-1).split(list(splits.sent)) if splits else inp.reshape(-1).chunk(self.size)
        mine = chunks[self.rank].numel()
        if splits and any(size != mine for size in splits.received):  # peers with other tensors, of which none is known
            out.zero_()
        else:
            out.view(-1).copy_(chunks[self.rank].repeat(self.size))
        return Work()

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return Work()

    def permute(self, out: torch.Tensor, inp: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> Work:
        if any(destination == self.rank for _, destination in pairs):
            out.copy_(inp)
        else:
            out.zero_()
        return Work()

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        return Work()

    def recv(self, out: torch.Tensor, peer: int, tag: int) -> Work:
        raise MeshError("an echo has no peers to receive from: pipeline stages need ranks, real or simulated")

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.size


def _let_go(room: torch.Tensor) -> None:
    """Wait for an exchange that needed room."""
