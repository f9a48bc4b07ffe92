"""Models of transformers from a folder of files, sharded while they are read, and written as such."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial as bound
from pathlib import Path
from typing import Any

import torch

from shardlib.checkpoint.agreement import from_first_rank, on_all_ranks
from shardlib.checkpoint.importing import fill_encoded, fill_params
from shardlib.checkpoint.manifest import Entry
from shardlib.checkpoint.reading import TensorsOnDisk
from shardlib.checkpoint.safetensors import export_safetensors
from shardlib.checkpoint.safetensors_files import opened
from shardlib.common._compat import own_buffers
from shardlib.common.optional import require
from shardlib.errors import TreeError
from shardlib.mesh.mesh import Mesh
from shardlib.models.copying import meta_copy
from shardlib.models.from_module import from_module, initialise
from shardlib.models.huggingface.conversion import not_in_files
from shardlib.models.lineage import NO_VALUES, Lineage, tensors_of
from shardlib.models.meta import reset_buffers
from shardlib.models.quantized_linears import quantized_leaves
from shardlib.plan.transform import Transform, chain
from shardlib.rng import Key
from shardlib.sharded.given import sharded_params
from shardlib.sharded.shard import shard_by
from shardlib.sharded.unshard import stream_weights
from shardlib.sharding import default_transform, mesh_of_ranks
from shardlib.transforms.freeze import freeze
from shardlib.tree import globs_of, matches

ADAPTER = "adapter_config.json"  # the file that peft writes beside an adapter
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")  # of which a tokenizer has one


def from_pretrained(
    folder: str | Path,
    mesh: Mesh,
    transform: Transform | None = None,
    *,
    stage: int | None = None,
    kind: Any = None,
    buffers: bool = False,
    frozen: bool = False,
    vocab: int | None = None,
    change: Callable[[Any], Any] = lambda module: module,
    partial: str | Sequence[str] = (),
) -> tuple[Any, ...]:
    """A model of transformers as ``(apply, params)``, or with ``buffers=True`` as ``(apply, params, buffers)``, as
    `from_module` makes them. The values are those in a folder of ``save_pretrained`` or of `export_safetensors`. Every rank
    must call it; no rank ever holds more than its shards and one leaf, and each reads its own experts only.

    What the files have is read and never drawn. What they lack (adapters, a new head, new tokens) is drawn by the seed that
    `torch.manual_seed` gave rank 0, the same on every rank.

    Args:
        folder: a folder with ``config.json`` and safetensors files.
        transform, stage: as in `shardlib.shard`.
        kind: a class of transformers: one of a model, such as ``BertForMaskedLM``, or one with ``from_config``; by default
            `transformers.AutoModelForCausalLM`.
        frozen: whether parameters with ``requires_grad=False`` are frozen, as by `shardlib.freeze`; their paths are then the
            last value returned. Without it they are refused.
        vocab: rows of the embeddings of tokens, by the model's ``resize_token_embeddings``. New ones are drawn as the model
            initialises its embeddings.
        change: a function that returns the model as it is to be used, from the model on the meta device:
            `shardlib.models.huggingface.with_experts`, or ``lambda model: peft.get_peft_model(model, config)``. It may wrap
            and copy modules, leave some out, and add some: small ones on the CPU, large ones under
            ``torch.device("meta")``, which are initialised as `from_module` does.
        partial: globs over names (with dots) that may be missing in the files, and are then initialised, or in the model.

    Returns:
        ``apply`` as of `from_module`, of the model in training mode, and `Sharded` parameters; the buffers and the frozen
        paths if asked for.

    Raises:
        FileNotFoundError: the folder has no such files.
        TreeError: the files and the model differ in a name or shape; lists all of them. The files are quantized, or an
            adapter's. ``change`` computes with weights. Parameters have ``requires_grad=False`` without ``frozen=True``.
        MissingPackage: transformers is not installed.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=2)).save_pretrained("gpt")
    >>> apply, params = sl.checkpoint.from_pretrained("gpt", sl.make_mesh(), stage=3)
    >>> logits = sl.make_eval_step(lambda params, tokens: apply(params, tokens).logits, params)
    >>> logits(params, torch.zeros(1, 3, dtype=torch.int64)).shape
    torch.Size([1, 3, 32])
    """
    require("transformers", "from_pretrained", "transformers", "hf")
    require_model(folder)
    mesh = mesh_of_ranks(mesh)
    module = meta_model(folder, kind)
    # Ranks draw what the files lack alike, whether or not they were seeded.
    (files, held), seed = from_first_rank(mesh, lambda: (opened(Path(folder), module), torch.initial_seed()), folder)
    initialised = not_in_files(module)
    tensors, grown = (held.tensors, set()) if vocab is None else _resized(module, vocab, held.tensors)
    module, lineage = changed(module, change, seed)
    encoded = quantized_leaves(module)
    source = lineage.sources(module)
    read = _renamed(tensors, source, lineage.names)
    for name, (origin, shape, _) in encoded.items():
        if origin not in tensors or tensors[origin].shape != shape:
            raise TreeError(f"{name}: the files have no {origin} of shape {list(shape)}, which it is made of")
        read.pop(origin, None)
    lacking = {name for name in tensors_of(module) if name not in read}
    drawn = {name for name in lacking if name not in source or matches(name, partial)}
    drawn |= {name for name in lacking if initialised.intersection(source.get(name, ()))}
    drawn |= {name for name in read if grown.intersection(source.get(name, ()))}

    of_files = _given_buffers(module, read.keys() - drawn)
    _, _, *untrained = from_module(module, frozen=frozen)
    transform = default_transform(transform, stage)
    if frozen and untrained[0]:
        transform = chain(transform, freeze(untrained[0]))
    params = shard_by(bound(initialise, module, Key(seed), drawn), mesh, transform, filled_later=True)
    with TensorsOnDisk(files, replace(held, tensors=read)) as saved:
        fill_params(saved, params, "", [*globs_of(partial), *map(glob.escape, drawn)], of_files)
    if encoded:
        with TensorsOnDisk(files, replace(held, tensors=tensors)) as saved:
            fill_encoded(saved, params, {name: (origin, encode) for name, (origin, _, encode) in encoded.items()})
    apply, _, *rest = from_module(module, buffers=buffers, frozen=frozen)  # takes copies of the buffers as they are now
    return apply, params, *rest


def save_pretrained(
    folder: str | Path,
    params: Any,
    base: str | Path,
    *,
    kind: Any = None,
    vocab: int | None = None,
    change: Callable[[Any], Any] = lambda module: module,
) -> None:
    """Write parameters of `from_pretrained` as transformers and peft load them, with configuration and tokenizer. Every rank
    must call it; no rank holds more than its shards and what it sends.

    Of a model with adapters of peft these alone are written, for ``PeftModel.from_pretrained(base, folder)``. Other models
    are written whole, for ``from_pretrained(folder)`` of transformers.

    Args:
        folder: where to write, a folder that all ranks see; files of these names in it are replaced.
        params: `Sharded` parameters, or a `TrainState`.
        base: the folder that the parameters were read from, whose configuration and tokenizer are written.
        kind, vocab, change: as in `from_pretrained`, the same ones.

    Raises:
        TreeError: as `export_safetensors`.
        FileNotFoundError, MissingPackage: as `from_pretrained`.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=2)).save_pretrained("gpt")
    >>> apply, params = sl.checkpoint.from_pretrained("gpt", sl.make_mesh(), stage=3)
    >>> sl.checkpoint.save_pretrained("tuned", params, "gpt")
    >>> GPT2LMHeadModel.from_pretrained("tuned").config.n_embd
    8
    """
    transformers = require("transformers", "save_pretrained", "transformers", "hf")
    require_model(base)
    params = sharded_params("save_pretrained", params)
    whole = meta_model(base, kind)
    if vocab is not None:
        whole.resize_token_embeddings(vocab, mean_resizing=False)
    module, _ = changed(whole, change, 0)
    first = params.mesh.rank == 0
    if isinstance(getattr(module, "peft_config", None), dict) and hasattr(module, "base_model"):
        trained = [name.replace(".", "/") for name, leaf in module.named_parameters() if leaf.requires_grad]
        weights = {name: leaf.cpu() for name, leaf in stream_weights(params, list(map(glob.escape, trained))) if first}
        write: Callable[[], Any] = bound(module.save_pretrained, folder, state_dict=weights)
    else:
        export_safetensors(folder, params, module=module)
        write = bound(module.config.save_pretrained, folder)

    def write_rest() -> None:
        write()
        if any((Path(base) / name).exists() for name in TOKENIZERS):
            transformers.AutoTokenizer.from_pretrained(base).save_pretrained(folder)

    on_all_ranks(params.mesh, lambda: write_rest() if first else None)


def require_model(folder: str | Path) -> None:
    """Refuse what is no folder of a model of transformers: by `FileNotFoundError`, or `TreeError` for an adapter of peft."""
    folder = Path(folder)
    if (folder / ADAPTER).exists() and not any(folder.glob("model*.safetensors*")):
        base = json.loads((folder / ADAPTER).read_text()).get("base_model_name_or_path")
        raise TreeError(
            f"{folder} has an adapter of peft, and not its base model ({base}): give the base's folder with frozen=True and "
            f"change=lambda model: peft.PeftModel.from_pretrained(model, {str(folder)!r}, is_trainable=True)"
        )
    if (folder / "config.json").exists():
        return
    if not folder.exists() and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(folder)):
        raise FileNotFoundError(
            f"there is no folder {folder}, and names of the Hub are not looked up: download it with "
            f"huggingface_hub.snapshot_download({str(folder)!r}), and give the folder that this returns"
        )
    raise FileNotFoundError(f"{folder} has no config.json; write it with model.config.save_pretrained({str(folder)!r})")


def meta_model(folder: str | Path, kind: Any) -> Any:
    """A folder's model on the meta device. It must be unquantized: raises `TreeError` otherwise."""
    import transformers

    kind = kind or transformers.AutoModelForCausalLM
    # A class of models knows its configuration: that of a part, such as CLIP's text model, lies in the whole model's.
    config = (getattr(kind, "config_class", None) or transformers.AutoConfig).from_pretrained(folder)
    if getattr(config, "quantization_config", None):
        raise TreeError(
            f"{folder} has quantized weights: load it dequantized by transformers, and save_pretrained that"
        )
    with torch.device("meta"):
        module = (getattr(kind, "from_config", None) or kind._from_config)(config)
    return meta_copy(module)  # some models draw parameters on the CPU all the same


def changed(module: Any, change: Callable[[Any], Any], seed: int) -> tuple[Any, Lineage]:
    """A model on the meta device as it is to be used, in training mode, and what became of its tensors. What ``change`` adds
    is drawn by the seed. Raises `TreeError`: ``change`` computes with weights."""
    lineage = Lineage(module)
    with torch.random.fork_rng(devices=[]), lineage:
        torch.manual_seed(seed)
        try:
            return change(module).train(), lineage
        except RuntimeError as error:  # torch's own, of tensors without values
            raise TreeError(f"change failed: weights are not read yet ({error}). {NO_VALUES}") from error


def _resized(module: Any, vocab: int, tensors: Mapping[str, Entry]) -> tuple[dict[str, Entry], set[str]]:
    """Give a model ``vocab`` embeddings. Returns the tensors of its files with as many rows, and the names of those that have
    more rows than the files."""
    before = {name: tuple(leaf.shape) for name, leaf in tensors_of(module).items()}
    module.resize_token_embeddings(vocab, mean_resizing=False)
    after = {name: tuple(leaf.shape) for name, leaf in tensors_of(module).items()}
    changed = {name for name, shape in before.items() if after[name] != shape}
    fitting = {name for name in changed & tensors.keys() if tensors[name].shape == before[name]}
    cut = {name: _with_rows(tensors[name], after[name][0]) for name in fitting}
    return {**tensors, **cut}, {name for name in changed if after[name][0] > before[name][0]}


def _with_rows(entry: Entry, rows: int) -> Entry:
    """A tensor of files with the first of its rows, or with rows that the files lack."""
    chunks = [
        chunk._replace(sizes=(min(chunk.sizes[0], rows - chunk.first[0]), *chunk.sizes[1:]))
        for chunk in entry.chunks
        if chunk.first[0] < rows
    ]
    return Entry(entry.dtype, (rows, *entry.shape[1:]), chunks)


def _renamed(
    tensors: Mapping[str, Entry], source: Mapping[str, Sequence[str]], names: Collection[str]
) -> dict[str, Entry]:
    """The tensors of files by their names in a changed model, and those that the model had no place for before either.
    ``source`` is of `Lineage.sources`, and ``names`` are all names before."""
    found = {name: entry for name, entry in tensors.items() if name not in names}
    for name, before in source.items():
        if theirs := [each for each in before if each in tensors]:
            found[name] = tensors[theirs[0]]
    return found


def _given_buffers(module: Any, filled_later: Collection[str]) -> dict[str, torch.Tensor]:
    """Give a module's buffers on the meta device values, or memory; returns those that are ``filled_later``."""
    for name, value in reset_buffers(module, filled_later).items():
        owner, _, leaf = name.rpartition(".")
        own_buffers(module.get_submodule(owner))[leaf] = value
    return {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if name in filled_later}
