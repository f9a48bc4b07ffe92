"""Restoring a train state, on the mesh that saved it or on another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardlib.checkpoint import commit, rank_local, residuals
from shardlib.checkpoint.fills import Fill
from shardlib.checkpoint.fragments import (
    MASTERS,
    PARAMS,
    Fragment,
    common_leaves,
    needed_fragments,
    source_of,
    whole,
)
from shardlib.checkpoint.packed import Parts, pack, unpacked
from shardlib.checkpoint.reading import Saved, open_checkpoint
from shardlib.checkpoint.residuals import log_dropped, residual_fills
from shardlib.checkpoint.save import require_state
from shardlib.collectives import primitives
from shardlib.errors import CheckpointError, TreeError, listing
from shardlib.mesh.transport.activity import naming
from shardlib.optim.train_state import TrainState, rescaled
from shardlib.plan.loss_scale import LossScale
from shardlib.rng import Key
from shardlib.tree import matches


def latest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint under ``folder``, or None.

    >>> print(sl.checkpoint.latest("nothing-there"))
    None
    """
    complete = commit.complete(Path(folder))
    return complete[-1] if complete else None


def read_notes(checkpoint: str | Path) -> dict[str, Any]:
    """The ``notes`` that a checkpoint was saved with.

    Args:
        checkpoint: a checkpoint's folder, or the folder that `save` was given, for the newest checkpoint in it.

    Raises:
        FileNotFoundError: ``checkpoint`` is neither.
        CheckpointError: its manifest is damaged, or of a later format.

    >>> state, _ = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.adamw(1e-3))
    >>> folder = sl.checkpoint.save("run", state, notes={"position": 17})
    >>> sl.checkpoint.read_notes("run")
    {'position': 17}
    """
    with open_checkpoint(checkpoint_at(checkpoint)) as saved:
        return saved.manifest.notes


@naming("the checkpoint")
def restore(
    checkpoint: str | Path, state: TrainState, *, partial: Sequence[str] = (), also: Mapping[str, Any] | None = None
) -> TrainState:
    """Load a checkpoint in the layout of ``state`` (a fresh one from `make_train_step`, whose memory is reused). Every rank
    must call it.

    Mesh, number of ranks, stage, slices, pipeline stages, 16-bit precision and codecs may differ from those of the run that
    saved the checkpoint. Every byte of the checkpoint is verified first, by all ranks together; then each rank reads the
    bytes that its shards need, in place where dtype and device allow, else through a buffer of at most 64 MB. Residuals, and
    the moments of `adamw8bit`, are read into tensors of their own first.

    Args:
        checkpoint: a checkpoint's folder, or the folder that `save` was given, for the newest checkpoint in it.
        partial: globs over the names of tensors (``"params/head/*"``, ``"opt/*"``; see ``shardlib checkpoint show``) that
            may be missing in the checkpoint or in the state. Those that the checkpoint lacks keep the values of ``state``.
        also: further trees by name, as given to `save`: their tensors are filled in place.

    Raises:
        FileNotFoundError: ``checkpoint`` is neither.
        CheckpointError: a file of it is damaged, cut or missing; names the files and tensors. ``state`` is unchanged.
        TypeError: ``state`` is no state.
        TreeError: the checkpoint and the state differ in a tensor or its shape; lists all of them. ``state`` is unchanged.

    >>> state, _ = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.adamw(1e-3))
    >>> folder = sl.checkpoint.save("run", state)
    >>> sl.checkpoint.restore("run", state).step
    0
    """
    require_state("restore", state)
    with open_checkpoint(checkpoint_at(checkpoint)) as saved:
        decoded = unpacked(state, also)
        fills = list(_fills(saved, decoded))
        _check_alike(saved, decoded, partial)
        _check_intact(saved, decoded)
        with torch.no_grad():
            for fill in fills:
                fill.run(saved)
            pack(state, also, decoded)
        log_dropped(decoded, saved)
        facts = saved.manifest
    before = LossScale(**facts.scale) if facts.scale else None
    # The new plan decides whether there is a loss scale and by which rules it changes; only its value is restored.
    scale = state.scale.resumed(before) if state.scale and before else state.scale
    factor = (scale.value if scale else 1.0) / (before.value if before else 1.0)
    comm = state.comm if factor == 1 else rescaled(state.params.plan, state.comm, factor)
    return TrainState(facts.step, state.params, state.opt, comm, state.buffers, scale, Key(facts.seed)).fitting()


def bytes_to_read(checkpoint: str | Path, state: TrainState, *, also: Mapping[str, Any] | None = None) -> int:
    """The bytes of a checkpoint's data files that this rank reads in `restore`: its share of the verification, and what its
    shards need.

    >>> state, _ = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.sgd(1e-3))
    >>> sl.checkpoint.bytes_to_read(sl.checkpoint.save("run", state), state)
    1296
    """
    mesh = state.params.mesh
    with open_checkpoint(checkpoint_at(checkpoint)) as saved:
        verified = sum(chunk.length for _, chunk in saved.shared_out(mesh.rank, mesh.size))
        return verified + sum(fill.bytes(saved) for fill in _fills(saved, unpacked(state, also)))


def _fills(saved: Saved, parts: Parts) -> Iterator[Fill]:
    """All that this rank reads."""
    ways = rank_local.ways_of(saved.tensors)
    for fragment, into in _needed(parts):
        canonical = source_of(fragment.name, saved.tensors)
        sources = rank_local.sources(parts, fragment.name, saved.tensors, ways) or ((canonical, 1.0),)
        if sources[0][0] in saved.tensors:
            yield Fill(fragment, sources, into)
    yield from residual_fills(parts, saved)


def _needed(parts: Parts) -> Iterator[tuple[Fragment, torch.Tensor | None]]:
    """Every fragment that this rank holds; with its tensor, where it is no view of it."""
    for fragment in needed_fragments(parts):
        yield fragment, None
    for name, leaf in common_leaves(parts):
        fragment = whole(leaf, name)
        yield (fragment, None) if leaf.is_contiguous() else (fragment._replace(data=fragment.data.to("meta")), leaf)


def checkpoint_at(checkpoint: str | Path) -> Path:
    """The folder of a checkpoint, from itself or from the folder that holds it and others, of which the newest is meant.

    Raises:
        FileNotFoundError: ``checkpoint`` is neither.

    >>> state, _ = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.sgd(1e-3))
    >>> folder = sl.checkpoint.save("run", state)
    >>> sl.checkpoint.checkpoint_at("run") == sl.checkpoint.checkpoint_at(folder) == folder
    True
    """
    path = Path(checkpoint)
    if commit.is_complete(path):
        return path
    newest = latest(path)
    if newest is None:
        raise FileNotFoundError(
            f"{path} is no complete checkpoint and holds none: give restore the folder that save was given, or one of the "
            "step-... folders in it"
        )
    return newest


def _check_alike(saved: Saved, parts: Parts, partial: Sequence[str]) -> None:
    """Raise one `TreeError` that lists every tensor that the checkpoint or the state lacks, or that differs in shape."""
    mesh = parts.params.mesh
    needed = [fragment for fragment, _ in _needed(parts)]
    problems = {
        fragment.name: problem
        for fragment in needed
        if fragment.data.numel() and (problem := saved.missing(fragment, source_of(fragment.name, saved.tensors)))
    }
    wanted = {source_of(fragment.name, saved.tensors) for fragment in needed}
    # Residuals, and what ranks held for themselves, fit any plan; masters and parameters stand for each other.
    wanted |= {PARAMS + name.removeprefix(MASTERS) for name in wanted if name.startswith(MASTERS)}
    unwanted = {
        name
        for name in saved.names
        if name not in wanted and not name.startswith((residuals.PREFIX, rank_local.PREFIX))
    }
    ranks = primitives.all_gather_object(mesh, list(mesh.shape), (problems, unwanted))
    found: dict[str, str] = {}
    for rank_problems, _ in ranks:
        found |= rank_problems
    # Ranks of a pipeline hold parts of the state: what no rank wants is unexpected.
    for name in sorted(set.intersection(*(rank_unwanted for _, rank_unwanted in ranks))):
        found[name] = f"{name}: in the checkpoint, not in the state"
    lines = [line for name, line in found.items() if not matches(name, partial)]
    parameters = [line for line in lines if line.startswith(PARAMS)]
    if lines:
        raise TreeError(
            f"{saved.folder.name} does not fit this state:\n{listing(parameters or lines)}\nMake the state with the model "
            "and the optimizer it was saved from, name further trees in also=, or in partial= what may be missing."
        )


def _check_intact(saved: Saved, parts: Parts) -> None:
    mesh = parts.params.mesh
    problems = saved.damages(mesh.rank, mesh.size)
    found = dict.fromkeys(_flat(primitives.all_gather_object(mesh, list(mesh.shape), problems)))
    if found:
        raise CheckpointError(f"{saved.folder} is damaged:\n{listing(list(found))}\nRestore an older checkpoint.")


def _flat(lists: Iterable[Iterable[str]]) -> list[str]:
    return [item for items in lists for item in items]
