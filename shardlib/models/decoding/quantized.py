"""`quantized`: a model's parameters with the weights of its layers in 8 or 4 bits."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.errors import TreeError
from shardlib.kernels.thin_matmul import QuantizedMatrix
from shardlib.models.decoding.kinds import decoder_of
from shardlib.sharded.tree import Sharded
from shardlib.tree import flatten, matches, unflatten


def quantized(model: Any, params: Any, bits: int = 8, block: int = 128) -> Any:
    """The parameters of a model with its layers' weights quantised blockwise, for `shardlib.generate` on one rank.

    Weights stay in ``bits`` bits in memory and become floats where products read them, so that a token takes a quarter (an
    eighth) of the bytes of fp32. Embeddings, norms, biases and routers stay as they are; so do matrices whose inputs are no
    multiple of 16.

    Args:
        model: as `shardlib.generate` takes it.
        params: a plain tree.
        bits: 8 or 4, of integers with one fp32 scale per block.
        block: the most elements of a block, a power of two from 16 to 4096.

    Raises:
        TreeError: a model without such weights (GPT-2 of transformers has them transposed).
        ValueError: other bits or blocks.

    >>> config = sl.models.gpt.GPTConfig(vocab=32, layers=1, width=16, heads=2)
    >>> params = sl.models.decoding.quantized(config, sl.models.gpt.init(config))
    >>> [text.shape for text in sl.generate(config, params, [[1, 2, 3]], 5)]
    [torch.Size([5])]
    """
    if isinstance(params, Sharded):
        raise TreeError("quantized takes a plain tree, and got a Sharded one: gather it first, sl.unshard(params)")
    decoder = decoder_of(model)
    paths, leaves, treedef = flatten(params)
    chosen = [
        isinstance(leaf, torch.Tensor)
        and leaf.dim() in (2, 3)
        and leaf.shape[-1] % 16 == 0
        and matches(path, decoder.products)
        for path, leaf in zip(paths, leaves)
    ]
    if not any(chosen):
        raise TreeError(
            f"{type(model).__name__} has no weights to quantise: {type(decoder).__name__}.products names "
            f"{', '.join(decoder.products) or 'none'}, of which none is a matrix whose inputs are a multiple of 16"
        )
    given = zip(leaves, chosen)
    return unflatten(treedef, [QuantizedMatrix.of(leaf, bits, block) if wanted else leaf for leaf, wanted in given])
