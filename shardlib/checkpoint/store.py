"""Checkpoints on disk: one folder per step with one file per rank, which appears only when it is complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shardlib.checkpoint.fragments import Fragment, needed_fragments, owned_fragments, sources_of
from shardlib.checkpoint.overlap import fill, missing
from shardlib.checkpoint.packed import pack, unpacked
from shardlib.checkpoint.rank_local import rank_local_fragments, restore_rank_local
from shardlib.checkpoint.residuals import residual_fragments, restore_residuals
from shardlib.collectives import primitives
from shardlib.errors import RankFailure, TreeError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.specs import Window
from shardlib.optim.train_state import TrainState, rescaled
from shardlib.plan.loss_scale import LossScale
from shardlib.rng import Key


def save(folder: str | Path, state: TrainState, keep: int = 2, extra: dict[str, Any] | None = None) -> Path:
    """Write ``state`` to a new checkpoint under ``folder`` and return the checkpoint's folder. Every rank must call it.

    A checkpoint appears under its final name only when every rank has written its file. Only the newest ``keep`` checkpoints
    are kept.

    Args:
        extra: further files for rank 0 to write into the checkpoint: name -> anything that `torch.save` takes.

    Raises:
        RankFailure: other ranks could not write their files; lists them.

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
        fragments: dict[str, tuple[Any, ...]] = {}
        whole = unpacked(state.settled())
        for fragment in (*owned_fragments(whole), *rank_local_fragments(whole), *residual_fragments(whole)):
            if fragment.data.numel():
                window = tuple(fragment.window) if fragment.window else None
                fragments[fragment.name] = (fragment.start, fragment.data.detach().to("cpu", copy=True), window)
        torch.save(fragments, partial / _file_of(mesh.rank))

    def finish() -> None:
        scale = asdict(state.scale) if state.scale else None
        facts = {"step": state.step, "seed": state.rng.seed, "scale": scale, "shapes": _shapes(state)}
        (partial / "state.json").write_text(json.dumps(facts))
        for name, value in extra.items():
            torch.save(value, partial / name)
        # An earlier save to this folder, possibly by more ranks, may have been interrupted and have left files.
        written = {"state.json", *extra, *map(_file_of, range(mesh.size))}
        for stale in (file for file in partial.iterdir() if file.name not in written):
            stale.unlink()
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in _complete(folder)[:-keep]:
            shutil.rmtree(old)

    _on_all_ranks(mesh, write)
    _on_all_ranks(mesh, finish if mesh.rank == 0 else lambda: None)
    return final


def _on_all_ranks(mesh: Mesh, work: Callable[[], None]) -> None:
    """Run ``work`` and wait until every rank has. If it fails on one rank all raise, since they would wait for that rank."""
    failure: Exception | None = None
    try:
        work()
    except Exception as error:
        failure = error
    problem = f"rank {mesh.rank}: {type(failure).__name__}: {failure}" if failure else ""
    problems = [problem for problem in primitives.all_gather_object(mesh, list(mesh.shape), problem) if problem]
    if failure is not None:
        raise failure
    if problems:
        raise RankFailure(
            f"the checkpoint was not written:\n{listing(problems)}\nThe output of these ranks has the tracebacks."
        )


def _file_of(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def latest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint under ``folder``, or None.

    >>> print(sl.checkpoint.latest("nothing-there"))
    None
    """
    complete = _complete(folder)
    return complete[-1] if complete else None


def restore(checkpoint: str | Path, state: TrainState) -> TrainState:
    """Load a checkpoint in the layout of ``state`` (a fresh one from `make_train_step`, whose memory is reused).

    The mesh, stage, number of ranks and 16-bit precision may differ from those of the run that saved the checkpoint.

    Args:
        checkpoint: a checkpoint's folder, or the folder that `save` was given, for the newest checkpoint in it.

    Raises:
        FileNotFoundError: ``checkpoint`` is neither.
        TreeError: the checkpoint lacks a leaf, or elements of one, or holds one of another shape; lists all of them.
            ``state`` is then unchanged.

    >>> state, _ = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.adamw(1e-3))
    >>> folder = sl.checkpoint.save("run", state)
    >>> sl.checkpoint.restore("run", state).step
    0
    """
    path = _checkpoint_at(Path(checkpoint))
    facts = json.loads((path / "state.json").read_text())
    failures = _differences(facts["shapes"], _shapes(state))
    saved: dict[str, list[Fragment]] = {}
    for file in sorted(path.glob("rank-*.pt")):
        for name, (start, data, window) in torch.load(file, map_location="cpu", mmap=True, weights_only=True).items():
            saved.setdefault(name, []).append(Fragment(name, start, data, Window(*window) if window else None))
    whole = unpacked(state)
    needed = list(needed_fragments(whole))
    failures = failures or [
        problem for fragment in needed if (problem := missing(fragment, sources_of(fragment.name, saved)))
    ]
    if failures:
        raise TreeError(
            f"{path.name} does not fit this state:\n{listing(failures)}\nMake the state with the model and the optimizer it "
            "was saved from."
        )
    with torch.no_grad():
        for fragment in needed:
            fill(fragment, sources_of(fragment.name, saved))
        restore_rank_local(whole, saved)
        restore_residuals(whole, saved)
        pack(state, whole)
    before = LossScale(**facts["scale"]) if facts["scale"] else None
    # The new plan decides whether there is a loss scale and by which rules it changes; only its value is restored.
    scale = state.scale.resumed(before) if state.scale and before else state.scale
    factor = (scale.value if scale else 1.0) / (before.value if before else 1.0)
    comm = state.comm if factor == 1 else rescaled(state.params.plan, state.comm, factor)
    return TrainState(facts["step"], state.params, state.opt, comm, state.buffers, scale, Key(facts["seed"])).fitting()


def _checkpoint_at(path: Path) -> Path:
    if (path / "state.json").exists() and not path.suffix:
        return path
    newest = latest(path)
    if newest is None:
        raise FileNotFoundError(
            f"{path} is no complete checkpoint and holds none: give restore the folder that save was given, or one of the "
            "step-... folders in it"
        )
    return newest


def _complete(folder: str | Path) -> list[Path]:
    """The complete checkpoints in a folder, in the order of their steps."""
    named = [path for path in Path(folder).glob("step-*") if path.name.removeprefix("step-").isdigit()]
    complete = [path for path in named if (path / "state.json").exists()]
    return sorted(complete, key=lambda path: int(path.name.removeprefix("step-")))


def _shapes(state: TrainState) -> dict[str, list[int]]:
    """Path -> global shape of every parameter."""
    return {placement.path: list(placement.param.shape) for placement in state.params.plan.placements}


def _differences(saved: dict[str, list[int]], wanted: dict[str, list[int]]) -> list[str]:
    """One line for each parameter that only one of ``saved`` and ``wanted`` has, or that has another shape in each."""
    return [
        f"{path}: saved {saved.get(path, '(absent)')}, wanted {wanted.get(path, '(absent)')}"
        for path in dict.fromkeys([*saved, *wanted])
        if saved.get(path) != wanted.get(path)
    ]
