"""Longer sequences: more learned positions, padding to whole blocks, and sparse attention in transformers' models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardlib.common._compat import require_async
from shardlib.errors import BatchError, TreeError
from shardlib.nn.attention import sparse_attention
from shardlib.rng import Key
from shardlib.sparse.layout import Layout, check_layout

SPARSE = "shardlib_sparse"  # the name of sparse attention in a configuration
# Kind of model -> the class of its attention, the name of its learned positions (Llama computes its own), and the number of
# rows before the first position.
_KNOWN = {
    "bert": ("BertSelfAttention", "embeddings.position_embeddings", 0),
    "roberta": ("RobertaSelfAttention", "embeddings.position_embeddings", 2),
    "gpt2": ("GPT2Attention", "wpe", 0),
    "llama": ("LlamaAttention", None, 0),
}

_PACKED = (
    "sparse attention does not keep packed documents apart, and position_ids begin anew: give each a row of its own, "
    "sl.data.packed(..., together=False)"
)


def with_sparse_attention(module: nn.Module, layout: Layout) -> nn.Module:
    """Makes every self-attention of a transformers BERT, RoBERTa, GPT-2 or Llama compute only the blocks of ``layout``.

    The module is changed in place and returned. Call this before `shardlib.from_module`. Decoders stay causal, and a padding
    mask (batch, sequence) still applies; packed documents are refused. Parameters and their names do not change.

    Raises:
        TreeError: the model is another one, or computes attention in another way (GPT-2's ``reorder_and_upcast_attn``).
        ValueError: the layout is causal and the model an encoder.
        RuntimeError: in a call of a decoder: positions that begin anew, as of packed documents; on accelerators without
            synchronisation.
    """
    check_layout(layout)
    config = _config(module)
    if getattr(config, "reorder_and_upcast_attn", False):
        raise TreeError("reorder_and_upcast_attn computes whole scores: set it to False in the model's config")
    name = _KNOWN[config.model_type][0]
    layers: list[Any] = [layer for layer in module.modules() if type(layer).__name__ == name]
    for layer in layers:
        if layout.causal and not layer.is_causal:
            kind = type(module).__name__
            raise ValueError(
                f"the layout is causal, and {kind} is not: use causal=False, or is_decoder=True in its config"
            )
    for layer in layers:
        layer.sparse_layout = layout
    _register()
    config._attn_implementation = SPARSE
    return module


def extend_positions(module: nn.Module, length: int) -> nn.Module:
    """Extends learned positions to ``length`` tokens by repetition (Longformer, arXiv 2004.05150, section 5).

    The module is changed in place and returned: a transformers BERT, RoBERTa, GPT-2 or Llama (which computes positions: only
    its configuration changes).

    Raises:
        TreeError: the model is another one.
        ValueError: the model already takes more than ``length`` tokens.
    """
    config = _config(module)
    _, name, first = _KNOWN[config.model_type]
    rows = length + first
    if rows < config.max_position_embeddings:
        raise ValueError(f"the model takes {config.max_position_embeddings - first} tokens, more than {length}")
    config.max_position_embeddings = rows
    if name is None:
        return module
    owner, _, leaf = name.rpartition(".")
    embeddings = getattr(module, module.base_model_prefix, module).get_submodule(owner)  # type: ignore[call-overload]
    positions: nn.Embedding = getattr(embeddings, leaf)
    old = positions.weight.detach()
    weight = torch.cat([old[:first], extended(old[first:], length)])
    positions.weight, positions.num_embeddings = nn.Parameter(weight, positions.weight.requires_grad), rows
    for buffer, fill in (("position_ids", torch.arange(rows)), ("token_type_ids", torch.zeros(rows, dtype=torch.long))):
        if buffer in dict(embeddings.named_buffers(recurse=False)):
            embeddings.register_buffer(buffer, fill.expand(1, -1).to(weight.device), persistent=False)
    return module


def extended(positions: torch.Tensor, length: int) -> torch.Tensor:
    """``positions`` (S, W) repeated to (length, W), for the models of shardlib."""
    return positions.repeat(math.ceil(length / len(positions)), 1)[:length]


def pad_to_multiple(
    batch: Mapping[str, torch.Tensor], multiple: int, fill: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """A batch whose sequences (dimension 1) are padded to a multiple, of a layout's block or of the number of ranks.

    Args:
        fill: name of a tensor -> the value to pad it with: a token, -100 for targets, 0 for a mask. Other tensors are
            unchanged.

    Raises:
        BatchError: the batch lacks a name in ``fill``, or tensors differ in length.
    """
    lengths = {name: batch[name].shape[1] for name in fill if name in batch and batch[name].dim() > 1}
    if len(lengths) < len(fill) or len({*lengths.values()}) > 1:
        raise BatchError(
            f"pad_to_multiple(fill={dict(fill)}): the batch has sequences {lengths}; name tensors (batch, sequence, ...) of "
            "one length"
        )
    more = -next(iter(lengths.values()), 0) % multiple

    def padded(name: str, x: torch.Tensor) -> torch.Tensor:
        if name not in fill:
            return x
        return F.pad(x, (*[0] * 2 * (x.dim() - 2), 0, more), value=fill[name])

    return {name: padded(name, x) for name, x in batch.items()}


def _config(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    if getattr(config, "model_type", None) not in _KNOWN:
        kind = type(module).__name__
        raise TreeError(f"{kind} is none of {', '.join(_KNOWN)}: call sl.nn.attention(q, k, v, layout=...) in its code")
    return config


def _register() -> None:
    """Registers the attention function with transformers, by name; repeating it changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(SPARSE, _attend)
    AttentionMaskInterface.register(SPARSE, _padding)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Sparse attention as transformers calls it: heads are dimension 1 of the inputs and dimension 2 of the output."""
    if key.shape[2] != query.shape[2]:
        raise BatchError(
            f"a sparse layout is for one whole sequence, not {query.shape[2]} queries and {key.shape[2]} keys; pass "
            "use_cache=False, and no encoder's states"
        )
    positions = kwargs.get("position_ids")
    if module.is_causal and attention_mask is None and positions is not None:
        onward = (positions.diff() == 1).int()  # up to the padding of a row, and not again
        require_async((onward.diff() <= 0).all(), _PACKED)
    layout: Any = module.sparse_layout
    out = sparse_attention(
        query,
        key,
        value,
        layout.to(query.device),
        causal=bool(module.is_causal),
        scale=scaling,
        key_mask=attention_mask,
        dropout=dropout,
        # Drawn from torch's generator, as the module's other dropout.
        rng=Key(int(torch.randint(2**62, ()))) if dropout else None,
    )
    return out.transpose(1, 2).contiguous(), None


def _padding(attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """The mask that transformers passes to `_attend`: the padding mask, bool (batch, sequence)."""
    return None if attention_mask is None else attention_mask.bool()
