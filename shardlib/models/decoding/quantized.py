"""`quantized`: a model's parameters with the weights of its layers in 8 or 4 bits."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.errors import TreeError
from shardlib.kernels.thin_matmul import QuantizedMatrix
from shardlib.models.decoding.kinds import decoder_of
from shardlib.nn.moe.experts import StoredExperts
from shardlib.sharded.given import Local, given_params
from shardlib.sharded.tree import Sharded
from shardlib.tree import flatten, matches, unflatten


def quantized(model: Any, params: Any, bits: int = 8, block: int = 128) -> Any:
    """The parameters of a model with its layers' weights quantised blockwise, for `shardlib.generate`.

    Weights stay in ``bits`` bits in memory and become floats where products read them, so that a token takes a quarter (an
    eighth) of the bytes of fp32. Embeddings, norms, biases and routers stay as they are; so do matrices whose inputs are no
    multiple of 16.

    Args:
        model: as `shardlib.generate` takes it.
        params: a plain tree; or `Sharded`, or a `TrainState`, of which each rank quantises what it holds, if ranks hold what
            they compute with (ZeRO stages 0 to 2).
        bits: 8 or 4, of integers with one fp32 scale per block.
        block: the most elements of a block, a power of two from 16 to 4096.

    Raises:
        TreeError: a model without such weights (GPT-2 of transformers has them transposed); gradients or a module in the
            place of parameters.
        IllegalComposition: a plan under which parameters are gathered for their use.
        ValueError: other bits or blocks.

    >>> config = sl.models.gpt.GPTConfig(vocab=32, layers=1, width=16, heads=2)
    >>> params = sl.models.decoding.quantized(config, sl.models.gpt.init(config))
    >>> [text.shape for text in sl.generate(config, params, [[1, 2, 3]], 5)]
    [torch.Size([5])]
    """
    decoder = decoder_of(model)
    params = given_params("quantized", params)
    local = Local.of(params, "quantized") if isinstance(params, (Sharded, Local)) else None
    paths, leaves, treedef = flatten(params if local is None else local.tree)
    if any(isinstance(leaf, StoredExperts) for leaf in leaves):
        raise TreeError("quantized takes parameters before experts_on_host; turn them round")
    chosen = [matches(path, decoder.products) and _fits(leaf) for path, leaf in zip(paths, leaves)]
    if not any(chosen):
        names = f"{type(decoder).__name__}.products names none"
        raise TreeError(
            f"{type(model).__name__} has no weights to quantise: {names} with inputs that are multiples of 16"
        )
    given = zip(leaves, chosen)
    tree = unflatten(treedef, [QuantizedMatrix.of(leaf, bits, block) if wanted else leaf for leaf, wanted in given])
    return tree if local is None else local.with_tree(tree)


def _fits(leaf: Any) -> bool:
    """Whether a leaf is a matrix whose inputs make whole blocks, or those of experts. A slice of only padding has one row."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() in (2, 3) and leaf.shape[-1] % 16 == 0 and leaf.shape[-2] > 1
