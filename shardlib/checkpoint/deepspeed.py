"""Parameters and train states from checkpoints of DeepSpeed's ZeRO stages 1 to 3.

Each rank of DeepSpeed wrote a file with its part of the fp32 masters and of the optimizer's moments, flat:

- Stages 1 and 2: the parameters of a group one after the other, padded, and cut into equal parts.
- Stage 3: each parameter padded and cut into equal parts; a rank's parts one after the other, in one or several tensors.

Parameters that were not trained, and buffers, lie in files of the model. All files are pickles with classes of DeepSpeed,
none of which is made here: only the places of tensors are read, and then the bytes that a rank needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from shardlib.checkpoint.agreement import from_first_rank
from shardlib.checkpoint.archives import Stored, load, number
from shardlib.checkpoint.fragments import boxes
from shardlib.checkpoint.importing import Imported, Target, import_into, mesh_of
from shardlib.checkpoint.manifest import Chunk, Entry, Manifest
from shardlib.common.tensors import dtype_name
from shardlib.errors import CheckpointError, listing
from shardlib.mesh.specs import Window
from shardlib.optim.train_state import TrainState
from shardlib.tree import globs_of

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_ONE_MODEL, _MODELS = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"
_STATE = "state."  # what names of the optimizer's tensors begin with, after `import_deepspeed`'s own prefix


def import_deepspeed(
    folder: str | Path,
    into: Target,
    *,
    tag: str | None = None,
    prefix: str = "",
    partial: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> Target:
    """Fill parameters, or a train state, from a checkpoint of DeepSpeed's ZeRO stage 1, 2 or 3. Every rank must call it, and
    reads the bytes of its shards only. DeepSpeed need not be installed, and no code of the checkpoint is run.

    Parameters take the fp32 masters' values. A state's moments are filled where they are Adam's, Adagrad's, Lion's or SGD's,
    or in the layout of a torch optimizer (`shardlib.optim.from_torch`). Residuals start from zero, and loss scales and
    schedules of DeepSpeed's are not taken over.

    Args:
        folder: the folder that ``save_checkpoint`` was given.
        into: the layout: `Sharded` parameters, or a fresh state of `make_train_step`, whose memory is reused.
        tag: the checkpoint's; by default the one that the file ``latest`` names.
        prefix: what DeepSpeed's names of parameters begin with beyond the paths of ``into``.
        partial: globs over names that may be missing on either side, with dots for parameters alone
            (``"rotary.*"``), as listed by the error otherwise.
        left_out: globs over full names of further classes in the files (``"argparse.Namespace"``) that are not looked at,
            such as those of a ``client_state``.

    Returns:
        The parameters, or a state at DeepSpeed's ``global_steps``.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointError: files are missing, cut or of model- or expert-parallel ranks, or name further classes; lists them.
        TreeError: names or shapes differ, or the values for leaves that are tied; lists all of them. ``into`` is unchanged.
        TypeError: ``into`` is neither.

    >>> params = sl.shard({"layer": {"weight": torch.ones(2, 3)}}, sl.make_mesh())
    >>> sl.checkpoint.import_deepspeed("nothing-there", params)
    Traceback (most recent call last):
        ...
    FileNotFoundError: nothing-there has no file 'latest'; give save_checkpoint's folder, or a tag
    """
    mesh = mesh_of("import_deepspeed", into)
    read, moments = from_first_rank(mesh, lambda: _read(Path(folder), tag, left_out, _STATE + prefix), folder)
    if isinstance(into, TrainState):
        read = read._replace(held=replace(read.held, tensors=moments | read.held.tensors))
    return import_into(read, into, prefix, partial)


def _read(folder: Path, tag: str | None, left_out: Sequence[str], optimizer: str) -> tuple[Imported, dict[str, Entry]]:
    """The parameters and buffers of a checkpoint, and the tensors of its optimizer."""
    if tag is None:
        if not (folder / "latest").is_file():
            raise FileNotFoundError(f"{folder} has no file 'latest'; give save_checkpoint's folder, or a tag")
        tag = (folder / "latest").read_text().strip()
    at = folder / tag
    ranks, models = _files(at)
    left_out = ("deepspeed.*", *globs_of(left_out))
    loaded = [load(at / file, left_out)["optimizer_state_dict"] for file in ranks]
    described = [load(at / file, left_out) for file in models]
    counts = loaded[0]["partition_count"]
    ways = max(counts) if isinstance(counts, list) else counts
    if ways != len(ranks):
        raise CheckpointError(f"{at} was written by {ways} ranks, and has files of {len(ranks)}: {', '.join(ranks)}")
    split = _split_alone if "fp32_flat_groups" in loaded[0] else _cut_together
    tensors, moments, numbers = _trained(split(loaded, described[0]["param_shapes"]))
    tensors |= _untrained(described, set(tensors))
    for alias, name in described[0]["shared_params"].items():
        tensors |= {alias: tensors[name]} if name in tensors else {}
    sizes = {file: (at / file).stat().st_size for file in (*ranks, *models)}
    held = Manifest(step=0, seed=0, scale=None, mesh={}, tensors=tensors, files=sizes)
    of_kind = {kind: {name: number(at, value) for name, value in of.items()} for kind, of in numbers.items()}
    buffers = tuple(described[0].get("buffer_names") or ())
    return Imported(at, held, described[0]["global_steps"], of_kind, optimizer, buffers), moments


def _files(at: Path) -> tuple[list[str], list[str]]:
    """The names of the files of optimizers, in the order of their ranks, and of models."""
    names = [path.name for path in at.iterdir()] if at.is_dir() else []
    found = {int(match[1]): match for match in map(_OPTIMIZER.fullmatch, names) if match}
    if not found:
        raise FileNotFoundError(f"{at} holds no checkpoint of DeepSpeed's ZeRO stages: no *_optim_states.pt")
    wrong = sorted(name for name in names if name.startswith(("layer_", "expert_")) or "_mp_rank_01_" in name)
    if wrong:
        raise CheckpointError(f"{at} is of ranks of slices, stages or experts, which are not read:\n{listing(wrong)}")
    lacking = [f"rank {rank}" for rank in range(max(found) + 1) if rank not in found]
    models = [_ONE_MODEL] if _ONE_MODEL in names else [_MODELS.format(rank) for rank in sorted(found)]
    lacking += [model for model in models if model not in names]
    if lacking:
        raise CheckpointError(f"{at} lacks files:\n{listing(lacking)}")
    return [found[rank].string for rank in sorted(found)], models


class _Run(NamedTuple):
    """Elements ``start`` to ``stop`` of a flattened parameter, and where the first of them lies in a flat tensor."""

    start: int
    stop: int
    held: Stored
    at: int


class _Param(NamedTuple):
    """A trained parameter: its runs by kind ("" for the master), and the numbers that its optimizer keeps by kind."""

    name: str
    shape: tuple[int, ...]
    runs: dict[str, list[_Run]]
    numbers: Mapping[str, Any]


def _cut_together(ranks: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Any]]) -> Iterator[_Param]:
    """The parameters of stages 1 and 2."""
    for group, described in enumerate(shapes):
        parts = [rank["single_partition_of_fp32_groups"][group] for rank in ranks]
        kinds = [_kinds(rank["base_optimizer_state"], group, part) for rank, part in zip(ranks, parts, strict=True)]
        paddings = ranks[0].get("param_alignment_paddings")
        # Of all parts but the last, none of the elements are padding.
        width, first = parts[0].numel, 0
        for index, (name, shape) in enumerate(described.items()):
            stop = first + math.prod(shape)
            runs: dict[str, list[_Run]] = {kind: [] for kind in kinds[0].tensors}
            for rank, each in enumerate(kinds):
                low, high = max(first, rank * width), min(stop, (rank + 1) * width)
                for kind in runs if low < high else ():
                    runs[kind].append(_Run(low - first, high - first, each.tensors[kind], low - rank * width))
            yield _Param(name, tuple(shape), runs, kinds[0].numbers)
            first = stop + (paddings[group][index] if paddings else 0)


def _split_alone(ranks: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Any]]) -> Iterator[_Param]:
    """The parameters of stage 3."""
    every = [
        [_kinds(rank["optimizer_state_dict"], number, flat) for number, flat in enumerate(rank["fp32_flat_groups"])]
        for rank in ranks
    ]
    first = 0
    for name, shape in ((name, shape) for described in shapes for name, shape in described.items()):
        numel = math.prod(shape)
        width = -(-numel // len(ranks))
        runs: dict[str, list[_Run]] = {kind: [] for kind in every[0][0].tensors}
        numbers = every[0][0].numbers
        for rank, flats in enumerate(every):
            begin = 0  # of a flat tensor among the rank's
            for each in flats:
                size = each.tensors[""].numel
                low, high = max(first, begin), min(first + width, begin + size)
                start, stop = rank * width + low - first, min(rank * width + high - first, numel)
                if low < high and start < stop:
                    numbers = each.numbers
                    for kind in runs:
                        runs[kind].append(_Run(start, stop, each.tensors[kind], low - begin))
                begin += size
        yield _Param(name, tuple(shape), runs, numbers)
        first += width


class _Kinds(NamedTuple):
    """The flat tensors of a group on one rank, by kind ("" for the masters), and its numbers."""

    tensors: dict[str, Stored]
    numbers: dict[str, Any]


def _kinds(optimizer: Any, group: int, masters: Stored) -> _Kinds:
    """What an optimizer's state dict holds of a group."""
    states = optimizer["state"] if isinstance(optimizer, dict) else optimizer
    held = states.get(group, {}) if isinstance(states, dict) else states[group]
    tensors = {kind: value for kind, value in held.items() if isinstance(value, Stored) and value.shape}
    other = [kind for kind, value in tensors.items() if len(value.shape) != 1 or value.numel < masters.numel]
    if other:
        raise CheckpointError(
            f"the optimizer's state of group {group} has tensors in other layouts than its parameters':\n{listing(other)}\n"
            "Import the parameters alone"
        )
    groups = optimizer.get("param_groups", ()) if isinstance(optimizer, dict) else ()
    numbers = {
        kind: value for kind, value in held.items() if isinstance(value, Stored | int | float) and kind not in tensors
    }
    if group < len(groups) and groups[group].get("step") is not None:
        numbers.setdefault("step", groups[group]["step"])
    return _Kinds({"": masters, **tensors}, numbers)


def _trained(params: Iterator[_Param]) -> tuple[dict[str, Entry], dict[str, Entry], dict[str, dict[str, Any]]]:
    """The trained parameters, the tensors of their optimizer, and its numbers by kind and parameter."""
    masters: dict[str, Entry] = {}
    moments: dict[str, Entry] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for param in params:
        for kind, runs in param.runs.items():
            if not runs:
                continue  # a parameter without elements
            if kind:
                moments[f"{_STATE}{param.name}.{kind}"] = _entry(param.shape, runs)
            else:
                masters[param.name] = _entry(param.shape, runs)
        for kind, value in param.numbers.items():
            numbers.setdefault(kind, {})[param.name] = value
    return masters, moments, numbers


def _untrained(models: Sequence[Mapping[str, Any]], known: set[str]) -> dict[str, Entry]:
    """Parameters that were not trained, and buffers."""
    tensors = {}
    first = models[0]
    for name, held in first["module"].items():
        if isinstance(held, Stored) and held.numel and name not in known:
            tensors[name] = _entry(held.shape, [_Run(0, held.numel, held, 0)])
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name] for model in models]
        numel, width = math.prod(shape), parts[0].numel
        runs = [_Run(rank * width, min((rank + 1) * width, numel), part, 0) for rank, part in enumerate(parts)]
        if held := [run for run in runs if run.start < run.stop]:
            tensors[name] = _entry(tuple(shape), held)
    return tensors


def _entry(shape: tuple[int, ...], runs: Sequence[_Run]) -> Entry:
    """A tensor whose flattened elements lie in runs."""
    entry = Entry(dtype_name(runs[0].held.dtype), shape)
    for run in runs:
        if not run.held.contiguous:
            raise CheckpointError(f"{run.held.file}: a tensor of {list(shape)} is saved as a strided view; save a copy")
        size = run.held.dtype.itemsize
        at = run.held.data + run.at * size
        for box in boxes(Window.whole(shape), run.start, run.stop):
            length = box.numel * size
            entry.chunks.append(Chunk(run.held.file, at, length, at, None, box.first, box.sizes))
            at += length
    return entry
