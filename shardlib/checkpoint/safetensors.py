"""Parameters in files of the safetensors format, in the layout and with the names of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardlib.checkpoint.agreement import from_first_rank, on_all_ranks
from shardlib.checkpoint.fragments import BUFFERS, PARAMS, Fragment, sharded_fragments, source_of, whole
from shardlib.checkpoint.importing import check_apart, dotted, dotted_names, fill_params, require_params
from shardlib.checkpoint.reading import BUFFER, TensorsOnDisk, open_checkpoint
from shardlib.checkpoint.safetensors_files import SHARD, begin, finish, laid_out, opened, write
from shardlib.errors import CheckpointError, TreeError, listing
from shardlib.mesh.specs import Window
from shardlib.models.huggingface.conversion import Described, Origin, OriginTensor, of_files
from shardlib.sharded.tree import Sharded


def export_safetensors(
    folder: str | Path,
    params: Sharded,
    *,
    module: Any = None,
    max_shard_size: int = SHARD,
    buffers: Mapping[str, torch.Tensor | None] | None = None,
) -> None:
    """Write parameters as transformers' ``save_pretrained`` does: ``model.safetensors``, or several files and an index. Every
    rank must call it.

    Each rank writes what it holds; none gathers anything. Names are paths with dots (``model.layers.0.mlp.up_proj.weight``),
    so that parameters of `from_module` have the module's names; a tied parameter has all of its names. With ``module`` names
    and layout are those that transformers gives the model's files: Mixtral's have a tensor for each matrix of each expert.
    Write the configuration beside it with ``model.config.save_pretrained(folder)`` on one rank, and
    ``from_pretrained(folder)`` loads the model.

    Args:
        folder: a folder that all ranks see; made if it is not there. Files of these names in it are replaced.
        module: the model of transformers that `from_module` was given, on any device; its values are not read.
        max_shard_size: bytes of a file at most; a larger tensor has a file of its own.
        buffers: further tensors, equal on all ranks, such as a module's buffers; with ``module`` those of its state dict are
            written.

    Raises:
        TreeError: ``params`` are gradients, or are not those of ``module``; leaves have one name with dots; buffers in its
            state dict are not given; transformers changes tensors in its files in another way than by joining and cutting
            them.
        TypeError: ``params`` are not sharded.

    >>> params = sl.shard({"layer": {"weight": torch.ones(2, 3)}}, sl.make_mesh())
    >>> sl.checkpoint.export_safetensors("model", params)
    >>> sorted(sl.checkpoint.import_safetensors("model", params)["layer"])
    ['weight']
    """
    if require_params("export_safetensors", params).role != "param":
        raise TreeError("export_safetensors: these are gradients, not parameters; give state.params")
    folder, mesh = Path(folder), params.mesh
    extra = {name: leaf for name, leaf in (buffers or {}).items() if leaf is not None}
    if module is not None:
        extra = {name: leaf for name, leaf in extra.items() if name in module.state_dict()}
    names = dotted_names(params.plan, buffers=extra)
    leaves = {
        name: (placement.param.dtype, placement.param.shape)
        for placement in params.plan.everywhere.placements  # of other stages too
        for name in names[placement.path]
    } | {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in extra.items()}
    made = _unchanged(leaves) if module is None else of_files(module, leaves)
    tensors = laid_out({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in made.items()}, max_shard_size)

    def fragments() -> Iterator[Fragment]:
        for fragment in sharded_fragments(params, owned=True):
            for name in names[fragment.name.removeprefix(PARAMS)]:
                yield fragment._replace(name=name)
        if mesh.rank == 0:
            yield from (whole(leaf, name) for name, leaf in extra.items())

    on_all_ranks(mesh, lambda: begin(folder, tensors) if mesh.rank == 0 else None)
    on_all_ranks(mesh, lambda: write(folder, tensors, fragments(), _origins(made)))
    on_all_ranks(mesh, lambda: finish(folder, tensors) if mesh.rank == 0 else None)


def import_safetensors(
    folder: str | Path,
    params: Sharded,
    *,
    module: Any = None,
    buffers: Mapping[str, torch.Tensor | None] | None = None,
    partial: Sequence[str] = (),
) -> Sharded:
    """Fill parameters from the safetensors files of a folder (``model.safetensors``, or those of an index), or from one file.
    Every rank must call it, and reads the bytes of its shards only.

    Args:
        params: the layout; its memory is reused, and its dtypes are kept.
        module: the model of transformers that `from_module` was given, on any device, for files with the names and layout
            that transformers gives them (`from_pretrained` builds the model as well); by default names are paths with dots.
        buffers: name -> a module's buffer, of which those in the files are filled too, in place, on every rank.
        partial: globs over names (with dots) that may be missing in the files or in ``params``, or have other shapes.
            Parameters that the files lack keep their values.

    Returns:
        ``params``.

    Raises:
        FileNotFoundError: there are no such files.
        CheckpointError: a file is not of the format, or cut.
        TreeError: names or shapes differ, or the values for leaves that are tied; lists all of them. ``params`` are
            unchanged.
        TypeError: ``params`` are not sharded.

    >>> params = sl.shard({"layer": {"weight": torch.ones(2, 3)}}, sl.make_mesh())
    >>> sl.checkpoint.export_safetensors("model", params)
    >>> empty = sl.shard({"layer": {"weight": torch.zeros(2, 3)}}, sl.make_mesh())
    >>> sl.checkpoint.import_safetensors("model", empty)["layer"]["weight"].sum()
    tensor(6.)
    """
    mesh = require_params("import_safetensors", params).mesh
    with TensorsOnDisk(*from_first_rank(mesh, lambda: opened(Path(folder), module), folder)) as saved:
        fill_params(saved, params, "", partial, buffers or {})
    return params


def _unchanged(leaves: Described) -> dict[str, OriginTensor]:
    """The tensors of files that have the leaves as they are."""
    return {name: OriginTensor.whole(name, *described) for name, described in leaves.items()}


def _origins(made: Mapping[str, OriginTensor]) -> dict[str, list[Origin]]:
    """A leaf's name -> its boxes, and the boxes of the files' tensors that hold them."""
    held: dict[str, list[Origin]] = {}
    for name, tensor in made.items():
        for origin in tensor.origins:
            held.setdefault(origin.name, []).append(origin.inverse(name))
    return held


def convert(checkpoint: Path, folder: Path, prefix: str = "", dtype: torch.dtype | None = None) -> list[str]:
    """Write the parameters of a checkpoint on the disk as `export_safetensors` does, without a model, a part at a time.

    Every byte of the parameters is verified first. Another dtype than a parameter's own is rounded from its fp32 master, if
    there is one.

    Args:
        prefix: what names in the files begin with, before the parameter's path with dots.
        dtype: of floating-point parameters; by default each one's own.

    Returns:
        The names of the model's buffers in the checkpoint, which are no parameters and not written.

    Raises:
        CheckpointError: the checkpoint is damaged.
        TreeError: parameters have one name with dots.
    """
    with open_checkpoint(checkpoint) as opened_whole:
        every = opened_whole.tensors
    names = [name for name in every if name.startswith(PARAMS)]
    check_apart(name.removeprefix(PARAMS) for name in names)
    described, source = {}, {}
    for name in names:
        theirs, own = prefix + dotted(name.removeprefix(PARAMS)), every[name].torch_dtype
        kind = dtype if dtype is not None and own.is_floating_point else own
        source[theirs] = name if kind == own else source_of(name, every)
        described[theirs] = (kind, every[name].shape)
    places = laid_out(described)
    held = replace(opened_whole.manifest, tensors={name: every[name] for name in source.values()})

    def fragments() -> Iterator[Fragment]:
        for theirs, name in source.items():
            shape, kind = held.tensors[name].shape, held.tensors[name].torch_dtype
            outline = Fragment(theirs, 0, torch.empty(shape, device="meta").view(-1), Window.whole(shape))
            for part in outline.parts(BUFFER() // kind.itemsize):
                part = part._replace(data=torch.empty(part.data.numel(), dtype=kind))
                saved.fill(part, name)
                yield part._replace(data=part.data.to(places[theirs].dtype))

    with TensorsOnDisk(checkpoint, held) as saved:
        if damages := saved.damages():
            raise CheckpointError(f"{checkpoint} is damaged:\n{listing(damages)}\nExport an older checkpoint")
        begin(folder, places)
        write(folder, places, fragments(), _origins(_unchanged(described)))
    finish(folder, places)
    return [name for name in every if name.startswith(BUFFERS)]
