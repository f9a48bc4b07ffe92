"""Tensors that are not sharded over all ranks: those that ranks hold alike, and rank-local ones, of which each has its own.

Replicated are the optimizer's counters and factors and the model's buffers; all ranks hold the same values, or those of a
pipeline's stage. Rank-local may be trees of the optimizer's state (see `shardlib.optim.base.StateMethods`) and buffers,
such as integer ones, which are not averaged. On a mesh like that which saved them every rank gets back what it had. On
another, all ranks get the mean of the optimizer's, to which it brings them anyway when it next exchanges them; buffers are
refused.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardlib.checkpoint.agreement import gathered, ranks_named
from shardlib.checkpoint.fragments import (
    BUFFERS,
    MASTERS,
    PARAMS,
    Fragment,
    bucket_fragments,
    decoded,
    flat_tensors,
    whole,
)
from shardlib.checkpoint.manifest import Manifest
from shardlib.checkpoint.trees import CheckpointTrees
from shardlib.collectives import primitives
from shardlib.errors import CheckpointError, TreeError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.sharded.checksum import checksum
from shardlib.tree import named_leaves, path_name

RANK_LOCAL, LOCAL_BUFFERS = "rank_local/", "rank_local_buffers/"
Digest = tuple[tuple[int, ...], str]  # of a rank's `Replicated`: its stage, and a hash

_ABSENT = "absent"
_GROUPS = 4  # of ranks, that a message tells apart


class Replicated(NamedTuple):
    """The replicated tensors of a rank.

    Attributes:
        stage: the rank's coordinates along the axes of a pipeline's stages.
        sums: name -> checksum.
    """

    stage: tuple[int, ...]
    sums: dict[str, str]

    def digest(self) -> Digest:
        return self.stage, hashlib.blake2b(repr(sorted(self.sums.items())).encode()).hexdigest()


def replicated_leaves(trees: CheckpointTrees) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of the tensors that are not sharded on this rank, and of what stands for numbers."""
    for prefix, tree in (("opt", trees.opt), ("also", trees.also), ("buffers", trees.buffers)):
        for path, leaf in named_leaves(tree):
            sharded = prefix != "buffers" and flat_tensors(trees.params.plan, path, leaf)
            if isinstance(leaf, torch.Tensor) and not sharded:
                yield f"{prefix}/{path_name(path)}", leaf
    yield from trees.numbers.items()


def replicated_on(trees: CheckpointTrees) -> Replicated:
    """The replicated tensors of this rank; on a mesh of one without checksums, which nobody looks at. Raises `TreeError` if
    several have one name."""
    mesh, stages = trees.params.mesh, trees.params.plan.stages.axes
    fragments = [whole(leaf, name) for name, leaf in replicated_leaves(trees)]
    counts = Counter(each.name for each in fragments)
    if repeated := sorted(name for name, count in counts.items() if count > 1):
        raise TreeError(
            f"several tensors of the state have one name:\n{listing(repeated)}\nRename keys that have a / in them"
        )
    sums = {
        each.name: f"{list(each.window.shape)} {checksum(each.data)}" if mesh.size > 1 else ""
        for each in decoded(trees, fragments)
    }
    return Replicated(tuple(mesh.coords[axis] for axis in stages), sums)


def owned_leaves(trees: CheckpointTrees, held: Replicated, digests: Sequence[Digest]) -> list[Fragment]:
    """The tensors that this rank saves: of each name the first stage that holds it, and rank-local buffers. Collective.

    Args:
        held: of `replicated_on`, and ``digests`` of all ranks'.

    Raises:
        CheckpointError: ranks hold different values under one name; lists names and ranks, on all ranks.
    """
    mesh, stages = trees.params.mesh, trees.params.plan.stages.axes
    found = _exchanged(mesh, stages, held, digests)
    differing = _differing(found)
    local = {name for name in differing if name.startswith(BUFFERS)}
    if refused := {name: ranks for name, ranks in differing.items() if name not in local}:
        raise CheckpointError(_message(refused))
    first: dict[str, tuple[int, ...]] = {}
    for _, (stage, sums) in found:
        for name in sums:
            first.setdefault(name, stage)
    saves = not any(at for axis, at in mesh.coords.items() if axis not in stages)
    fragments = [whole(leaf, name) for name, leaf in replicated_leaves(trees)]
    return [
        each._replace(name=local_buffer(each.name, mesh)) if each.name in local else each
        for each in fragments
        if each.name in local or (saves and first[each.name] == held.stage)
    ]


def _exchanged(
    mesh: Mesh, stages: Sequence[str], held: Replicated, digests: Sequence[Digest]
) -> list[tuple[int, Replicated]]:
    """Ranks, and what they hold: one rank of each stage, or all where some differ."""
    if len(set(digests)) == len({stage for stage, _ in digests}):  # no rank differs from others of its stage
        found = primitives.all_gather_object(mesh, list(stages), (mesh.rank, held))
        if not _differing(found):
            return found
    return gathered(mesh, (mesh.rank, held))


def _differing(found: Sequence[tuple[int, Replicated]]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Name -> the groups of ranks that hold the same; of tensors that differ, or that some ranks of a stage lack."""
    of_stage: dict[tuple[int, ...], set[str]] = {}
    for _, (stage, sums) in found:
        of_stage.setdefault(stage, set()).update(sums)
    groups: dict[str, dict[str, list[int]]] = {}
    for rank, (stage, sums) in found:
        for name in of_stage[stage]:
            groups.setdefault(name, {}).setdefault(sums.get(name, _ABSENT), []).append(rank)
    return {name: tuple(map(tuple, of.values())) for name, of in groups.items() if len(of) > 1}


def _message(differing: dict[str, tuple[tuple[int, ...], ...]]) -> str:
    names_of: dict[str, list[str]] = {}
    for name, groups in differing.items():
        texts = [*map(ranks_named, groups[:_GROUPS]), *(["others"] if len(groups) > _GROUPS else [])]
        names_of.setdefault(" and ".join(texts), []).append(name)
    blocks = "\n".join(
        f"{ranks} hold different values under one name:\n{listing(sorted(names))}" for ranks, names in names_of.items()
    )
    return (
        f"{blocks}\nGive tensors one entry for each parameter (shards.about), or equal values on all ranks (shards.sum); "
        "only those of the shard's shape, or stacks of them, may differ under a bucket's name"
    )


def local_buffer(name: str, mesh: Mesh) -> str:
    """The name under which this rank saves its own ``name``, a buffer."""
    return f"{LOCAL_BUFFERS}{mesh.rank} of {mesh.size}/{name}"


def on_its_mesh(held: Manifest, mesh: Mesh) -> bool:
    """Whether a mesh has the shape of the one that a checkpoint was saved on."""
    return _shape(held.mesh) == _shape(mesh.shape)


def local_buffers_lost(held: Manifest, mesh: Mesh) -> dict[str, str]:
    """Name -> why no rank of a mesh gets it, for the rank-local buffers of a checkpoint of another mesh."""
    if on_its_mesh(held, mesh):
        return {}
    names = {name.split("/", 2)[2] for name in held.tensors if name.startswith(LOCAL_BUFFERS)}
    before, now = (", ".join(f"{axis}={size}" for axis, size in sizes.items()) for sizes in (held.mesh, mesh.shape))
    return {name: f"{name}: each rank of {before} saved its own, and this mesh is {now}" for name in sorted(names)}


def _shape(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    return [(axis, size) for axis, size in sizes.items() if size > 1]


def diverged_axis(trees: CheckpointTrees) -> str | None:
    """The axis whose ranks do not have equal parameters now, or None."""
    owner = trees.params.plan.reductions.owner
    return owner.axis if owner is not None and _rank_local_trees(trees.opt) else None


def rank_local_fragments(trees: CheckpointTrees) -> Iterator[Fragment]:
    """Fragments of the parameters and of the trees of the optimizer's state that are rank-local now."""
    plan, mesh, axis = trees.params.plan, trees.params.mesh, diverged_axis(trees)
    if axis is None:
        return
    prefixes = (PARAMS, MASTERS, *(f"opt/{path_name(path)}/" for path in _rank_local_trees(trees.opt)))
    for bucket in plan.buckets:
        copies = [mesh.coords[other] for other in plan.copies(bucket) if other != axis]
        if plan.counts(bucket, mesh.coords) and not any(copies):
            for fragment in bucket_fragments(trees, bucket):
                if fragment.name.startswith(prefixes):
                    yield fragment._replace(name=_of_rank(fragment.name, mesh.coords[axis], mesh.shape[axis]))


def rank_local_size(saved: Iterable[str]) -> int:
    """The number of ranks that have each saved tensors of their own; 0 if none has."""
    first = next((name for name in saved if name.startswith(RANK_LOCAL)), None)
    return int(first.removeprefix(RANK_LOCAL).partition("/")[0].rpartition(" of ")[2]) if first else 0


def rank_local_sources(
    trees: CheckpointTrees, name: str, saved: Container[str], size: int
) -> tuple[tuple[str, float], ...]:
    """The saved tensors, with weights, whose sum fills fragments called ``name``; none if ranks held it in common. ``size``
    is of `rank_local_size`."""
    if not size or _of_rank(name, 0, size) not in saved:
        return ()
    mesh, owner = trees.params.mesh, trees.params.plan.reductions.owner
    if owner is not None and mesh.shape[owner.axis] == size:
        return ((_of_rank(name, mesh.coords[owner.axis], size), 1.0),)
    return tuple((_of_rank(name, rank, size), 1 / size) for rank in range(size))


def _of_rank(name: str, rank: int, size: int) -> str:
    return f"{RANK_LOCAL}{rank} of {size}/{name}"


def _rank_local_trees(opt: Any) -> list[tuple[Any, ...]]:
    """The paths in the optimizer's state of the trees that are rank-local now."""
    nodes = named_leaves(opt, lambda node: hasattr(node, "rank_local"))
    return [(*path, field) for path, node in nodes if hasattr(node, "rank_local") for field in node.rank_local()]
