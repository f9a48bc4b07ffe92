"""Filling a train state from saved tensors. What will be read is planned, compared and verified by all ranks first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from shardlib.checkpoint import rank_local, rank_local_buffers, residuals
from shardlib.checkpoint.agreement import read_on_all_ranks
from shardlib.checkpoint.common import common_leaves
from shardlib.checkpoint.fills import Fill, PackedFill, joined
from shardlib.checkpoint.fragments import (
    MASTERS,
    PARAMS,
    PENDING,
    Fragment,
    needed_fragments,
    source_of,
    whole,
)
from shardlib.checkpoint.packed import CheckpointTrees
from shardlib.checkpoint.reading import TensorsOnDisk
from shardlib.checkpoint.residuals import log_dropped, residual_fills
from shardlib.collectives import primitives
from shardlib.errors import CheckpointError, TreeError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.optim.on_disk import InPlace
from shardlib.optim.train_state import Pending
from shardlib.tree import matches


def fill_state(
    saved: TensorsOnDisk, parts: CheckpointTrees, partial: Sequence[str], check: Callable[[], None] = lambda: None
) -> None:
    """Fill this rank's part of a state, and of further trees, in place. Numbers are then in ``parts`` alone. Arguments and
    errors as in `shardlib.checkpoint.restore`.

    Args:
        parts: `outlined`.
        check: called on all ranks when the files are known to be intact, before anything is filled.
    """
    mesh = parts.params.mesh
    fills = list(planned(saved, parts))
    _check_alike(saved, parts, partial)
    check_intact(saved, mesh)
    check()

    writes = InPlace(parts.packed.values())

    def fill() -> None:
        writes.begin()
        for each in fills:
            each.run(saved)

    with torch.no_grad():
        try:
            run_fills(saved, mesh, fill)
        except BaseException:
            writes.take_back()  # with the error, so that another checkpoint can be restored
            raise
        if isinstance(parts.opt.pending, Pending) and not _delayed(saved):
            parts.opt.pending.due.zero_()
    log_dropped(parts, saved)


def _delayed(saved: TensorsOnDisk) -> bool:
    """Whether the checkpoint is of a run under ``offload(delay=True)``. Others leave no gradient to be applied."""
    return any(name.startswith(PENDING) for name in saved.names)


def run_fills(saved: TensorsOnDisk, mesh: Mesh, fill: Callable[[], None]) -> None:
    """Run this rank's ``fill``; if it fails on one rank, all raise."""
    read_on_all_ranks(mesh, fill, f"{saved.folder} could not be read to its end", "What was being filled is unusable.")


def planned(saved: TensorsOnDisk, parts: CheckpointTrees) -> Iterator[Fill | PackedFill]:
    """All that this rank reads. ``parts`` are `outlined`."""
    yield from joined(_fills(saved, parts), parts.packed)
    yield from residual_fills(parts, saved)


def _fills(saved: TensorsOnDisk, parts: CheckpointTrees) -> Iterator[Fill]:
    """What fills each fragment that this rank holds."""
    ways = rank_local.ways_of(saved.tensors)
    for fragment, into in _needed(parts):
        canonical = _source(saved, parts, fragment.name)
        sources = rank_local.sources(parts, fragment.name, saved.tensors, ways) or ((canonical, 1.0),)
        if saved.has(fragment, sources[0][0]):
            yield Fill(fragment, sources, into)


def _source(saved: TensorsOnDisk, parts: CheckpointTrees, name: str) -> str:
    """The name of the saved tensor that fills fragments called ``name``, unless several do."""
    mesh = parts.params.mesh
    local = rank_local_buffers.local_name(name, mesh)
    if local in saved.tensors and rank_local_buffers.on_its_mesh(saved.manifest, mesh):
        return local
    return source_of(name, saved.tensors)


def _needed(parts: CheckpointTrees) -> Iterator[tuple[Fragment, torch.Tensor | None]]:
    """Every fragment that this rank holds; with its tensor, where it is no view of it."""
    for fragment in needed_fragments(parts):
        yield fragment, None
    for name, leaf in common_leaves(parts):
        fragment = whole(leaf, name)
        yield (fragment, None) if leaf.is_contiguous() else (fragment._replace(data=fragment.data.to("meta")), leaf)


def _check_alike(saved: TensorsOnDisk, parts: CheckpointTrees, partial: Sequence[str]) -> None:
    """Raise one `TreeError` that lists every tensor that the checkpoint or the state lacks, or that differs in shape."""
    mesh = parts.params.mesh
    needed = [fragment for fragment, _ in _needed(parts)]
    source = {fragment.name: _source(saved, parts, fragment.name) for fragment in needed}
    problems = {
        fragment.name: problem
        for fragment in needed
        if fragment.data.numel()
        and (_delayed(saved) or not fragment.name.startswith(PENDING))
        and (problem := saved.missing(fragment, source[fragment.name]))
    }
    wanted = set(source.values())
    # Residuals, and what ranks held for themselves, fit any plan; masters and parameters stand for each other.
    wanted |= {PARAMS + name.removeprefix(MASTERS) for name in wanted if name.startswith(MASTERS)}
    unwanted = {
        name
        for name in saved.names
        if name not in wanted and not name.startswith((residuals.PREFIX, rank_local.PREFIX))
    }
    if left := rank_local_buffers.of_no_rank(saved.manifest, mesh):
        problems |= left
        unwanted = {name for name in unwanted if not name.startswith(rank_local_buffers.PREFIX)}
    ranks = primitives.all_gather_object(mesh, list(mesh.shape), (problems, unwanted))
    found: dict[str, str] = {}
    for rank_problems, _ in ranks:
        found |= rank_problems
    # Ranks of a pipeline hold parts of the state: what no rank wants is unexpected.
    for name in sorted(set.intersection(*(rank_unwanted for _, rank_unwanted in ranks))):
        found[name] = f"{name}: in the checkpoint, not in the state"
    lines = [line for name, line in found.items() if not matches(name, partial)]
    parameters = [line for line in lines if line.startswith(PARAMS)]
    if lines and all(line.startswith(PENDING) for line in lines):
        raise TreeError(
            f"{saved.folder.name} has gradients that its next step is to apply, and this state none:\n{listing(lines)}\n"
            "Restore it under offload(delay=True), make one step, which applies them, and save. What is left there are that "
            f"step's own gradients: name them in partial=['{PENDING}*'] to go on without them."
        )
    if lines:
        raise TreeError(
            f"{saved.folder.name} does not fit this state:\n{listing(parameters or lines)}\nMake the state with the model "
            "and the optimizer it was saved from, name further trees in also=, or in partial= what may be missing."
        )


def check_intact(saved: TensorsOnDisk, mesh: Mesh) -> None:
    """Raise one `CheckpointError`, on all ranks, that lists all damage that any rank sees."""
    problems = saved.damages(mesh.rank, mesh.size)
    found = dict.fromkeys(_flat(primitives.all_gather_object(mesh, list(mesh.shape), problems)))
    if found:
        raise CheckpointError(f"{saved.folder} is damaged:\n{listing(list(found))}\nRestore an older checkpoint.")


def _flat(lists: Iterable[Iterable[str]]) -> list[str]:
    return [item for items in lists for item in items]
