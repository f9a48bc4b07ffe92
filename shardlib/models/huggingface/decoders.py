"""transformers' decoder models as blocks: embedding, layers, and output layer with the loss.

Each block is the model's own base model with all but one part taken out. Its forward, transformers' own, then computes
what the part is given (positions, masks) as it does in the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardlib._compat import with_children_of_its_own
from shardlib.errors import BatchError, IllegalComposition, TreeError
from shardlib.nn.functional import Mean, linear_cross_entropy
from shardlib.nn.sequence import current_parts

IGNORED = -100  # as a label: the position does not count
REQUIRED, OPTIONAL = ("input_ids", "labels"), ("attention_mask", "position_ids")  # in a batch


@dataclass(frozen=True)
class Decoder:
    """What the parts of a base model are called.

    Attributes:
        words: the embedding of tokens, whose output goes through ``embedded`` before the first layer.
        embedded: these, and what stands in for each where it is taken out.
    """

    words: str
    layers: str
    norm: str
    embedded: Mapping[str, type[nn.Module]]


class _NoPositions(nn.Module):
    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros(())


_LLAMA = Decoder("embed_tokens", "layers", "norm", {})
# Those whose forward is known, by a test, to do nothing beyond embedding, layers, norm and output layer.
DECODERS = {
    "gpt2": Decoder("wte", "h", "ln_f", {"wpe": _NoPositions, "drop": nn.Identity}),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}


def decoder_of(model: nn.Module) -> Decoder:
    """The names of a model's parts.

    Raises:
        TreeError: not a causal language model of transformers of a kind that is known here.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in DECODERS or not isinstance(getattr(model, "lm_head", None), nn.Linear):
        raise TreeError(
            f"decoder_blocks cuts transformers' causal language models of the kinds {', '.join(DECODERS)}, and got "
            f"{type(model).__name__} (model_type={kind!r}); for others write the blocks: sl.from_module(module, "
            "blocks=[...]), modules called as block(carry, batch)"
        )
    return DECODERS[kind]


def decoder_blocks(model: Any) -> list[nn.Module]:
    """The blocks of a transformers causal language model, for ``sl.from_module(model, blocks=decoder_blocks(model))``.

    One block is the embedding, one each decoder layer, and the last the final norm, the output layer and the loss: the
    loss of ``model(**batch, use_cache=False)`` as an `sl.Mean` over the labels that count, so that micro-batches may hold
    different numbers of them. (With a cache transformers does not see packed documents in ``position_ids``.) Parameters
    keep the model's names after the block's number ("3/model/layers/0/mlp/...": each layer is number 0 of its block).
    Tied embeddings are one tensor in the first and the last block. The modules' own dropout draws from torch's
    generator: alike on ranks that share a batch, but from stage to stage its masks differ.

    ``batch`` is a dictionary of ``input_ids`` and ``labels`` (both (B, S) int64; the loss shifts the labels, and those at
    -100 do not count) and, where needed, ``attention_mask`` (B, S) and ``position_ids`` (B, S).

    Raises:
        TreeError: a model that is not of a known kind. From the blocks: BatchError, a batch with other keys;
            IllegalComposition, under `shardlib.sequence` (the attention is transformers' own).
    """
    decoder = decoder_of(model)
    prefix = model.base_model_prefix
    base = getattr(model, prefix)
    return [
        _Block(prefix, _part(base, decoder, {decoder.words, *decoder.embedded})),
        *[_Block(prefix, _part(base, decoder, set(), (index,))) for index in range(len(getattr(base, decoder.layers)))],
        _Head(prefix, _part(base, decoder, {decoder.norm}), model.lm_head),
    ]


def _part(base: Any, decoder: Decoder, kept: set[str], layers: tuple[int, ...] = ()) -> nn.Module:
    """A base model with the parts ``kept`` and the layers of these numbers, the model's own, and no others."""
    part = with_children_of_its_own(base)
    own = getattr(base, decoder.layers)
    setattr(part, decoder.layers, nn.ModuleList(own[index] for index in layers))
    # Forwards count layers, and some ask for each one's kind, by the config.
    part.config = copy.copy(base.config)
    part.config.num_hidden_layers = len(layers)
    if getattr(base.config, "layer_types", None) is not None:
        part.config.layer_types = [base.config.layer_types[index] for index in layers]
    stand_ins: dict[str, type[nn.Module]] = {decoder.words: nn.Identity, decoder.norm: nn.Identity, **decoder.embedded}
    for name, stand_in in stand_ins.items():
        if name not in kept:
            setattr(part, name, stand_in())
    return part


class _Block(nn.Module):
    """A part of a base model, under the name that this has in its model."""

    def __init__(self, prefix: str, part: nn.Module) -> None:
        super().__init__()
        self.add_module(prefix, part)
        self._prefix = prefix

    def _init_weights(self, module: nn.Module) -> None:
        """What the model that this is a part of starts from."""
        self.get_submodule(self._prefix)._init_weights(module)  # type: ignore[operator]

    def forward(self, hidden: torch.Tensor | None, batch: Mapping[str, torch.Tensor]) -> Any:
        """The residual stream (B, S, W) after this part; ``hidden`` is None before the first."""
        _check(batch)
        if current_parts.get() is not None:
            raise IllegalComposition(
                "sequence(...) cuts activations along the sequence, and the attention of transformers' modules needs whole "
                "ones; take sequence(...) out of the plan, or build the model of sl.nn.attention (see shardlib.models.gpt)"
            )
        given = {"input_ids": batch["input_ids"]} if hidden is None else {"inputs_embeds": hidden}
        part = self.get_submodule(self._prefix)
        optional = {name: batch.get(name) for name in OPTIONAL}
        return part(**given, **optional, use_cache=False, return_dict=True).last_hidden_state


class _Head(_Block):
    def __init__(self, prefix: str, part: nn.Module, output: nn.Linear) -> None:
        super().__init__(prefix, part)
        self.lm_head = output

    def forward(self, hidden: torch.Tensor | None, batch: Mapping[str, torch.Tensor]) -> Mean:
        x = super().forward(hidden, batch)
        targets = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
        # Not a call of the output layer: where its words are sliced the logits are never gathered.
        total = linear_cross_entropy(x, self.lm_head.weight, targets, ignore_index=IGNORED, reduction="sum")
        return Mean(total, (targets != IGNORED).sum())


def _check(batch: Any) -> None:
    found = set(batch) if isinstance(batch, Mapping) else {type(batch).__name__}
    if not found >= set(REQUIRED) or found - {*REQUIRED, *OPTIONAL}:
        raise BatchError(
            f"a batch for decoder_blocks is a dictionary with {' and '.join(REQUIRED)}, and may hold "
            f"{' and '.join(OPTIONAL)}; this one is or has {', '.join(sorted(found))}"
        )
