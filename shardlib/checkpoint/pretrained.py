"""Models of transformers from a folder of files, sharded while they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardlib.checkpoint.safetensors import import_safetensors
from shardlib.common.optional import require
from shardlib.mesh.mesh import Mesh
from shardlib.models.from_module import from_module
from shardlib.plan.transform import Transform
from shardlib.shard import shard
from shardlib.sharded.tree import Sharded


def from_pretrained(
    folder: str | Path, mesh: Mesh, transform: Transform | None = None, *, stage: int | None = None, kind: Any = None
) -> tuple[Callable[..., Any], Sharded]:
    """A model of transformers as ``(apply, params)``, with the values in a folder of ``save_pretrained`` or of
    `export_safetensors`. Every rank must call it; no rank ever holds more than its shards and one leaf.

    Args:
        folder: a folder with ``config.json`` and safetensors files.
        transform, stage: as in `shardlib.shard`.
        kind: a class of transformers with ``from_config``; by default `transformers.AutoModelForCausalLM`.

    Returns:
        ``apply`` as of `from_module`, of the model in training mode, and `Sharded` parameters.

    Raises:
        FileNotFoundError: the folder has no such files.
        TreeError: the files and the model differ in a name or shape; lists all of them.
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
    with torch.device("meta"):
        module = (kind or transformers.AutoModelForCausalLM).from_config(config)
    apply, init = from_module(module.train())
    return apply, import_safetensors(folder, shard(init, mesh, transform, stage=stage))
