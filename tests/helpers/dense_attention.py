"""Sparse attention by its definition, with whole matrices of scores in float64, and error bounds for kernels."""

import math

import torch

from helpers.rounding import rounding
from shardlib import rng


def dense_attention(q, k, v, layout, *, causal=None, scale=None, key_mask=None, bias=None, dropout=0.0, rng_key=None):
    """The definition."""
    k, v = (_of_every_head(x, q) for x in (k, v))
    scores = q @ k.mT * _scale(q, scale)
    if bias is not None:
        scores = scores + _by_distance(bias, q.shape[2])
    weights = _softmax(scores, layout, causal, key_mask)
    return (weights * _kept(weights, dropout, rng_key)) @ v


def bounds(tensors, grad, layout, dtype, narrow, *, causal=None, scale=None, key_mask=None, dropout=0.0, rng_key=None):
    """The largest error of the output and of every gradient, element by element, in float64 like ``tensors`` and ``grad``.

    The roundings are those that `shardlib.kernels.sparse_attention` names: of all that is stored, of P∘M and dS if
    ``narrow``, and of fp32's sums. The output's goes on into rowsum(dO ∘ O), and from there into dS.

    Args:
        dtype: of the kernel's inputs.
        narrow: whether weights and gradients of scores are rounded to it too.
    """
    unit = rounding(dtype)

    def factor(x, error):
        return unit.stored(x, error) if narrow else error

    q = tensors["q"]
    k, v = (_of_every_head(tensors[name], q) for name in "kv")
    scale = _scale(q, scale)
    scores, terms = q @ k.mT * scale, q.abs() @ k.abs().mT * abs(scale)
    if "bias" in tensors:
        bias = _by_distance(tensors["bias"], q.shape[2])
        scores, terms = scores + bias, terms + bias.abs()
    weights = _softmax(scores, layout, causal, key_mask)
    kept = _kept(weights, dropout, rng_key)
    # e^(s − L) is off by what s is and by the row's mean of that, which L is; below the normal numbers it may be 0.
    off = unit.summed * weights * (1 + terms + (weights * terms).sum(dim=-1, keepdim=True))
    off = off + unit.flushed
    out = (weights * kept) @ v
    slope = kept * (grad @ v.mT) - (grad * out).sum(dim=-1, keepdim=True)
    dscores = weights * slope
    weight_error = factor(weights * kept, off * kept)
    out_error = unit.stored(out, weight_error @ v.abs())
    inner = grad.abs() * (out_error + unit.summed * out.abs())
    product = unit.summed * kept * (grad.abs() @ v.abs().mT)
    dscore_error = off * slope.abs() + weights * (product + inner.sum(dim=-1, keepdim=True))
    factor_error = abs(scale) * factor(dscores, dscore_error)
    k_error, v_error = factor_error.mT @ q.abs(), weight_error.mT @ grad.abs()
    dk, dv = scale * dscores.mT @ q, (weights * kept).mT @ grad
    found = {"out": out_error, "q": unit.stored(scale * dscores @ k, factor_error @ k.abs())}
    for name, x, error in (("k", dk, k_error), ("v", dv, v_error)):
        found[name] = unit.stored(*(y.unflatten(1, (tensors[name].shape[1], -1)).sum(dim=2) for y in (x, error)))
    if "bias" in tensors:
        found["bias"] = _to_distance(dscore_error).sum_to_size(tensors["bias"].shape)
    return found


def _scale(q, scale):
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _of_every_head(x, q):
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _places(length):
    position = torch.arange(length)
    return position - position[:, None] + length - 1


def _by_distance(bias, length):
    return bias[:, _places(length)]


def _to_distance(x):
    """Sums over samples, along diagonals."""
    length = x.shape[-1]
    sums = torch.zeros(x.shape[1], 2 * length - 1, dtype=x.dtype)
    return sums.index_add(1, _places(length).flatten(), x.sum(dim=0).flatten(1))


def _softmax(scores, layout, causal, key_mask):
    length = scores.shape[-1]
    seen = layout.to_dense().repeat_interleave(layout.block, 1).repeat_interleave(layout.block, 2)[:, :length, :length]
    if causal or layout.causal:
        seen = seen.tril()
    seen = seen[None] if key_mask is None else seen[None] & key_mask[:, None, None]
    return scores.masked_fill(~seen, -math.inf).softmax(dim=-1).masked_fill(~seen, 0)


def _kept(weights, dropout, key):
    """Dropout's factors of weights, drawn by the index of a score in the tensor of all scores; see shardlib.rng."""
    if not dropout:
        return torch.ones(())
    kept = rng.uniform(key, weights.shape, dtype=torch.float64) >= int(dropout * 2**24) / 2**24
    return kept.to(weights.dtype) / (1 - dropout)
