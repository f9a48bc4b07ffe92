"""Quantised buffers, as the implementations of blockwise quantisation take them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardlib.kernels.quantize.blockwise import Blockwise


class Quantized(NamedTuple):
    """Values and their scales, of one rank, or of several ranks with a first dimension of ranks."""

    values: torch.Tensor
    scales: torch.Tensor
    form: Blockwise
