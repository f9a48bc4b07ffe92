"""Work of all ranks that fails on all of them or on none, so that no rank waits for one that has raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from shardlib.collectives import primitives
from shardlib.errors import RankFailure, listing
from shardlib.mesh.mesh import Mesh

_T = TypeVar("_T")


def attempted(mesh: Mesh, work: Callable[[], _T]) -> tuple[Exception | None, list[tuple[int, str]], list[_T]]:
    """This rank's error, the ranks that failed with their errors as text, and all ranks' results."""
    failure: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:
        failure = error
    problem = f"{type(failure).__name__}: {failure}" if failure else ""
    reports = primitives.all_gather_object(mesh, list(mesh.shape), (mesh.rank, problem, result))
    return failure, [(rank, text) for rank, text, _ in reports if text], [each for *_, each in reports]


def on_all_ranks(mesh: Mesh, work: Callable[[], _T], problem: str) -> list[_T]:
    """Run ``work`` on every rank; returns all ranks' results.

    Raises:
        RankFailure: it failed on other ranks: the ``problem``, and their errors. Where it failed, its own error is raised.
    """
    failure, problems, results = attempted(mesh, work)
    if problems:
        raise error_of(failure, problems, problem)
    return results


def error_of(failure: Exception | None, problems: list[tuple[int, str]], problem: str) -> Exception:
    """This rank's error after an attempt that has failed: its own one, or a `RankFailure` with the others'."""
    lines = [f"rank {rank}: {text}" for rank, text in problems]
    return failure or RankFailure(f"{problem}:\n{listing(lines)}\nThe output of these ranks has the tracebacks.")
