"""Parameters and train states filled from files of others, which name tensors as modules and torch's optimizers do.

A parameter's name is its path with dots. A tensor of an optimizer's state has the parameter's name and a kind, such as
``exp_avg``; see `_KINDS`.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from shardlib.checkpoint.common import common_leaves
from shardlib.checkpoint.dotted import check_ties, dotted, dotted_names
from shardlib.checkpoint.filling import check_intact, fill_state, run_fills
from shardlib.checkpoint.fills import Fill, joined
from shardlib.checkpoint.fragments import BUFFERS, MASTERS, PARAMS, Fragment, needed_fragments, needed_params
from shardlib.checkpoint.manifest import Manifest
from shardlib.checkpoint.packed import CheckpointTrees, fillable, outlined_params, with_numbers_of
from shardlib.checkpoint.reading import TensorsOnDisk
from shardlib.collectives import primitives
from shardlib.errors import CheckpointError, TreeError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.specs import Window
from shardlib.optim.train_state import TrainState
from shardlib.sharded.tree import Sharded
from shardlib.tree import globs_of, matches

Target = TypeVar("Target", Sharded, TrainState)

# What torch's optimizers call the trees of these fields; others, such as those of `from_torch`, have torch's names.
_KINDS = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer", "sum_of_squares": "sum"}
_COUNTERS = ("count", "step")
_NUMBERS = "numbers"  # the field of `shardlib.optim.wrappers.from_torch.TorchState` for others


class Imported(NamedTuple):
    """A checkpoint of another library.

    Attributes:
        folder: the folder of its files.
        held: its tensors.
        step: the steps taken; None if the files do not tell.
        numbers: kind -> a parameter's name -> the number that the optimizer keeps for it: as "step" the updates it has made,
            as "mu_product" NAdam's product.
        optimizer: what names of the optimizer's tensors begin with, before a parameter's path with dots.
        buffers: the names of tensors that are buffers, where the files tell.
    """

    folder: Path
    held: Manifest
    step: int | None
    numbers: Mapping[str, Mapping[str, float]]
    optimizer: str
    buffers: Sequence[str] = ()


def mesh_of(what: str, target: Any) -> Mesh:
    """The mesh of parameters or a state. Raises `TypeError` for anything else; ``what`` begins the message."""
    if isinstance(target, TrainState):
        return target.params.mesh
    return require_params(what, target, "or a state of make_train_step").mesh


def require_params(what: str, params: Any, other: str = "") -> Sharded:
    """``params``, if they are sharded parameters. Raises `TypeError` with a remedy, and what ``other`` may be given,
    otherwise; ``what`` begins the message."""
    if not isinstance(params, Sharded):
        remedy = f"give those that shard returned, or state.params{', ' if other else ''}{other}"
        raise TypeError(f"{what}: {type(params).__name__}, where sharded parameters are due; {remedy}")
    return params


def import_into(
    read: Imported, target: Target, prefix: str, partial: str | Sequence[str], step: int | None = None
) -> Target:
    """Fill parameters, or a state: parameters, buffers, the optimizer's trees and counters. On every rank.

    Args:
        prefix: what names of parameters begin with.
        partial: globs over the names of tensors that may be missing on either side.
        step: the state's; by default that of the files.

    Returns:
        The parameters, or a state at the step.
    """
    if isinstance(target, Sharded):
        with TensorsOnDisk(read.folder, read.held) as saved:  # parameters alone have no place for buffers
            fill_params(saved, target, prefix, [*globs_of(partial), *map(glob.escape, read.buffers)])
        return target
    return _import_state(read if step is None else read._replace(step=step), target, prefix, partial)


def _import_state(read: Imported, state: TrainState, prefix: str, partial: str | Sequence[str]) -> TrainState:
    parts = fillable(state)
    named = _named(read, parts, prefix)
    if read.step is None and any(not name.startswith((PARAMS, BUFFERS)) for name in named):
        raise CheckpointError(
            f"{read.folder} has an optimizer's state and does not tell how many steps it has taken (torch's SGD counts "
            "none), by which the next step goes, and schedules. Give their number: step="
        )
    values = {kind: _one(read, kind) for kind in read.numbers} | (
        {} if "step" in read.numbers else {"step": read.step or 0}
    )
    kinds = {name: kind for name, _ in common_leaves(parts) if (kind := _kind_of_number(name)) in values}
    numbers = {f"{read.optimizer}{of}.{kind}" for kind in kinds.values() for of in read.numbers.get(kind, ())}
    filled = {each for every in named.values() for each in every} | numbers
    others = {name: entry for name, entry in read.held.tensors.items() if name not in filled}
    renamed = {name: read.held.tensors[every[0]] for name, every in named.items()}
    held = replace(read.held, tensors=renamed | others)
    fragments = [fragment for fragment in needed_fragments(parts) if fragment.name in named]
    with TensorsOnDisk(read.folder, held) as saved, TensorsOnDisk(read.folder, read.held) as theirs:
        fill_state(
            saved,
            parts,
            [*globs_of(partial), *kinds],
            lambda: check_ties(theirs, parts.params.mesh, fragments, named),
        )
    for name, leaf in common_leaves(parts):
        if name in kinds:
            leaf.fill_(values[kinds[name]])
    opt, buffers = with_numbers_of(parts, state)
    return TrainState(read.step or 0, state.params, opt, state.comm, buffers, state.scale, state.rng).fitting()


def _kind_of_number(name: str) -> str:
    """What a parameter's number is called of which a tensor of a state has all parameters' one; "" for other tensors."""
    *_, tree, kind = name.split("/")
    if kind in _COUNTERS:
        return "step"
    return kind if tree == _NUMBERS else ""


def _one(read: Imported, kind: str) -> float:
    """The number that an optimizer keeps for every parameter. Raises `CheckpointError` if it is not the same for all."""
    values = read.numbers[kind]
    if len(set(values.values())) > 1:
        lines = [f"{name}: {value:g}" for name, value in sorted(values.items())]
        of = "have taken different numbers of steps" if kind == "step" else f"differ in {kind}"
        raise CheckpointError(
            f"{read.folder}: parameters {of}, of which an optimizer here has one:\n{listing(lines)}\nImport the parameters "
            "alone"
        )
    return next(iter(values.values()))


def _named(read: Imported, parts: CheckpointTrees, prefix: str) -> dict[str, list[str]]:
    """Name of a tensor of this rank's part of a state -> its names in a checkpoint: several of a tied parameter's."""
    found = {}
    known = dotted_names(parts.params.plan, prefix)
    names = [fragment.name for fragment in needed_fragments(parts)] + [name for name, _ in common_leaves(parts)]
    for name in dict.fromkeys(names):
        for every in _theirs(name, known, prefix, read.optimizer):
            if theirs := [each for each in every if each in read.held.tensors]:
                found[name] = theirs
    return found


def _theirs(name: str, known: Mapping[str, Sequence[str]], prefix: str, optimizer: str) -> Iterator[list[str]]:
    """What others may call a tensor of a state: names of the same tensor together."""
    if name.startswith(PARAMS):
        yield list(known[name.removeprefix(PARAMS)])
    elif name.startswith(BUFFERS):
        yield [prefix + dotted(name.removeprefix(BUFFERS))]
    elif not name.startswith(MASTERS):  # which are filled as the parameters are
        fields = name.split("/")
        for at in range(1, len(fields)):
            path, kind = "/".join(fields[at:]), _KINDS.get(fields[at - 1], fields[at - 1])
            if path in known:
                yield [f"{optimizer}{theirs.removeprefix(prefix)}.{kind}" for theirs in known[path]]


def fill_params(
    saved: TensorsOnDisk,
    params: Sharded,
    prefix: str,
    partial: Sequence[str],
    buffers: Mapping[str, torch.Tensor | None] | None = None,
) -> None:
    """Fill this rank's shards from saved tensors called ``prefix`` and a path with dots.

    Args:
        partial: globs over the names of tensors that may be missing on either side.
        buffers: name with dots -> a tensor, whole on every rank, that is filled too if the files have it.

    Raises:
        TreeError: names or shapes differ, or values for tied leaves; lists all of them, on all ranks. ``params`` are
            unchanged.
        CheckpointError: a rank cannot read the files; on all ranks.
    """
    mesh, buffers = params.mesh, dict(buffers or {})
    names = dotted_names(params.plan, prefix, buffers)
    source = {path: next((name for name in known if name in saved.tensors), known[0]) for path, known in names.items()}
    outlines, packed = outlined_params(params)
    fills = [
        Fill(fragment, ((source[fragment.name.removeprefix(PARAMS)], 1.0),)) for fragment in needed_params(outlines)
    ]
    fills += [
        Fill(_outline(name, buffer), ((name, 1.0),), buffer)
        for name, buffer in buffers.items()
        if buffer is not None and name in saved.tensors
    ]
    problems = {
        name: problem.replace(fragment.name, name)
        for fragment, ((name, _),), _ in fills
        if fragment.data.numel() and (problem := saved.missing(fragment, name))
    }
    known = {*buffers, *(name for each in names.values() for name in each)}
    problems |= {name: f"{name}: in the files, not in the parameters" for name in saved.names if name not in known}
    gathered = primitives.all_gather_object(mesh, list(mesh.shape), problems)
    lines = {name: line for each in gathered for name, line in each.items() if not matches(name, partial)}
    if lines:
        raise TreeError(
            f"{saved.folder} does not fit these parameters:\n{listing([lines[name] for name in sorted(lines)])}\n"
            "Give the parameters of the same model, or name in partial= what may be missing."
        )
    check_intact(saved, mesh)
    check_ties(saved, mesh, needed_params(outlines), {PARAMS + path: every for path, every in names.items()})

    def fill() -> None:
        for each in joined((fill for fill in fills if saved.has(fill.fragment, fill.sources[0][0])), packed):
            each.run(saved)

    with torch.no_grad():
        run_fills(saved, mesh, fill)


def _outline(name: str, buffer: torch.Tensor) -> Fragment:
    """A whole tensor as a fragment without memory."""
    shape = tuple(buffer.shape)
    return Fragment(name, 0, torch.empty(buffer.numel(), dtype=buffer.dtype, device="meta"), Window.whole(shape))
