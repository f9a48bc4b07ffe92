"""The loss of transformers' causal language models without logits of all tokens and words at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from shardlib.errors import TreeError
from shardlib.models.huggingface.decoders import IGNORED, shifted
from shardlib.nn.functional import linear_cross_entropy


class Scores(NamedTuple):
    """Logits that were not computed: ``F.linear(hidden, weight)``.

    Attributes:
        hidden: the input of the output layer, (B, S, W).
        weight: the output layer's, (V, W).
    """

    hidden: torch.Tensor
    weight: torch.Tensor

    def whole(self) -> torch.Tensor:
        """The logits, (B, S, V)."""
        return F.linear(self.hidden, self.weight)


def with_tiled_loss(model: Any) -> Any:
    """Makes a causal language model of transformers compute its loss by `shardlib.nn.linear_cross_entropy`.

    The loss of ``model(..., labels=...)`` is the same, and logits exist for one tile of tokens at a time (for one tile of
    words, where `shardlib.tile` cuts the output layer's weight). The output's ``logits`` are `Scores`. The model is changed
    in place and returned; parameters and their names do not change. Call this before `shardlib.from_module`.

    Raises:
        TreeError: the model has no output layer ``lm_head`` without bias (an adapter's is another layer), changes logits
            (Gemma 2's ``final_logit_softcapping``), or has an encoder.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from shardlib.models import huggingface
    >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    >>> apply, params = sl.from_module(huggingface.with_tiled_loss(LlamaForCausalLM(LlamaConfig(**sizes))))
    >>> tokens = torch.zeros(2, 8, dtype=torch.int64)
    >>> apply(params, tokens, labels=tokens).loss.shape
    torch.Size([])
    """
    head, config = getattr(model, "lm_head", None), getattr(model, "config", None)
    scales = ("final_logit_softcapping", "logits_scaling", "logit_scale")
    changed = [name for name in scales if getattr(config, name, None)]
    why = ""
    # A subclass of nn.Linear may compute something else.
    if head is None or type(head) not in (nn.Linear, _TiledHead) or head.bias is not None:
        why = "it has no lm_head, a plain Linear without bias"
    elif changed:
        why = f"its logits are changed ({', '.join(changed)})"
    elif getattr(config, "is_encoder_decoder", False):
        why = "it has an encoder, and its loss does not shift labels"
    if why:
        kind = type(model).__name__
        raise TreeError(f"with_tiled_loss cannot take {kind}: {why}; call sl.nn.linear_cross_entropy in your loss")
    head.__class__ = _TiledHead
    model.loss_function = _loss
    return model


class _TiledHead(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> Any:
        return Scores(hidden, self.weight)


def _loss(
    logits: Scores,
    labels: torch.Tensor,
    vocab_size: int | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """The loss as transformers calls it: the mean over the labels, or their sum over ``num_items_in_batch``."""
    targets = shifted(labels, ignore_index) if shift_labels is None else shift_labels
    reduction = "mean" if num_items_in_batch is None else "sum"
    targets = targets.to(logits.hidden.device)
    loss = linear_cross_entropy(*logits, targets, ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch
