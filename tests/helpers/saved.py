"""Checkpoints on disk, as tests look at them."""

import math
import os

import torch

from shardlib.checkpoint.fragments import Fragment
from shardlib.checkpoint.reading import open_checkpoint
from shardlib.mesh.specs import Window


def tensors(folder):
    """Every tensor of a checkpoint, whole, by name."""
    with open_checkpoint(folder) as saved:
        assert saved.damages() == []
        found = {}
        for name, entry in saved.tensors.items():
            flat = torch.zeros(math.prod(entry.shape), dtype=entry.torch_dtype)
            saved.fill(Fragment(name, 0, flat, Window.whole(entry.shape)), name)
            found[name] = flat.view(entry.shape)
        return found


class CountedReads:
    """Bytes that this process reads by positional reads from data files, counted below the library."""

    def __init__(self, monkeypatch):
        self.bytes = 0
        read = os.preadv

        def preadv(fd, buffers, offset):
            count = read(fd, buffers, offset)
            if os.readlink(f"/proc/self/fd/{fd}").endswith(".distcp"):
                self.bytes += count
            return count

        monkeypatch.setattr(os, "preadv", preadv)
