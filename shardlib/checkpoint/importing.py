"""Parameters and train states filled from files of others, which name tensors as modules and torch's optimizers do.

A parameter's name is its path with dots. A tensor of an optimizer's state has the parameter's name and a kind, such as
``exp_avg``; see `_KINDS`.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from shardlib.checkpoint.agreement import gathered, read_on_all_ranks
from shardlib.checkpoint.fragments import (
    BUFFERS,
    MASTERS,
    PARAMS,
    Fragment,
    needed_fragments,
    sharded_fragments,
    whole,
    without_memory,
)
from shardlib.checkpoint.manifest import Manifest
from shardlib.checkpoint.reading import BUFFER, Fill, TensorsOnDisk, joined
from shardlib.checkpoint.replicated import replicated_leaves
from shardlib.checkpoint.restore import check_intact, fill_state, run_fills
from shardlib.checkpoint.trees import CheckpointTrees, fillable, params_of, with_numbers
from shardlib.errors import CheckpointError, TreeError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.optim.train_state import TrainState
from shardlib.plan.plan import Plan
from shardlib.sharded.tree import Sharded
from shardlib.tree import globs_of, matches

Target = TypeVar("Target", Sharded, TrainState)

# What torch's optimizers call the trees of these fields; others, such as those of `from_torch`, have torch's names.
_KINDS = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer", "sum_of_squares": "sum"}
_COUNTERS = ("count", "step")
_NUMBERS = "numbers"  # the field of `shardlib.optim.wrappers.from_torch.TorchState` for others


def dotted(path: str) -> str:
    """A parameter's path as its module names it."""
    return path.replace("/", ".")


def dotted_names(plan: Plan, prefix: str = "", buffers: Iterable[str] = ()) -> dict[str, list[str]]:
    """Path -> the names of each parameter, of other stages too: all of its names for a tied one. Raises `TreeError` if
    leaves, or ``buffers`` in the same files, have one name.

    Args:
        prefix: what names begin with.
    """
    paths = {placement.path: [placement.path, *placement.aliases] for placement in plan.everywhere.placements}
    check_apart([path for every in paths.values() for path in every], [name.removeprefix(prefix) for name in buffers])
    return {path: [prefix + dotted(each) for each in every] for path, every in paths.items()}


def check_apart(paths: Iterable[str], buffers: Iterable[str] = ()) -> None:
    """Refuse parameters, and buffers, that have one name in files of others."""
    leaves: dict[str, list[str]] = {}
    for path in paths:
        leaves.setdefault(dotted(path), []).append(repr(path))
    for name in buffers:
        leaves.setdefault(name, []).append(f"the buffer {name!r}")
    if shared := [f"{name}: {' and '.join(every)}" for name, every in leaves.items() if len(every) > 1]:
        raise TreeError(f"with dots for slashes these have one name:\n{listing(shared)}\nRename all but one of each")


def check_ties(
    saved: TensorsOnDisk, mesh: Mesh, fragments: Iterable[Fragment], names: Mapping[str, Sequence[str]]
) -> None:
    """Refuse files that have other values for some names of a tied leaf than for others. Collective; raises `TreeError`, or
    `CheckpointError` if a rank cannot read the files, on all ranks.

    Args:
        fragments: the elements that this rank holds; of a tied leaf they are read under each of its names.
        names: a fragment's name -> the names in the files of what may fill it.
    """

    def look() -> list[str]:
        return list(dict.fromkeys(line for each in fragments for line in _differing(saved, each, names[each.name])))

    problem, remedy = f"{saved.folder} could not be read to its end", "What was to be filled is unchanged."
    if lines := {line for each in read_on_all_ranks(mesh, look, problem, remedy) for line in each}:
        raise TreeError(
            f"{saved.folder} has different values for leaves that are tied here, and are one parameter:\n"
            f"{listing(sorted(lines))}\nMake them equal in the files, or shard a tensor for each."
        )


def _differing(saved: TensorsOnDisk, fragment: Fragment, names: Sequence[str]) -> Iterator[str]:
    """One line for each name whose elements of a fragment are others than those of the first name."""
    first, *others = [name for name in names if name in saved.tensors] or [""]
    if not others or not saved.has(fragment, first):
        return
    for other in others:
        one, two = saved.tensors[first], saved.tensors[other]
        if one.shape != two.shape:
            yield f"{first} and {other} (shapes {list(one.shape)} and {list(two.shape)})"
        elif one != two and not all(
            _same(_read(saved, part, first), _read(saved, part, other))
            for part in fragment.parts(max(1, BUFFER() // 32))
        ):
            yield f"{first} and {other}"


def _read(saved: TensorsOnDisk, fragment: Fragment, name: str) -> torch.Tensor:
    """The elements of a fragment in the widest dtype of their kind."""
    held = torch.zeros(fragment.data.numel(), dtype=saved.tensors[name].torch_dtype)
    saved.fill(fragment._replace(data=held), name)
    if held.is_complex():
        return held.to(torch.complex128)
    return held.double() if held.is_floating_point() else held.long()


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and torch.allclose(one, two, rtol=0, atol=0, equal_nan=True)


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
    return require_params(what, target, ", or a state of make_train_step").mesh


def require_params(what: str, params: Any, other: str = "") -> Sharded:
    """``params``, if they are sharded. Raises `TypeError` otherwise; ``other`` is what else may be given."""
    if not isinstance(params, Sharded):
        kind = type(params).__name__
        raise TypeError(
            f"{what}: {kind}, where sharded parameters are due; give those of shard, or state.params{other}"
        )
    return params


def import_into(
    read: Imported, target: Target, prefix: str, partial: str | Sequence[str], step: int | None = None
) -> Target:
    """Fill parameters, or a state: parameters, buffers, the optimizer's trees and counters. On every rank.

    Args:
        prefix: what names of parameters begin with.
        partial: globs over the names of tensors that may be missing on either side.
        step: the state's; by default that of the files.
    """
    if isinstance(target, Sharded):
        with TensorsOnDisk(read.folder, read.held) as saved:  # parameters alone have no place for buffers
            fill_params(saved, target, prefix, [*globs_of(partial), *map(glob.escape, read.buffers)])
        return target
    return _import_state(read if step is None else read._replace(step=step), target, prefix, partial)


def _import_state(read: Imported, state: TrainState, prefix: str, partial: str | Sequence[str]) -> TrainState:
    trees = fillable(state)
    named = _named(read, trees, prefix)
    if read.step is None and any(not name.startswith((PARAMS, BUFFERS)) for name in named):
        raise CheckpointError(
            f"{read.folder} has an optimizer's state and does not tell how many steps it has taken (torch's SGD counts "
            "none). Give their number: step="
        )
    values = {"step": float(read.step or 0)} | {kind: _one(read, kind) for kind in read.numbers}
    kinds = {name: kind for name, _ in replicated_leaves(trees) if (kind := _kind_of_number(name)) in values}
    numbers = {f"{read.optimizer}{of}.{kind}" for kind in kinds.values() for of in read.numbers.get(kind, ())}
    taken = {each for every in named.values() for each in every} | numbers
    others = {name: entry for name, entry in read.held.tensors.items() if name not in taken}
    renamed = {name: read.held.tensors[every[0]] for name, every in named.items()}
    held = replace(read.held, tensors=renamed | others)
    fragments = [fragment for fragment in needed_fragments(trees) if fragment.name in named]
    with TensorsOnDisk(read.folder, held) as saved, TensorsOnDisk(read.folder, read.held) as theirs:
        check = lambda: check_ties(theirs, trees.params.mesh, fragments, named)  # noqa: E731
        fill_state(saved, trees, [*globs_of(partial), *kinds], check)
    for name, leaf in replicated_leaves(trees):
        if name in kinds:
            leaf.fill_(values[kinds[name]])
    opt, buffers = with_numbers(trees, state)
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
            f"{read.folder}: parameters {of}, of which an optimizer here has one:\n{listing(lines)}\nImport parameters alone"
        )
    return next(iter(values.values()))


def _named(read: Imported, trees: CheckpointTrees, prefix: str) -> dict[str, list[str]]:
    """Name of a tensor of this rank's part of a state -> its names in a checkpoint: several of a tied parameter's."""
    found = {}
    known = dotted_names(trees.params.plan, prefix)
    names = [fragment.name for fragment in needed_fragments(trees)] + [name for name, _ in replicated_leaves(trees)]
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
    source = {
        PARAMS + path: next((name for name in known if name in saved.tensors), known[0])
        for path, known in names.items()
    }
    outlines, packed = params_of(params)
    fills = [Fill(fragment, ((source[fragment.name], 1.0),)) for fragment in sharded_fragments(outlines)]
    fills += [
        Fill(without_memory(name, buffer), ((name, 1.0),), buffer)
        for name, buffer in buffers.items()
        if buffer is not None and name in saved.tensors
    ]
    problems = {
        name: problem.replace(fragment.name, name)
        for fragment, ((name, _),), _ in fills
        if fragment.data.numel() and (problem := saved.missing(fragment, name))
    }
    known = {*buffers, *(name for each in names.values() for name in each)}
    problems |= {name: f"{name}: in the files, not in the parameters" for name in saved.tensors if name not in known}
    found = {name: line for each in gathered(mesh, problems) for name, line in each.items()}
    if lines := [found[name] for name in sorted(found) if not matches(name, partial)]:
        raise TreeError(
            f"{saved.folder} does not fit these parameters:\n{listing(lines)}\nGive those of the same model, or name in "
            "partial= what may be missing."
        )
    check_intact(saved, mesh)
    check_ties(saved, mesh, sharded_fragments(outlines), {PARAMS + path: every for path, every in names.items()})
    run_fills(saved, mesh, [*joined((fill for fill in fills if saved.has(fill.fragment, fill.sources[0][0])), packed)])


def fill_encoded(
    saved: TensorsOnDisk, params: Sharded, sources: Mapping[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]]
) -> None:
    """Fill this rank's shards of leaves that hold tensors of files otherwise. Each rank reads one whole tensor at a time.

    Args:
        sources: name with dots -> the tensor in the files, and what makes the leaf of it.
    """
    shards: dict[str, list[Fragment]] = {}
    for fragment in sharded_fragments(params):
        shards.setdefault(dotted(fragment.name.removeprefix(PARAMS)), []).append(fragment)

    def fill() -> None:
        for name, (origin, encode) in sources.items():
            if not any(fragment.data.numel() for fragment in shards.get(name, ())):
                continue
            entry = saved.tensors[origin]
            weight = torch.empty(entry.shape, dtype=entry.torch_dtype)
            saved.fill(whole(weight, origin), origin)
            made = encode(weight)
            for fragment in shards[name]:
                for box, elements in fragment.boxes():
                    elements.copy_(box.of(made).reshape(-1))

    with torch.no_grad():
        read_on_all_ranks(
            params.mesh, fill, f"{saved.folder} could not be read to its end", "What was being filled is unusable."
        )
