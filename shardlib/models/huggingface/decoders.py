"""Decoder models of transformers as blocks: embedding, layers, and output layer with the loss.

Each block is a copy of the base model with all but a few submodules removed. Its forward, from transformers, then computes
the inputs of these submodules (positions, masks) in the same way as in the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardlib.common._compat import with_children_of_its_own
from shardlib.common.environment import environment
from shardlib.errors import BatchError, IllegalComposition, TreeError
from shardlib.nn.blocks import OPEN, Gate
from shardlib.nn.functional import Mean, linear_cross_entropy

IGNORED = -100  # the label of positions that are left out of the loss
REQUIRED, OPTIONAL = ("input_ids", "labels"), ("attention_mask", "position_ids")  # in a batch


@dataclass(frozen=True)
class DecoderNames:
    """The names of the submodules of a base model.

    Attributes:
        words: the embedding of tokens.
        layers: the list of layers.
        norm: the last norm.
        embedded: submodules between the embedding and the first layer -> the class that replaces each in other blocks.
    """

    words: str
    layers: str
    norm: str
    embedded: Mapping[str, type[nn.Module]]


class _NoPositions(nn.Module):
    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros(())


_LLAMA = DecoderNames("embed_tokens", "layers", "norm", {})
# Kinds whose forward does nothing beyond embedding, layers, norm and output layer, as a test confirms.
DECODERS = {
    "gpt2": DecoderNames("wte", "h", "ln_f", {"wpe": _NoPositions, "drop": nn.Identity}),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": _LLAMA,
    "qwen3_moe": _LLAMA,
    "olmoe": _LLAMA,
    "deepseek_v3": _LLAMA,
    "gpt_oss": _LLAMA,
}


def decoder_of(model: nn.Module) -> DecoderNames:
    """The names of a model's submodules. Raises `TreeError`: the model is no causal language model of transformers of a kind
    in `DECODERS`, one that peft has wrapped, or adds routers' losses."""
    if hasattr(model, "get_base_model"):  # of peft, which answers for the model inside and has other parameters
        raise TreeError(
            f"decoder_blocks takes a model of transformers itself, and this is a {type(model).__name__}: give it "
            "model.get_base_model(), which has the adapters in it"
        )
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in DECODERS or not isinstance(getattr(model, "lm_head", None), nn.Linear):
        raise TreeError(
            f"decoder_blocks cuts transformers' causal language models of the kinds {', '.join(DECODERS)}, and got "
            f"{type(model).__name__} (model_type={kind!r}); for others write sl.from_module(module, blocks=[...])"
        )
    if getattr(model.config, "output_router_logits", False):
        raise TreeError(
            "decoder_blocks adds no loss of routers: set output_router_logits to False in the model's config"
        )
    return DECODERS[kind]


def decoder_blocks(model: Any) -> list[nn.Module]:
    """The blocks of a transformers causal language model, for ``sl.from_module(model, blocks=decoder_blocks(model))``.

    The first block is the embedding, followed by one block per decoder layer; the last block is the final norm, the output
    layer and the loss: the loss of ``model(**batch, use_cache=False)`` as an `sl.Mean` over the labels other than -100, so
    that micro-batches may have different numbers of labels. (With a cache, transformers ignores packed documents in
    ``position_ids``.) Parameters have the model's names after the block's number, and a layer is number 0 of its block
    ("3/model/layers/0/mlp/..."). Tied embeddings are one tensor in the first and the last block. Dropout of transformers'
    modules draws from torch's generator: its masks are equal on ranks that share a batch, and differ between stages.

    ``batch`` is a dictionary of ``input_ids`` and ``labels`` (both (B, S) int64; the loss shifts the labels and leaves out
    those at -100) and, optionally, ``attention_mask`` (B, S) and ``position_ids`` (B, S).

    Raises:
        TreeError: the model is not of a known kind, or has ``output_router_logits``. From the blocks: BatchError, a batch
            with other keys; IllegalComposition, with `shardlib.sequence`, as transformers' attention needs whole sequences.
    """
    decoder = decoder_of(model)
    prefix = model.base_model_prefix
    base = getattr(model, prefix)
    return [
        _Block(prefix, _subset(base, decoder, {decoder.words, *decoder.embedded})),
        *[
            _Block(prefix, _subset(base, decoder, set(), (index,)))
            for index in range(len(getattr(base, decoder.layers)))
        ],
        _Head(prefix, _subset(base, decoder, {decoder.norm}), model.lm_head),
    ]


def _subset(base: Any, decoder: DecoderNames, kept: set[str], layers: tuple[int, ...] = ()) -> nn.Module:
    """A copy of a base model with only the submodules ``kept`` and the layers of these numbers, shared with the model."""
    subset = with_children_of_its_own(base)
    all_layers = getattr(base, decoder.layers)
    setattr(subset, decoder.layers, nn.ModuleList(all_layers[index] for index in layers))
    # Forwards read the number of layers, and some the kind of each layer, from the config.
    subset.config = copy.copy(base.config)
    subset.config.num_hidden_layers = len(layers)
    if getattr(base.config, "layer_types", None) is not None:
        subset.config.layer_types = [base.config.layer_types[index] for index in layers]
    stand_ins: dict[str, type[nn.Module]] = {decoder.words: nn.Identity, decoder.norm: nn.Identity, **decoder.embedded}
    for name, stand_in in stand_ins.items():
        if name not in kept:
            setattr(subset, name, stand_in())
    return subset


class _Block(nn.Module):
    """A subset of a base model, under the base model's name."""

    def __init__(self, prefix: str, subset: nn.Module) -> None:
        super().__init__()
        self.add_module(prefix, subset)
        self._prefix = prefix

    def _init_weights(self, module: nn.Module) -> None:
        """The initialisation of the whole model."""
        self.get_submodule(self._prefix)._init_weights(module)  # type: ignore[operator]

    def forward(self, hidden: torch.Tensor | None, batch: Mapping[str, torch.Tensor], gate: Gate = OPEN) -> Any:
        """The residual stream (B, S, W) after this block; ``hidden`` is None in the first block."""
        if hidden is not None and not gate.open:
            return hidden
        _check(batch)
        if environment().parts is not None:
            raise IllegalComposition(
                "transformers' attention needs whole sequences; take sequence(...) out of the plan, or build the model of "
                "sl.nn.attention (see shardlib.models.gpt)"
            )
        inputs = {"input_ids": batch["input_ids"]} if hidden is None else {"inputs_embeds": hidden}
        subset = self.get_submodule(self._prefix)
        optional = {name: batch.get(name) for name in OPTIONAL}
        if gate.tokens is not None:
            optional = _of_tokens(optional, gate.tokens)
        after = subset(**inputs, **optional, use_cache=False, return_dict=True).last_hidden_state
        return after if hidden is None else gate.between(hidden, after)


class _Head(_Block):
    def __init__(self, prefix: str, subset: nn.Module, output: nn.Linear) -> None:
        super().__init__(prefix, subset)
        self.lm_head = output

    def forward(self, hidden: torch.Tensor | None, batch: Mapping[str, torch.Tensor]) -> Mean:  # type: ignore[override]
        x = super().forward(hidden, batch)
        targets = shifted(batch["labels"])
        # The output layer itself is not called, so that logits that are sliced by tokens are never gathered.
        total = linear_cross_entropy(x, self.lm_head.weight, targets, ignore_index=IGNORED, reduction="sum")
        return Mean(total, (targets != IGNORED).sum())


def _of_tokens(optional: dict[str, torch.Tensor | None], tokens: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """The optional inputs of a layer that sees the tokens at these positions alone. Raises `BatchError`: packed documents
    without an attention mask: transformers finds where they begin by positions that are not one after the other, which is so
    of all tokens here."""
    if optional["attention_mask"] is None and optional["position_ids"] is not None:
        raise BatchError(
            "random_ltd leaves out tokens, and transformers finds packed documents by position_ids: give an attention_mask, "
            "or take random_ltd out of the plan"
        )
    mask = torch.ones_like(tokens) if optional["attention_mask"] is None else optional["attention_mask"]
    positions = tokens if optional["position_ids"] is None else optional["position_ids"]
    return {"attention_mask": mask, "position_ids": positions}


def shifted(labels: torch.Tensor, ignored: int = IGNORED) -> torch.Tensor:
    """The label of every position's next one, (..., S); ``ignored`` for the last position."""
    return F.pad(labels, (0, 1), value=ignored)[..., 1:]


def _check(batch: Any) -> None:
    keys = set(batch) if isinstance(batch, Mapping) else {type(batch).__name__}
    if not keys >= set(REQUIRED) or keys - {*REQUIRED, *OPTIONAL}:
        raise BatchError(
            f"a batch for decoder_blocks has {' and '.join(REQUIRED)}, and may have {' and '.join(OPTIONAL)}; this one is or "
            f"has {', '.join(sorted(keys))}"
        )
