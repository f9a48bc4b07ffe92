"""Models of transformers from a folder of files, sharded while they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardlib.checkpoint.safetensors import import_safetensors
from shardlib.common._compat import own_buffers
from shardlib.common.optional import require
from shardlib.errors import TreeError
from shardlib.mesh.mesh import Mesh
from shardlib.models.from_module import from_module
from shardlib.models.meta import reset_buffers
from shardlib.plan.transform import Transform
from shardlib.shard import shard


def from_pretrained(
    folder: str | Path,
    mesh: Mesh,
    transform: Transform | None = None,
    *,
    stage: int | None = None,
    kind: Any = None,
    buffers: bool = False,
    change: Callable[[Any], Any] = lambda module: module,
) -> tuple[Any, ...]:
    """A model of transformers as ``(apply, params)``, or with ``buffers=True`` as ``(apply, params, buffers)``, as
    `from_module` makes them. The values are those in a folder of ``save_pretrained`` or of `export_safetensors`. Every rank
    must call it; no rank ever holds more than its shards and one leaf, and each reads its own experts only.

    Args:
        folder: a folder with ``config.json`` and safetensors files.
        transform, stage: as in `shardlib.shard`.
        kind: a class of transformers with ``from_config``; by default `transformers.AutoModelForCausalLM`.
        change: a function that returns the model as it is to be used, from the model on the meta device, such as
            `shardlib.models.huggingface.with_experts`.

    Returns:
        ``apply`` as of `from_module`, of the model in training mode, and `Sharded` parameters; the buffers if asked for.

    Raises:
        FileNotFoundError: the folder has no such files.
        TreeError: the files and the model differ in a name or shape; lists all of them. The files are quantized.
        MissingPackage: transformers is not installed.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=2)).save_pretrained("gpt")
    >>> apply, params = sl.checkpoint.from_pretrained("gpt", sl.make_mesh(), stage=3)
    >>> logits = sl.make_eval_step(lambda params, tokens: apply(params, tokens).logits, params)
    >>> logits(params, torch.zeros(1, 3, dtype=torch.int64)).shape
    torch.Size([1, 3, 32])
    """
    transformers = require("transformers", "from_pretrained", "transformers", "hf")
    if not (Path(folder) / "config.json").exists():
        raise FileNotFoundError(
            f"{folder} has no config.json; write it with model.config.save_pretrained({str(folder)!r})"
        )
    config = transformers.AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None):
        raise TreeError(
            f"{folder} has quantized weights, which are not read: load it dequantized by transformers, save_pretrained that, "
            "and give the new folder"
        )
    with torch.device("meta"):
        module = change((kind or transformers.AutoModelForCausalLM).from_config(config)).train()
    held = _given_buffers(module)
    params = shard(from_module(module)[1], mesh, transform, stage=stage)
    import_safetensors(folder, params, module=module, buffers=held)
    apply, _, *rest = from_module(module, buffers=buffers)  # takes copies of the buffers, which now have their values
    return apply, params, *rest


def _given_buffers(module: Any) -> dict[str, torch.Tensor]:
    """Give a module's buffers on the meta device values; returns those that its files have."""
    for name, value in reset_buffers(module).items():
        owner, _, leaf = name.rpartition(".")
        own_buffers(module.get_submodule(owner))[leaf] = value
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {name: leaf for name, leaf in module.state_dict().items() if name not in parameters}
