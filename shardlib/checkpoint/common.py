"""The tensors of a state that are not sharded: the optimizer's counters and factors, and the model's buffers.

All ranks that hold such a tensor hold the same values: all ranks, or those of a pipeline's stage.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch

from shardlib.checkpoint.decoding import decoded
from shardlib.checkpoint.fragments import Fragment, flat_bucket, named_leaves, whole
from shardlib.checkpoint.packed import Parts
from shardlib.checkpoint.writing import bytes_of
from shardlib.collectives import primitives
from shardlib.errors import CheckpointError, listing
from shardlib.tree import path_name


def common_leaves(parts: Parts) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of the tensors that are not sharded on this rank."""
    for prefix, tree in (("opt", parts.opt), ("also", parts.also), ("buffers", parts.buffers)):
        for path, leaf in named_leaves(tree):
            in_bucket = prefix != "buffers" and flat_bucket(parts.params.plan, path, leaf)
            if isinstance(leaf, torch.Tensor) and not in_bucket:
                yield f"{prefix}/{path_name(path)}", leaf


def owned_leaves(parts: Parts) -> list[Fragment]:
    """The tensors that this rank saves: on each name the first stage that holds it. Every rank must call it.

    Raises:
        CheckpointError: stages hold different values under one name; lists the names, on all ranks.
    """
    mesh, stages = parts.params.mesh, parts.params.plan.stages.axes
    mine = {name: whole(leaf, name) for name, leaf in common_leaves(parts)}
    if stages:
        place = {axis: mesh.coords[axis] for axis in stages}
        sums = {each.name: zlib.crc32(bytes_of(each.data.cpu())) for each in decoded(parts, mine.values())}
        held = primitives.all_gather_object(mesh, list(stages), (place, sums))
        first: dict[str, tuple[dict[str, int], int]] = {}
        differing = set()
        for other, found in held:
            for name, checksum in found.items():
                differing |= {name} if first.setdefault(name, (other, checksum))[1] != checksum else set()
        if differing:
            raise CheckpointError(
                f"stages of the pipeline hold different values under one name:\n{listing(sorted(differing))}\nA checkpoint "
                "has one tensor of a name. Give an optimizer's state one entry for each parameter (shards.about), or equal "
                "values on all ranks (shards.sum)"
            )
        mine = {name: fragment for name, fragment in mine.items() if first[name][0] == place}
    return [] if any(at for axis, at in mesh.coords.items() if axis not in stages) else list(mine.values())
