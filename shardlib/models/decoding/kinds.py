"""The kinds of models that can be decoded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from shardlib.errors import TreeError
from shardlib.models.decoding.decoder import Decoder, by_layer, everywhere, nowhere
from shardlib.models.decoding.gpt import GPT
from shardlib.models.decoding.gpt2 import GPT2
from shardlib.models.decoding.llama import Llama
from shardlib.models.decoding.mixtral import Mixtral
from shardlib.models.gpt import GPTConfig
from shardlib.models.long import SPARSE

# ``model_type`` of transformers -> the decoder of such a model.
KINDS: dict[str, Callable[[Any], Decoder]] = {
    "gpt2": GPT2,
    "llama": partial(Llama, windows=nowhere),
    "mistral": partial(Llama, windows=everywhere),
    "mixtral": partial(Mixtral, windows=everywhere),
    "qwen2": partial(Llama, windows=by_layer),
    "qwen3": partial(Llama, windows=by_layer),
    "qwen3_moe": partial(Mixtral, windows=everywhere),
}


def decoder_of(model: Any) -> Decoder:
    """The decoder of a model: a `GPTConfig`, a causal language model of transformers, or a `Decoder` itself.

    Raises:
        TreeError: another kind of model, one with peft's adapters or sparse attention, or with settings that its decoder does
            not compute, which it lists.
        ValueError: a `GPTConfig` whose layout is for fewer tokens than its sequence.
    """
    if isinstance(model, Decoder):
        return model
    if isinstance(model, GPTConfig):
        return GPT(model)
    if hasattr(model, "peft_config"):
        raise TreeError("generate takes no adapters of peft: take model.merge_and_unload(), and its parameters")
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in KINDS or not isinstance(getattr(model, "lm_head", None), nn.Linear):
        raise TreeError(
            f"generate takes a GPTConfig, transformers' causal language models of the kinds {', '.join(KINDS)}, or a "
            f"Decoder, and got {type(model).__name__} (model_type={kind!r})"
        )
    if getattr(model.config, "_attn_implementation", None) == SPARSE:
        raise TreeError(
            f"generate computes all of the attention, and this {type(model).__name__} has sparse attention: write a "
            "shardlib.models.decoding.Decoder whose layers call attend(..., layout=layout)"
        )
    return KINDS[kind](model)
