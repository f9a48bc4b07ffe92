"""Restoring a train state, on the mesh that saved it or on another.

What will be read is planned, compared and verified by all ranks before anything is filled.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardlib.checkpoint import commit
from shardlib.checkpoint.agreement import from_first_rank, gathered, read_on_all_ranks
from shardlib.checkpoint.fragments import (
    MASTERS,
    PARAMS,
    PENDING,
    Fragment,
    needed_fragments,
    source_of,
    whole,
    without_memory,
)
from shardlib.checkpoint.reading import Fill, PackedFill, TensorsOnDisk, joined, open_checkpoint
from shardlib.checkpoint.replicated import (
    LOCAL_BUFFERS,
    RANK_LOCAL,
    local_buffer,
    local_buffers_lost,
    on_its_mesh,
    rank_local_size,
    rank_local_sources,
    replicated_leaves,
)
from shardlib.checkpoint.residuals import RESIDUALS, log_dropped, residual_fills
from shardlib.checkpoint.save import require_state
from shardlib.checkpoint.trees import CheckpointTrees, fillable, trees_of, with_numbers
from shardlib.errors import CheckpointError, TreeError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming
from shardlib.optim.on_disk import InPlace
from shardlib.optim.train_state import Pending, TrainState, rescaled
from shardlib.plan.loss_scale import LossScale
from shardlib.rng import Key
from shardlib.sharded.tree import Sharded
from shardlib.tree import T, matches


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
    checkpoint: str | Path, state: TrainState[T], *, partial: Sequence[str] = (), also: Mapping[str, Any] | None = None
) -> TrainState[T]:
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
        trees = fillable(state, also)
        fill_state(saved, trees, partial)
        facts = saved.manifest
    before = LossScale(**facts.scale) if facts.scale else None
    return filled(trees, state, facts.step, before, Key(facts.seed)).fitting()


def filled(
    trees: CheckpointTrees,
    state: TrainState,
    step: int,
    before: LossScale | None,
    rng: Key,
    params: Sharded | None = None,
) -> TrainState:
    """A state whose ``trees`` have been filled with those of another one, which had the loss scale ``before``."""
    # The new plan decides whether there is a loss scale and by which rules it changes; only its value is taken over.
    scale = state.scale.resumed(before) if state.scale and before else state.scale
    factor = (scale.value if scale else 1.0) / (before.value if before else 1.0)
    comm = state.comm if factor == 1 else rescaled(state.params.plan, state.comm, factor)
    opt, buffers = with_numbers(trees, state)
    params = state.params if params is None else params
    return TrainState(step, params, opt, comm, buffers, scale, rng)


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
        return verified + sum(fill.bytes(saved) for fill in planned(saved, trees_of(state, also)))


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
            f"{path} is no complete checkpoint and holds none: give restore the folder that save was given, or one of its "
            "step-... folders"
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
    if other := [f"rank {rank}: another manifest than rank 0 sees" for rank, it in enumerate(seen) if it != seen[0]]:
        raise CheckpointError(f"{problem}:\n{listing(other)}\n{remedy}")
    return opened[0]


def fill_state(
    saved: TensorsOnDisk, trees: CheckpointTrees, partial: Sequence[str], check: Callable[[], None] = lambda: None
) -> None:
    """Fill this rank's ``trees``, which are `fillable`, in place. Numbers are then in them alone. Arguments and errors as in
    `shardlib.checkpoint.restore`.

    Args:
        check: called on all ranks when the files are known to be intact, before anything is filled.
    """
    mesh = trees.params.mesh
    fills = list(planned(saved, trees))
    _check_alike(saved, trees, partial)
    check_intact(saved, mesh)
    check()

    writes = InPlace(trees.packed.values())
    try:
        run_fills(saved, mesh, fills, writes)
    except BaseException:
        writes.take_back()  # with the error, so that another checkpoint can be restored
        raise
    if isinstance(trees.opt.pending, Pending) and not _delayed(saved):
        with torch.no_grad():
            trees.opt.pending.due.zero_()
    log_dropped(trees, saved)


def _delayed(saved: TensorsOnDisk) -> bool:
    """Whether the checkpoint is of a run under ``offload(delay=True)``. Others leave no gradient to be applied."""
    return any(name.startswith(PENDING) for name in saved.tensors)


def run_fills(
    saved: TensorsOnDisk, mesh: Mesh, fills: Sequence[Fill | PackedFill], writes: InPlace | None = None
) -> None:
    """Run this rank's ``fills``; if it fails on one rank, all raise."""

    def run() -> None:
        if writes is not None:
            writes.begin()
        for each in fills:
            each.run(saved)

    with torch.no_grad():
        read_on_all_ranks(
            mesh, run, f"{saved.folder} could not be read to its end", "What was being filled is unusable."
        )


def planned(saved: TensorsOnDisk, trees: CheckpointTrees) -> Iterator[Fill | PackedFill]:
    """All that this rank reads."""
    yield from joined(_fills(saved, trees), trees.packed)
    yield from residual_fills(trees, saved)


def _fills(saved: TensorsOnDisk, trees: CheckpointTrees) -> Iterator[Fill]:
    """What fills each fragment that this rank holds."""
    size = rank_local_size(saved.tensors)
    for fragment, into in _needed(trees):
        canonical = _source(saved, trees, fragment.name)
        sources = rank_local_sources(trees, fragment.name, saved.tensors, size) or ((canonical, 1.0),)
        if saved.has(fragment, sources[0][0]):
            yield Fill(fragment, sources, into)


def _source(saved: TensorsOnDisk, trees: CheckpointTrees, name: str) -> str:
    """The name of the saved tensor that fills fragments called ``name``, unless several do."""
    mesh = trees.params.mesh
    local = local_buffer(name, mesh)
    if local in saved.tensors and on_its_mesh(saved.manifest, mesh):
        return local
    return source_of(name, saved.tensors)


def _needed(trees: CheckpointTrees) -> Iterator[tuple[Fragment, torch.Tensor | None]]:
    """Every fragment that this rank holds; with its tensor, where it is no view of it."""
    for fragment in needed_fragments(trees):
        yield fragment, None
    for name, leaf in replicated_leaves(trees):
        yield (whole(leaf, name), None) if leaf.is_contiguous() else (without_memory(name, leaf), leaf)


def _check_alike(saved: TensorsOnDisk, trees: CheckpointTrees, partial: Sequence[str]) -> None:
    """Raise one `TreeError` that lists every tensor that the checkpoint or the state lacks, or that differs in shape."""
    mesh = trees.params.mesh
    needed = [fragment for fragment, _ in _needed(trees)]
    source = {fragment.name: _source(saved, trees, fragment.name) for fragment in needed}
    problems = {
        fragment.name: problem
        for fragment in needed
        if fragment.data.numel()
        and (_delayed(saved) or not fragment.name.startswith(PENDING))
        and (problem := saved.missing(fragment, source[fragment.name]))
    }
    # Masters and parameters stand for each other; residuals, and what ranks held for themselves, fit any plan.
    wanted = {*source.values()}
    wanted |= {PARAMS + name.removeprefix(MASTERS) for name in wanted if name.startswith(MASTERS)}
    fitting: tuple[str, ...] = (RESIDUALS, RANK_LOCAL)
    if left := local_buffers_lost(saved.manifest, mesh):
        problems |= left
        fitting = *fitting, LOCAL_BUFFERS
    unwanted = {name for name in saved.tensors if name not in wanted and not name.startswith(fitting)}
    found = unmatched(mesh, problems, unwanted, "in the checkpoint, not in the state")
    lines = [line for name, line in found.items() if not matches(name, partial)]
    parameters = [line for line in lines if line.startswith(PARAMS)]
    if lines and all(line.startswith(PENDING) for line in lines):
        raise TreeError(
            f"{saved.folder.name} has gradients that its next step is to apply, and this state none:\n{listing(lines)}\n"
            f"Make that step under offload(delay=True) and save; partial=['{PENDING}*'] goes on without them."
        )
    if lines:
        raise TreeError(
            f"{saved.folder.name} does not fit this state:\n{listing(parameters or lines)}\nUse the model and optimizer it "
            "was saved from, name further trees in also=, or in partial= what may be missing."
        )


def unmatched(mesh: Mesh, problems: dict[str, str], unwanted: set[str], why: str) -> dict[str, str]:
    """The ``problems`` of all ranks by the names of tensors, and those that no rank wants. Collective."""
    ranks = gathered(mesh, (problems, unwanted))
    found = {name: line for of_rank, _ in ranks for name, line in of_rank.items()}
    # Ranks of a pipeline hold parts of the state: what no rank wants is unexpected.
    return found | {name: f"{name}: {why}" for name in sorted(set.intersection(*(of_rank for _, of_rank in ranks)))}


def check_intact(saved: TensorsOnDisk, mesh: Mesh) -> None:
    """Raise one `CheckpointError`, on all ranks, that lists all damage that any rank sees."""
    ranks = gathered(mesh, saved.damages(mesh.rank, mesh.size))
    if found := dict.fromkeys(line for lines in ranks for line in lines):
        raise CheckpointError(f"{saved.folder} is damaged:\n{listing(list(found))}\nRestore an older checkpoint.")
