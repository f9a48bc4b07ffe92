"""Restoring a train state, on the mesh that saved it or on another."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardlib.checkpoint import commit
from shardlib.checkpoint.agreement import from_first_rank, read_on_all_ranks
from shardlib.checkpoint.filling import fill_state, planned
from shardlib.checkpoint.packed import fillable, outlined, with_numbers_of
from shardlib.checkpoint.reading import TensorsOnDisk, open_checkpoint
from shardlib.checkpoint.save import require_state
from shardlib.errors import CheckpointError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming
from shardlib.optim.train_state import TrainState, rescaled
from shardlib.plan.loss_scale import LossScale
from shardlib.rng import Key


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
    saved the checkpoint; only rank-local buffers (integers that count a rank's own samples) need the same mesh. Every byte of
    the checkpoint is verified first, by all ranks together; then each rank reads the bytes that its shards need, in place
    where dtype and device allow, else through a buffer of at most 64 MB. Moments of `adamw8bit` are decoded, filled and
    encoded a part at a time; residuals are read into a tensor of their own, one by one.

    Args:
        checkpoint: a checkpoint's folder, or the folder that `save` was given, for the newest checkpoint in it.
        partial: globs over the names of tensors (``"params/head/*"``, ``"opt/*"``; see ``shardlib checkpoint show``) that
            may be missing in the checkpoint or in the state, or have another shape. What the checkpoint lacks keeps the
            values of ``state``.
        also: further trees by name, as given to `save`: their tensors are filled in place.

    Raises:
        FileNotFoundError: ``checkpoint`` is neither.
        CheckpointError: a file of it is damaged, cut or missing, or ranks do not see the same checkpoint; names the files,
            tensors and ranks, on all ranks. ``state`` is unchanged.
        TypeError: ``state`` is no state.
        TreeError: the checkpoint and the state differ in a tensor or its shape; lists all of them. ``state`` is unchanged.
            Or two tensors of ``also`` are one.

    >>> state, _ = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.adamw(1e-3))
    >>> folder = sl.checkpoint.save("run", state)
    >>> sl.checkpoint.restore("run", state).step
    0
    """
    require_state("restore", state)
    with _opened_on_all_ranks(Path(checkpoint), state.params.mesh) as saved:
        parts = fillable(state, also)
        fill_state(saved, parts, partial)
        facts = saved.manifest
    before = LossScale(**facts.scale) if facts.scale else None
    # The new plan decides whether there is a loss scale and by which rules it changes; only its value is restored.
    scale = state.scale.resumed(before) if state.scale and before else state.scale
    factor = (scale.value if scale else 1.0) / (before.value if before else 1.0)
    comm = state.comm if factor == 1 else rescaled(state.params.plan, state.comm, factor)
    opt, buffers = with_numbers_of(parts, state)
    return TrainState(facts.step, state.params, opt, comm, buffers, scale, Key(facts.seed)).fitting()


def bytes_to_read(checkpoint: str | Path, state: TrainState, *, also: Mapping[str, Any] | None = None) -> int:
    """The bytes of a checkpoint's data files that this rank reads in `restore`: its share of the verification, and what its
    shards need.

    >>> state, _ = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.sgd(1e-3))
    >>> sl.checkpoint.bytes_to_read(sl.checkpoint.save("run", state), state)
    1296
    """
    mesh = require_state("bytes_to_read", state).params.mesh
    with open_checkpoint(checkpoint_at(checkpoint)) as saved:
        verified = sum(chunk.length for _, chunk in saved.shared_out(mesh.rank, mesh.size))
        return verified + sum(fill.bytes(saved) for fill in planned(saved, outlined(state, also)))


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


def _opened_on_all_ranks(checkpoint: Path, mesh: Mesh) -> TensorsOnDisk:
    """The checkpoint that rank 0 finds, on every rank. A shared file system may show others an older state of the folder."""
    inside = from_first_rank(mesh, lambda: checkpoint_at(checkpoint).relative_to(checkpoint), checkpoint)
    problem, remedy = f"{checkpoint / inside} cannot be restored", "All ranks must see the same folder."
    opened: list[TensorsOnDisk] = []

    def look() -> int:
        opened.append(open_checkpoint(checkpoint / inside))
        return zlib.crc32(opened[0].manifest.dumps())

    seen = read_on_all_ranks(mesh, look, problem, remedy)
    other = [f"rank {rank}: another manifest than rank 0 sees" for rank, it in enumerate(seen) if it != seen[0]]
    if other:
        raise CheckpointError(f"{problem}:\n{listing(other)}\n{remedy}")
    return opened[0]
