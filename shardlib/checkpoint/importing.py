"""Parameters filled from files with the names of modules: paths with dots."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardlib.checkpoint.fragments import PARAMS, needed_params
from shardlib.checkpoint.reading import Saved
from shardlib.collectives import primitives
from shardlib.errors import TreeError, listing
from shardlib.sharded.tree import Sharded
from shardlib.tree import matches


def dotted(path: str) -> str:
    """A parameter's path as its module names it."""
    return path.replace("/", ".")


def fill_params(saved: Saved, params: Sharded, prefix: str, partial: Sequence[str]) -> None:
    """Fill this rank's shards from saved tensors called ``prefix`` and a path with dots.

    Args:
        partial: globs over the names of tensors that may be missing on either side.

    Raises:
        TreeError: names or shapes differ; lists all of them, on all ranks. ``params`` are unchanged.
    """
    mesh = params.mesh
    names = {
        placement.path: [prefix + dotted(path) for path in (placement.path, *placement.aliases)]
        for placement in params.plan.everywhere.placements
    }
    source = {path: next((name for name in known if name in saved.tensors), known[0]) for path, known in names.items()}
    fragments = [(fragment, source[fragment.name.removeprefix(PARAMS)]) for fragment in needed_params(params)]
    problems = {
        name: problem.replace(fragment.name, name)
        for fragment, name in fragments
        if fragment.data.numel() and (problem := saved.missing(fragment, name))
    }
    known = {name for each in names.values() for name in each}
    problems |= {name: f"{name}: in the files, not in the parameters" for name in saved.names if name not in known}
    gathered = primitives.all_gather_object(mesh, list(mesh.shape), problems)
    lines = {name: line for each in gathered for name, line in each.items() if not matches(name, partial)}
    if lines:
        raise TreeError(
            f"{saved.folder} does not fit these parameters:\n{listing([lines[name] for name in sorted(lines)])}\n"
            "Give the parameters of the same model, or name in partial= what may be missing."
        )
    with torch.no_grad():
        for fragment, name in fragments:
            if name in saved.tensors:
                saved.fill(fragment, name)
