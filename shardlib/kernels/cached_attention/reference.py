"""Attention to a cache in plain torch, one sequence after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardlib.kernels.cached_attention.arguments import Attention


def load(device: torch.device) -> str:
    return "reference"


def attend(how: Attention) -> torch.Tensor:
    y = torch.empty_like(how.q)
    grouped = how.q.shape[1] != how.k.shape[1]
    for i, (row, start) in enumerate(zip(how.rows.tolist(), how.starts.tolist())):
        how.keys[row, :, start], how.values[row, :, start] = how.k[i], how.v[i]
        seen = slice(max(0, start + 1 - how.window), start + 1)
        keys, values = how.keys[row, :, seen], how.values[row, :, seen]
        # A batch of one: torch's fused attention takes four dimensions.
        q, keys, values = (x.unsqueeze(0) for x in (how.q[i].unsqueeze(1), keys, values))
        y[i] = F.scaled_dot_product_attention(q, keys, values, enable_gqa=grouped)[0, :, 0]
    return y
