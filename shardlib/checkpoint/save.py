"""Saving a train state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardlib.checkpoint.agreement import on_all_ranks
from shardlib.checkpoint.commit import Commit
from shardlib.checkpoint.fragments import Saving, owned_fragments
from shardlib.checkpoint.manifest import Manifest
from shardlib.checkpoint.replicated import (
    Digest,
    Replicated,
    diverged_axis,
    owned_leaves,
    rank_local_fragments,
    replicated_on,
)
from shardlib.checkpoint.residuals import residual_fragments
from shardlib.checkpoint.trees import CheckpointTrees, require_kept, trees_of
from shardlib.common.version import VERSION
from shardlib.mesh.transport.activity import naming
from shardlib.optim.checks import check, is_step
from shardlib.optim.train_state import TrainState
from shardlib.plan.placement import Placement


@naming("the checkpoint")
def save(
    folder: str | Path,
    state: TrainState,
    keep: int = 2,
    notes: dict[str, Any] | None = None,
    also: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``state`` to a new checkpoint under ``folder`` and return the checkpoint's folder. Every rank must call it.

    Each rank writes its own file, all at the same time, and each tensor is written once. The checkpoint is there only when
    all of it is on the disk; a crash at any time leaves the checkpoints that were there before, or the new one too. Only the
    newest ``keep`` checkpoints are kept. Plain `torch.distributed.checkpoint.load` reads it too.

    Args:
        folder: a folder that all ranks see; it is made if it is not there.
        notes: what else to keep, such as the position in the data: anything that JSON can hold. Equal on all ranks;
            `read_notes` gives it back.
        also: further trees by name, such as the state of an average of parameters (`shardlib.optim.ema`): tensors in the
            layout of the optimizer's state, or equal on all ranks.

    Raises:
        CheckpointError: ``folder`` holds a checkpoint of a later step; or ranks hold different values of a tensor of the
            optimizer's state or of ``also`` that is not sharded: lists them, on all ranks.
        RankFailure: other ranks could not write their files; lists them.
        TypeError: ``state`` is no state, or ``notes`` are nothing that JSON can hold.
        ValueError: ``keep`` is no integer from 1.
        TreeError: ``also`` has leaves that are no tensors; or the optimizer's state or the buffers have leaves that are
            neither tensors nor numbers and would be lost. Lists them.

    >>> state, _ = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.adamw(1e-3))
    >>> sl.checkpoint.save("run", state).name
    'step-00000000'
    """
    mesh = require_state("save", state).params.mesh
    check("save", "keep is an integer from 1", keep=(keep, is_step(keep)))
    fragments = saved_fragments(state, also)
    commit = prepared(Path(folder), state, keep, notes)
    on_all_ranks(mesh, lambda: commit.write(fragments))
    final, *_ = on_all_ranks(mesh, lambda: commit.finish() if mesh.rank == 0 else None)
    assert final is not None
    return final


def prepared(folder: Path, state: TrainState, keep: int, notes: dict[str, Any] | None) -> Commit:
    """This rank's part of a new attempt to write a checkpoint of ``state``. Arguments and errors as of `save`."""
    mesh = state.params.mesh
    commit = Commit(folder, _facts(state, notes or {}), mesh.rank, mesh.size, keep)
    token, *_ = on_all_ranks(mesh, lambda: commit.prepare() if mesh.rank == 0 else "")
    commit.begin(token)
    return commit


def _facts(state: TrainState, notes: dict[str, Any]) -> Manifest:
    """The manifest of a state, without tensors and files. Notes are copied: the caller may change them afterwards."""
    try:
        written = json.dumps(notes)
        _require_text_keys(notes)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"save: the notes cannot be written as JSON ({error}); give dicts with text as keys, lists, numbers and text"
        ) from error
    return Manifest(
        step=state.step,
        seed=state.rng.seed,
        scale=asdict(state.scale) if state.scale else None,
        mesh=dict(state.params.mesh.shape),
        shardlib=VERSION,
        specs={placement.path: _specs(placement) for placement in state.params.plan.placements},
        notes=json.loads(written),
    )


def _require_text_keys(notes: Any) -> None:
    """Refuse keys that JSON would turn into text, so that others would come back."""
    if isinstance(notes, Mapping):
        if other := [key for key in notes if not isinstance(key, str)]:
            raise TypeError(f"keys {other!r}")
        notes = notes.values()
    for inner in notes if isinstance(notes, Iterable) and not isinstance(notes, str) else ():
        _require_text_keys(inner)


def _specs(placement: Placement) -> str:
    optimizer = f", optimizer {placement.optimizer.spec!r}" if placement.optimizer else ""
    return f"{placement.param.spec!r}{optimizer}"


def require_state(what: str, state: Any) -> TrainState:
    """``state``, if it is one. Raises `TypeError` with a remedy otherwise; ``what`` begins the message."""
    if isinstance(state, (str, Path)):
        raise TypeError(f"{what}: {state!r} where the state is due: the folder comes first, {what}(folder, state)")
    if isinstance(state, tuple) and any(isinstance(each, TrainState) for each in state):
        raise TypeError(
            f"{what}: a tuple with a state in it; a step returns two values, state, metrics = train_step(state, batch)"
        )
    if not isinstance(state, TrainState):
        raise TypeError(
            f"{what}: {type(state).__name__} is no TrainState, as make_train_step makes it. Parameters alone go to "
            "export_safetensors, further trees into also="
        )
    return state


def saved_fragments(state: TrainState, also: Mapping[str, Any] | None) -> Saving:
    """The fragments of a state and further trees that this rank saves: views where they hold what is saved. Collective;
    errors as of `save`."""
    made: list[tuple[CheckpointTrees, Replicated]] = []

    def look() -> Digest:
        trees = trees_of(state.settled(), also)
        require_kept("opt", trees.opt)
        require_kept("buffers", trees.buffers)
        made.append((trees, replicated_on(trees)))
        return made[0][1].digest()

    digests = on_all_ranks(state.params.mesh, look)
    ((trees, held),) = made
    fragments = owned_fragments(trees, diverged_axis(trees))
    replicated = owned_leaves(trees, held, digests)
    return Saving(trees, [*fragments, *replicated, *rank_local_fragments(trees), *residual_fragments(trees)])
