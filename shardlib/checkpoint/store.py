"""Checkpoints on disk: one folder per step, one file per rank, complete or not there at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shardlib.checkpoint.overlap import fill, missing
from shardlib.checkpoint.packed import pack, unpacked
from shardlib.checkpoint.pieces import Piece, needed_pieces, owned_pieces, sources_of
from shardlib.checkpoint.rank_local import own_pieces, restore_own
from shardlib.checkpoint.residuals import error_pieces, restore_errors
from shardlib.collectives import primitives
from shardlib.errors import RankFailure, TreeError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.specs import Window
from shardlib.optim.train_state import TrainState, rescaled
from shardlib.plan.loss_scale import LossScale
from shardlib.rng import Key


def save(folder: str | Path, state: TrainState, keep: int = 2, extra: dict[str, Any] | None = None) -> Path:
    """Write ``state`` under ``folder``; every rank calls it. Returns the new checkpoint's folder.

    A checkpoint appears under its final name only when every rank has written its part. The newest ``keep`` are kept.

    Args:
        extra: further files for rank 0 to write beside it: name -> anything that `torch.save` takes.

    Raises:
        RankFailure: another rank could not write its part; names it.

    >>> state, _ = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.adamw(1e-3))
    >>> sl.checkpoint.save("run", state).name
    'step-00000000'
    """
    mesh = state.params.mesh
    final = Path(folder) / f"step-{state.step:08d}"
    partial = final.with_suffix(".partial")
    extra = extra or {}

    def write() -> None:
        partial.mkdir(parents=True, exist_ok=True)
        pieces: dict[str, tuple[Any, ...]] = {}
        whole = unpacked(state.settled())
        for piece in (*owned_pieces(whole), *own_pieces(whole), *error_pieces(whole)):
            if piece.data.numel():
                window = tuple(piece.window) if piece.window else None
                pieces[piece.name] = (piece.start, piece.data.detach().to("cpu", copy=True), window)
        torch.save(pieces, partial / _file_of(mesh.rank))

    def finish() -> None:
        scale = asdict(state.scale) if state.scale else None
        facts = {"step": state.step, "seed": state.rng.seed, "scale": scale, "shapes": _shapes(state)}
        (partial / "state.json").write_text(json.dumps(facts))
        for name, value in extra.items():
            torch.save(value, partial / name)
        # An earlier save to this folder, by more ranks perhaps, may have been interrupted.
        ours = {"state.json", *extra, *map(_file_of, range(mesh.size))}
        for stale in (file for file in partial.iterdir() if file.name not in ours):
            stale.unlink()
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in _complete(folder)[:-keep]:
            shutil.rmtree(old)

    _on_all_ranks(mesh, write)
    _on_all_ranks(mesh, finish if mesh.rank == 0 else lambda: None)
    return final


def _on_all_ranks(mesh: Mesh, work: Callable[[], None]) -> None:
    """Run it here and wait for the others'. Where a rank's fails all raise, or they would wait for that one."""
    failure: Exception | None = None
    try:
        work()
    except Exception as error:
        failure = error
    told = f"rank {mesh.rank}: {type(failure).__name__}: {failure}" if failure else ""
    problems = [problem for problem in primitives.all_gather_object(mesh, list(mesh.shape), told) if problem]
    if failure is not None:
        raise failure
    if problems:
        raise RankFailure(f"the checkpoint was not written:\n{listing(problems)}\nThose ranks' outputs tell more.")


def _file_of(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def latest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint under ``folder``, or None.

    >>> print(sl.checkpoint.latest("nothing-there"))
    None
    """
    found = _complete(folder)
    return found[-1] if found else None


def restore(checkpoint: str | Path, state: TrainState) -> TrainState:
    """The saved state in the layout of ``state`` (a fresh one from `make_train_step`, whose memory is reused).

    The mesh, stage, number of ranks and 16-bit precision may differ from those it was saved on.

    Args:
        checkpoint: a checkpoint's own folder, or the one that `save` was given: then the newest in it.

    Raises:
        FileNotFoundError: neither.
        TreeError: the checkpoint lacks a leaf, or part of one, or holds one of another size; lists them. ``state`` is
            then unchanged.

    >>> state, _ = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.adamw(1e-3))
    >>> folder = sl.checkpoint.save("run", state)
    >>> sl.checkpoint.restore("run", state).step
    0
    """
    path = _checkpoint_at(Path(checkpoint))
    facts = json.loads((path / "state.json").read_text())
    failures = _differences(facts["shapes"], _shapes(state))
    saved: dict[str, list[Piece]] = {}
    for file in sorted(path.glob("rank-*.pt")):
        for name, (start, data, window) in torch.load(file, map_location="cpu", mmap=True, weights_only=True).items():
            saved.setdefault(name, []).append(Piece(name, start, data, Window(*window) if window else None))
    whole = unpacked(state)
    needed = list(needed_pieces(whole))
    failures = failures or [problem for piece in needed if (problem := missing(piece, sources_of(piece.name, saved)))]
    if failures:
        raise TreeError(
            f"{path.name} does not fit this state:\n{listing(failures)}\nMake the state with the model and the optimizer it "
            "was saved from."
        )
    with torch.no_grad():
        for piece in needed:
            fill(piece, sources_of(piece.name, saved))
        restore_own(whole, saved)
        restore_errors(whole, saved)
        pack(state, whole)
    was = LossScale(**facts["scale"]) if facts["scale"] else None
    # Whether there is one, and by what rules, the plan says.
    scale = state.scale.resumed(was) if state.scale and was else state.scale
    factor = (scale.value if scale else 1.0) / (was.value if was else 1.0)
    comm = state.comm if factor == 1 else rescaled(state.params.plan, state.comm, factor)
    return TrainState(facts["step"], state.params, state.opt, comm, state.buffers, scale, Key(facts["seed"])).fitting()


def _checkpoint_at(path: Path) -> Path:
    if (path / "state.json").exists() and not path.suffix:
        return path
    found = latest(path)
    if found is None:
        raise FileNotFoundError(
            f"{path} is no complete checkpoint and holds none: give restore the folder that save was given, or one of the "
            "step-... folders in it"
        )
    return found


def _complete(folder: str | Path) -> list[Path]:
    """In the order of their steps."""
    named = [path for path in Path(folder).glob("step-*") if path.name.removeprefix("step-").isdigit()]
    there = [path for path in named if (path / "state.json").exists()]
    return sorted(there, key=lambda path: int(path.name.removeprefix("step-")))


def _shapes(state: TrainState) -> dict[str, list[int]]:
    """Path -> global shape of every parameter."""
    return {placement.path: list(placement.param.shape) for placement in state.params.plan.placements}


def _differences(saved: dict[str, list[int]], wanted: dict[str, list[int]]) -> list[str]:
    """One line per parameter that only one side has, or that has another shape."""
    return [
        f"{path}: saved {saved.get(path, '(absent)')}, wanted {wanted.get(path, '(absent)')}"
        for path in dict.fromkeys([*saved, *wanted])
        if saved.get(path) != wanted.get(path)
    ]
