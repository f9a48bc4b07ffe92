"""Work of all ranks that fails on all of them or on none, so that no rank waits for one that has raised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from shardlib.collectives import attempts, primitives
from shardlib.errors import CheckpointError, ShardlibError, listing
from shardlib.mesh.mesh import Mesh

_T = TypeVar("_T")


def gathered(mesh: Mesh, value: _T) -> list[_T]:
    """The values of all ranks."""
    return primitives.all_gather_object(mesh, list(mesh.shape), value)


def on_all_ranks(mesh: Mesh, work: Callable[[], _T]) -> list[_T]:
    """The results of all ranks' ``work``, which writes a part of a checkpoint. Where it failed, its own error is raised, and
    `RankFailure` on the other ranks."""
    return attempts.on_all_ranks(mesh, work, "the checkpoint was not written")


def read_on_all_ranks(mesh: Mesh, work: Callable[[], _T], problem: str, remedy: str) -> list[_T]:
    """The results of all ranks' ``work``, which reads a checkpoint. Where it failed on some, all raise one `CheckpointError`
    of the ``problem``, ranks with their errors, and the ``remedy``; an error that all ranks have alike is raised as it is."""
    failure, problems, results = attempts.attempted(mesh, work)
    if failure is not None and len(problems) == mesh.size and len({text for _, text in problems}) == 1:
        raise failure
    if problems:
        ranks: dict[str, list[int]] = {}
        for rank, text in problems:
            ranks.setdefault(text, []).append(rank)
        lines = [f"{ranks_named(those)}: {text}" for text, those in ranks.items()]
        raise CheckpointError(f"{problem}:\n{listing(lines)}\n{remedy}") from failure
    return results


def ranks_named(ranks: list[int] | tuple[int, ...]) -> str:
    """The name of some ranks in messages: "rank 1", "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def from_first_rank(mesh: Mesh, work: Callable[[], _T], folder: str | Path) -> _T:
    """The result of rank 0's ``work``, which looks into a folder, on every rank; or its error, on every rank."""
    failure: Exception | None = None
    result: Any = None
    if mesh.rank == 0:
        try:
            result = work()
        except (ShardlibError, OSError) as error:
            failure = error
        except Exception as error:  # of a file that says other things than its format does
            failure = CheckpointError(f"{folder} cannot be read as expected ({type(error).__name__}: {error})")
    (failure, result), *_ = gathered(mesh, (failure, result))
    if failure is not None:
        raise failure
    return result
