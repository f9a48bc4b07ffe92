"""Losses of transformers' language models: over batches of `shardlib.data.packed`, and without whole logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from shardlib.errors import TreeError
from shardlib.models.huggingface.decoders import IGNORED, shifted
from shardlib.models.long import SPARSE
from shardlib.nn.functional import Mean, linear_cross_entropy
from shardlib.rng import Key, uniform
from shardlib.tree import Tree


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
    model.loss_function = _tiled_loss
    return model


class _TiledHead(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> Any:
        return Scores(hidden, self.weight)


def _tiled_loss(
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


# Types of models that keep documents of one row apart where positions begin anew: attention is all that passes from one token
# to another, and its mask is made by positions. In OPT, Falcon, BLOOM and MPT it is not, nor in layers that keep a state.
_APART = frozenset(
    {
        *(
            "codegen",
            "gemma",
            "gemma2",
            "gpt2",
            "gpt_neox",
            "gptj",
            "llama",
            "mistral",
            "mixtral",
            "olmo2",
            "olmoe",
            "phi",
        ),
        *("phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"),
    }
)


def keeps_apart(model: Any) -> bool:
    """Whether a causal language model of transformers keeps documents of one row apart by their positions. With sparse
    attention (`shardlib.models.long`) none does.

    Args:
        model: the model, or ``apply`` of `shardlib.from_module`; anything with its ``config``.

    >>> from transformers import GPT2Config, OPTConfig, GPT2LMHeadModel
    >>> from shardlib.models import huggingface
    >>> huggingface.keeps_apart(GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2)))
    True
    """
    config = getattr(model, "config", None)
    sparse = getattr(config, "_attn_implementation", None) == SPARSE
    return getattr(config, "model_type", None) in _APART and not sparse


def causal_loss(apply: Callable[..., Any]) -> Callable[[Tree, Mapping[str, torch.Tensor]], Mean]:
    """The loss of a causal language model: the mean over the targets that are there, of all ranks and micro-batches.

    The model is given tokens and positions and no mask: where positions begin anew, most models of transformers keep the
    documents of a row apart (`keeps_apart`). With `with_tiled_loss` logits exist for one tile of tokens at a time.

    Args:
        apply: the model, of `shardlib.from_module` or `shardlib.checkpoint.from_pretrained`.

    Returns:
        ``loss_fn(params, batch)`` for a batch with ``tokens``, ``positions`` and ``targets``, (rows, tokens) int64, targets
        one token ahead and -100 where there is none, as `shardlib.data.packed` makes them.

    Raises:
        TreeError: from the loss: rows have several documents by ``segments``, which the model would mix.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from shardlib.models import huggingface
    >>> apply, params = sl.from_module(GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2)))
    >>> batch = next(iter(sl.data.loader(sl.data.packed([[1, 2, 3], [4, 5]], 8), sl.make_mesh(), batch=1)))
    >>> huggingface.causal_loss(apply)(params, batch).weight  # 1, 2 -> 2, 3 and 4 -> 5
    tensor(3)
    """

    apart = keeps_apart(apply)

    def loss(params: Tree, batch: Mapping[str, torch.Tensor]) -> Mean:
        batch = _with_a_row(batch)
        if not apart and "segments" in batch and int(batch["segments"].max()) > 0:
            kind = getattr(getattr(apply, "config", None), "model_type", "a model without a config")
            raise TreeError(
                f"causal_loss: {kind} is not known to keep documents of one row apart: give each a row of its own, "
                "sl.data.packed(..., together=False)"
            )
        given = {"input_ids": batch["tokens"], "position_ids": batch["positions"], "use_cache": False}
        return _scored(apply(params, **given).logits, batch["targets"])

    return loss


def masked_loss(
    apply: Callable[..., Any], mask: int, words: int, special: Sequence[int] = (), share: float = 0.15
) -> Callable[[Tree, Mapping[str, torch.Tensor], Key], Mean]:
    """The loss of a masked language model (BERT, arXiv 1810.04805, section 3.1): of the tokens that are drawn, ``share`` of
    all, 8 in 10 are masked, 1 in 10 is another word and 1 stays, and the model is to tell what they were.

    Args:
        apply: as in `causal_loss`.
        mask: the token that stands for a masked one.
        words: how many words there are, of which others are drawn.
        special: tokens that are never drawn, such as those at the ends.
        share: of the tokens that are drawn.

    Returns:
        ``loss_fn(params, batch, rng)`` for a batch with ``tokens`` and ``segments``, -1 in padding, as
        `shardlib.data.packed(..., together=False)` makes them.

    >>> from transformers import BertConfig, BertForMaskedLM
    >>> from shardlib.models import huggingface
    >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    >>> apply, params = sl.from_module(BertForMaskedLM(BertConfig(vocab_size=16, **sizes)))
    >>> loss_fn = huggingface.masked_loss(apply, mask=3, words=16)
    >>> batch = {"tokens": torch.full((4, 32), 5), "segments": torch.zeros(4, 32, dtype=torch.int64)}
    >>> bool(loss_fn(params, batch, sl.Key(0)).weight < 40)
    True
    """
    kept_apart = torch.tensor(sorted(special), dtype=torch.int64)

    def loss(params: Tree, batch: Mapping[str, torch.Tensor], rng: Key) -> Mean:
        any_rows, batch = len(batch["tokens"]) > 0, _with_a_row(batch)
        tokens, there = batch["tokens"], batch["segments"] >= 0
        drawn, kind, other = (
            uniform(rng.fold_in(name), tokens.shape, tokens.device) for name in ("drawn", "kind", "word")
        )
        drawn = (drawn < share * any_rows) & there & ~torch.isin(tokens, kept_apart.to(tokens.device))
        replaced = torch.where(kind < 0.8, mask, torch.where(kind < 0.9, (other * words).long(), tokens))
        given = {"input_ids": torch.where(drawn, replaced, tokens), "attention_mask": there.long()}
        return _scored(apply(params, **given).logits, torch.where(drawn, tokens, IGNORED))

    return loss


def _with_a_row(batch: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """A batch; of a rank that has no rows of it one without a target, since transformers' models take at least one row."""
    if len(batch["tokens"]):
        return batch
    row = batch["tokens"].new_zeros(1, max(1, batch["tokens"].shape[1]))
    places = torch.arange(row.shape[1], device=row.device)[None]
    return {"tokens": row, "targets": row + IGNORED, "segments": row, "positions": places}


def _scored(logits: Any, targets: torch.Tensor) -> Mean:
    if isinstance(logits, Scores):
        total = linear_cross_entropy(*logits, targets, ignore_index=IGNORED, reduction="sum")
    else:
        flat = logits.flatten(0, 1).float()
        total = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return Mean(total, (targets != IGNORED).sum())
