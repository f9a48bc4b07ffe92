"""Work of all ranks that fails on all of them or on none, so that no rank waits for one that has raised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from shardlib.collectives import attempts, primitives
from shardlib.errors import CheckpointError, ShardlibError, listing
from shardlib.mesh.mesh import Mesh

_T = TypeVar("_T")


def on_all_ranks(mesh: Mesh, work: Callable[[], _T]) -> list[_T]:
    """Run ``work``, which writes a part of a checkpoint, on every rank; returns all ranks' results.

    Raises:
        RankFailure: it failed on other ranks; lists them. Where it failed, its own error is raised.
    """
    return attempts.on_all_ranks(mesh, work, "the checkpoint was not written")


def read_on_all_ranks(mesh: Mesh, work: Callable[[], _T], problem: str, remedy: str) -> list[_T]:
    """Run ``work``, which looks at a checkpoint, on every rank; returns all ranks' results.

    Raises:
        CheckpointError: it failed on some ranks. Equal on all ranks: the ``problem``, ranks and their errors, the ``remedy``.
            An error that all ranks have alike is raised as it is.
    """
    failure, problems, results = attempts.attempted(mesh, work)
    if failure is not None and len(problems) == mesh.size and len({text for _, text in problems}) == 1:
        raise failure
    if problems:
        ranks: dict[str, list[int]] = {}
        for rank, text in problems:
            ranks.setdefault(text, []).append(rank)
        lines = [
            f"rank{'s' if len(those) > 1 else ''} {', '.join(map(str, those))}: {text}" for text, those in ranks.items()
        ]
        raise CheckpointError(f"{problem}:\n{listing(lines)}\n{remedy}") from failure
    return results


def from_first_rank(mesh: Mesh, work: Callable[[], _T], folder: str | Path) -> _T:
    """The result of ``work``, which looks into a folder, on rank 0, on every rank; or its error, on every rank."""
    failure: Exception | None = None
    result: Any = None
    if mesh.rank == 0:
        try:
            result = work()
        except (ShardlibError, OSError) as error:
            failure = error
        except Exception as error:  # of a file that says other things than its format does
            failure = CheckpointError(f"{folder} cannot be read as expected ({type(error).__name__}: {error})")
    (failure, result), *_ = primitives.all_gather_object(mesh, list(mesh.shape), (failure, result))
    if failure is not None:
        raise failure
    return result
