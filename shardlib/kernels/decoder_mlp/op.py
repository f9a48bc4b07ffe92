"""y = x + mlp(norm(x)) of tokens x: the second half of a decoder's layer, as in Llama, Mixtral and the models after them.

With n = w·x/√(mean(x²) + ε):

- an MLP:  mlp(n) = W_down (silu(W_gate n) ⊙ W_up n), plus biases where there are any.
- experts: p = softmax(W_router n) in fp32, e_1 … e_k those of the k largest p, and w_j = p_e_j, or that divided by the sum of
  all k;  mlp(n) = Σ_j w_j · mlp_e_j(n), in order of j.

x and y are ``[T, width]`` in fp32 or bf16 (fp16 and float64 by plain torch), the weights of that dtype, or quantised those
of an MLP. Results are rounded to it after each product, norm and activation. Bytes moved: those of the weights, of experts
only those that a token chose, once for up to 32 tokens. More tokens are products of torch's. Nothing has gradients. For one
token, reading weights takes longest; in Python the ten operations take half as long again, as weights evict its data from the
caches. So this is one call. A token's results do not depend on the others.

``using`` names one implementation ("cpu", "reference"), for tests.
"""

from __future__ import annotations

import torch

from shardlib.common._compat import differentiated
from shardlib.kernels.common.dispatch import on, serving
from shardlib.kernels.decoder_mlp.arguments import MLP

IMPLEMENTATIONS = {"cpu": ("cpu",)}


def decoder_mlp(x: torch.Tensor, layer: MLP, *, using: str | None = None) -> torch.Tensor:
    """The tokens after the second half of a layer, ``[T, width]``, without gradients.

    Args:
        x: ``[T, width]``, of the layer's dtype.

    Raises:
        ValueError: ``x`` does not fit the layer, or needs gradients where they are recorded.

    >>> from shardlib.kernels.decoder_mlp import MLP, decoder_mlp
    >>> from shardlib.kernels.thin_matmul import Linear
    >>> layer = MLP(torch.ones(1), 0.0, Linear(torch.ones(2, 1)), Linear(torch.ones(2, 1)), Linear(torch.ones(1, 2)))
    >>> decoder_mlp(torch.tensor([[3.0]]), layer)
    tensor([[4.4621]])
    """
    norm = layer.norm
    if x.dim() != 2 or x.shape[1] != norm.shape[0] or x.dtype != norm.dtype or x.device != norm.device:
        raise ValueError(
            f"x is {tuple(x.shape)}, {x.dtype} on {x.device}, and the layer's norm {tuple(norm.shape)}, {norm.dtype} on "
            f"{norm.device}: x must be [tokens, width], the rest the same"
        )
    if torch.is_grad_enabled() and differentiated(x):
        raise ValueError("decoder_mlp has no gradients: call it under torch.no_grad()")
    with on(x.device):
        return serving("decoder_mlp", x, using).apply(x, layer)
