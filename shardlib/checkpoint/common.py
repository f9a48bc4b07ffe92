"""The tensors of a state that are not sharded: the optimizer's counters and factors, and the model's buffers.

All ranks that hold such a tensor of the optimizer's state hold the same values: all ranks, or those of a pipeline's stage.
Buffers may be rank-local: see `shardlib.checkpoint.rank_local_buffers`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from shardlib.checkpoint.decoding import decoded
from shardlib.checkpoint.fragments import BUFFERS, Fragment, flat_tensors, whole
from shardlib.checkpoint.packed import CheckpointTrees
from shardlib.checkpoint.rank_local_buffers import local_name
from shardlib.collectives import primitives
from shardlib.errors import CheckpointError, TreeError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.sharded.checksum import checksum
from shardlib.tree import named_leaves, path_name

Digest = tuple[tuple[int, ...], str]  # of a rank's `CommonTensors`: its place, and a hash

_ABSENT = "absent"
_GROUPS = 4  # of ranks, that a message tells apart


class CommonTensors(NamedTuple):
    """The common tensors of a rank.

    Attributes:
        place: the rank's coordinates along the axes of a pipeline's stages.
        sums: name -> checksum.
    """

    place: tuple[int, ...]
    sums: dict[str, str]

    def digest(self) -> Digest:
        return self.place, hashlib.blake2b(repr(sorted(self.sums.items())).encode()).hexdigest()


def common_leaves(parts: CheckpointTrees) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of the tensors that are not sharded on this rank, and of what stands for numbers."""
    for prefix, tree in (("opt", parts.opt), ("also", parts.also), ("buffers", parts.buffers)):
        for path, leaf in named_leaves(tree):
            sharded = prefix != "buffers" and flat_tensors(parts.params.plan, path, leaf)
            if isinstance(leaf, torch.Tensor) and not sharded:
                yield f"{prefix}/{path_name(path)}", leaf
    yield from parts.numbers.items()


def held_by(parts: CheckpointTrees) -> CommonTensors:
    """The common tensors of this rank; on a mesh of one without checksums, which nobody looks at.

    Raises:
        TreeError: several tensors have one name.
    """
    mesh, stages = parts.params.mesh, parts.params.plan.stages.axes
    fragments = [whole(leaf, name) for name, leaf in common_leaves(parts)]
    counts = Counter(each.name for each in fragments)
    if repeated := sorted(name for name, count in counts.items() if count > 1):
        raise TreeError(
            f"several tensors of the state have one name:\n{listing(repeated)}\nRename keys that have a / in them"
        )
    sums = {
        each.name: f"{list(each.window.shape)} {checksum(each.data)}" if mesh.size > 1 else ""
        for each in decoded(parts, fragments)
    }
    return CommonTensors(tuple(mesh.coords[axis] for axis in stages), sums)


def owned_leaves(parts: CheckpointTrees, held: CommonTensors, digests: Sequence[Digest]) -> list[Fragment]:
    """The tensors that this rank saves: on each name the first stage that holds it, and rank-local buffers. Collective.

    Args:
        held: of `held_by`.
        digests: of all ranks.

    Raises:
        CheckpointError: ranks hold different values under one name; lists names and ranks, on all ranks.
    """
    mesh, stages = parts.params.mesh, parts.params.plan.stages.axes
    found = _exchanged(mesh, stages, held, digests)
    differing = _differing(found)
    local = {name for name in differing if name.startswith(BUFFERS)}
    if refused := {name: ranks for name, ranks in differing.items() if name not in local}:
        raise CheckpointError(_message(refused))
    first: dict[str, tuple[int, ...]] = {}
    for _, (place, sums) in found:
        for name in sums:
            first.setdefault(name, place)
    saves = not any(at for axis, at in mesh.coords.items() if axis not in stages)
    fragments = [whole(leaf, name) for name, leaf in common_leaves(parts)]
    return [
        each._replace(name=local_name(each.name, mesh)) if each.name in local else each
        for each in fragments
        if each.name in local or (saves and first[each.name] == held.place)
    ]


def _exchanged(
    mesh: Mesh, stages: Sequence[str], held: CommonTensors, digests: Sequence[Digest]
) -> list[tuple[int, CommonTensors]]:
    """Ranks, and what they hold: one rank of each stage, or all where some differ."""
    if len(set(digests)) == len({place for place, _ in digests}):  # no rank differs from others of its stage
        found = primitives.all_gather_object(mesh, list(stages), (mesh.rank, held))
        if not _differing(found):
            return found
    return primitives.all_gather_object(mesh, list(mesh.shape), (mesh.rank, held))


def _differing(found: Sequence[tuple[int, CommonTensors]]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Name -> the groups of ranks that hold the same; of tensors that differ, or that some ranks of a stage lack."""
    of_place: dict[tuple[int, ...], set[str]] = {}
    for _, (place, sums) in found:
        of_place.setdefault(place, set()).update(sums)
    groups: dict[str, dict[str, list[int]]] = {}
    for rank, (place, sums) in found:
        for name in of_place[place]:
            groups.setdefault(name, {}).setdefault(sums.get(name, _ABSENT), []).append(rank)
    return {name: tuple(map(tuple, of.values())) for name, of in groups.items() if len(of) > 1}


def _message(differing: dict[str, tuple[tuple[int, ...], ...]]) -> str:
    names_of: dict[str, list[str]] = {}
    for name, groups in differing.items():
        texts = [f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" for ranks in groups]
        texts[_GROUPS:] = ["others"] if len(texts) > _GROUPS else []
        names_of.setdefault(" and ".join(texts), []).append(name)
    blocks = "\n".join(
        f"{ranks} hold different values under one name:\n{listing(sorted(names))}" for ranks, names in names_of.items()
    )
    return (
        f"{blocks}\nA checkpoint has one tensor of a name. Under a bucket's name an optimizer's state keeps tensors of the "
        "shard's shape, stacks of them along dimensions before it, or lists of either. Give the rest one entry for each "
        "parameter (shards.about), or equal values on all ranks (shards.sum; further trees gathered from all ranks)"
    )
