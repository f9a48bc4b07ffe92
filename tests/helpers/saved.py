"""Checkpoints on disk, as tests look at them."""

import math
import os

import pytest
import torch

import shardlib as sl
from shardlib.checkpoint.fragments import Fragment
from shardlib.checkpoint.reading import open_checkpoint
from shardlib.errors import CheckpointError
from shardlib.mesh.specs import Window
from shardlib.tree import tensors_of


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


def refused(start, folder, ranks):
    """The message of the error that every rank gets from restoring into ``start(mesh)``, which must stay what it was."""

    def run(mesh):
        state = start(mesh)
        before = [leaf.clone() for leaf in tensors_of(state)]
        with pytest.raises(CheckpointError) as caught:
            sl.checkpoint.restore(folder, state)
        after = tensors_of(state)
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        return str(caught.value)

    messages = sl.simulate(run, mesh={"data": ranks})
    assert len(set(messages)) == 1
    return messages[0]


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
