"""`moe`: a layer of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from shardlib.nn.moe.capacity import Tokens, tokens_of
from shardlib.nn.moe.config import MoEConfig
from shardlib.nn.moe.experts import ExpertVisit
from shardlib.nn.moe.routing import Routing
from shardlib.rng import Key, require_key


def moe(
    params: Mapping[str, Any],
    x: torch.Tensor,
    config: MoEConfig,
    rng: Key | None = None,
    routing: Routing | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Routing]:
    """A layer of experts, of which each token uses a few: ``y_t = Σ_j w_tj · expert_e(x_t)``, e the token's j-th choice.

    ===============  ===================================================================================================
    in ``params``
    ===============  ===================================================================================================
    ``"router"``     "weight" ``(E, W)``; "bias" ``(E)`` of the logits, if there is one; "balance" ``(E)``, if there is one,
                     is added to scores where experts are chosen, and has no gradient (`shardlib.nn.routers.balanced`);
                     "seats" ``(E)``, if there are any, int64: the row of the experts' leaves in which each expert lies
                     (`shardlib.relayout`). Everything else has the experts in their own order. "replicas" ``(E)``, if there
                     are any, int64: the spare slot in which each has a second copy (``sl.experts(spare=)``), −1 for none
    ``"experts"``    "up" ``(E, H, W)``, "down" ``(E, W, H)``, for SwiGLU "gate" ``(E, H, W)``; or what ``config.expert``
                     takes, the experts along dimension 0
    ``"shared"``     the same of one expert that sees every token, without dimension 0. With a "scale" ``(1, W)`` its output
                     is multiplied by ``sigmoid(x · scale)``, as in Qwen2-MoE
    ``"residual"``   the same of one expert, and "mix": "weight" ``(2, W)``, "bias" ``(2)``. The output is
                     ``c_0 · y + c_1 · residual(x)``, c the softmax of mix (PR-MoE, arXiv 2201.05596, section 4.1.2)
    ===============  ===================================================================================================

    Logits are computed in fp32 or wider, the sum over choices in order of j. An expert without tokens has gradients of 0.

    Args:
        x: ``[..., W]``; dimension 0 is the batch, and under a sequence plan dimension 1 this rank's part.
        rng: a key for jitter and for random choices; None in evaluation, which has neither.
        routing: a routing to compute by, in place of the router's: of another call, or from a file. Its weights are taken as
            they are, with their gradient if they have one.
        mask: ``x.shape[:-1]``, bool: the tokens to route; the others, padding, go to no expert and are in no loss or count.

    Returns:
        ``y`` like ``x``, and the routing: who went where, and auxiliary losses (`shardlib.nn.routers.Routing`).

    Raises:
        ValueError: sizes of ``params``, ``x``, ``routing`` and ``mask`` that do not fit, or both of the latter.
        TypeError: an ``rng`` that is no key.

    >>> params = {
    ...     "router": {"weight": torch.eye(2)},
    ...     "experts": {"up": torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), "down": torch.ones(2, 2, 1)},
    ... }
    >>> config = sl.nn.MoEConfig(sl.nn.routers.top_k(1, renormalise="chosen"), expert="relu")
    >>> y, routing = sl.nn.moe(params, torch.tensor([[3.0, 1.0], [1.0, 2.0]]), config)
    >>> y.tolist(), routing.counts.tolist()
    ([[3.0, 3.0], [2.0, 2.0]], [1, 1])
    """
    if rng is not None:
        require_key("moe", "rng", rng)
    if mask is not None and (mask.dtype is not torch.bool or mask.shape != x.shape[:-1]):
        raise ValueError(
            f"moe: the mask is {tuple(mask.shape)} of {mask.dtype}; it must be {tuple(x.shape[:-1])} of torch.bool"
        )
    if mask is not None and routing is not None:
        raise ValueError(
            "moe: a routing has been made with its mask, if there was one; give mask= or routing=, not both"
        )
    router = params["router"]
    flat = x.reshape(-1, x.shape[-1])
    if router["weight"].shape[1:] != x.shape[-1:]:
        raise ValueError(
            f"moe: x is {tuple(x.shape)} and the router's weight {tuple(router['weight'].shape)}; the weight must be "
            "[experts, width]"
        )
    if routing is None:
        masked = {} if mask is None else {"mask": mask.flatten()}
        routing = route(router, flat, config, tokens_of(x, rng), **masked)
    elif len(routing.experts) != len(flat) or len(routing.counts) != len(router["weight"]):
        raise ValueError(
            f"moe: the routing is of {len(routing.experts)} tokens among {len(routing.counts)} experts, and the layer has "
            f"{len(flat)} among {len(router['weight'])}"
        )
    visit = ExpertVisit(params["experts"], flat, routing, router.get("seats"), router.get("replicas"))
    # What needs no other rank is computed while tokens travel; of x as it is, whose sequence slices may have to gather.
    residual = _residual(params["residual"], x, config) if "residual" in params else None
    shared = _shared(params["shared"], x, config) if "shared" in params else None
    y = visit.outputs(config.compute).view(x.shape)
    if residual is not None:
        shares, other = residual
        y = shares[..., :1] * y + shares[..., 1:] * other
    return y if shared is None else y + shared, routing


def route(
    router: Mapping[str, Any], x: torch.Tensor, config: MoEConfig, tokens: Tokens | None = None, **masked: torch.Tensor
) -> Routing:
    """The routing of ``x`` ``[T, W]`` by a layer's "router"; by the random numbers of ``tokens``, if it is to have any."""
    balance = router.get("balance")
    logits = _logits(router, _jittered(x, config.jitter, tokens))
    return config.router(logits, tokens, None if balance is None else balance.detach(), **masked)


def _logits(router: Mapping[str, Any], x: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    bias = router.get("bias")
    return F.linear(x.to(dtype), router["weight"].to(dtype), None if bias is None else bias.to(dtype))


def _jittered(x: torch.Tensor, jitter: float, tokens: Tokens | None) -> torch.Tensor:
    if jitter == 0 or tokens is None:
        return x
    return x * (1 - jitter + 2 * jitter * tokens.uniform("jitter", x.shape[1])).to(x.dtype)


def _shared(params: Mapping[str, Any], x: torch.Tensor, config: MoEConfig) -> torch.Tensor:
    y = config.compute(params, x, F.linear)
    return y * F.linear(x, params["scale"]).sigmoid() if "scale" in params else y


def _residual(params: Mapping[str, Any], x: torch.Tensor, config: MoEConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares ``[..., 2]`` of the experts and of the residual expert, and the latter's output."""
    shares = F.linear(x, params["mix"]["weight"], params["mix"]["bias"]).softmax(-1)
    return shares, config.compute(params, x, F.linear)
