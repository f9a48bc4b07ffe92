"""`moe`: a layer of experts; `MoEConfig`: what it is made of, apart from its parameters; `init_moe`: these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from shardlib import init
from shardlib.kernels.gelu import gelu
from shardlib.kernels.swiglu import swiglu
from shardlib.nn.moe.experts import Dispatch, Expert, Product
from shardlib.nn.moe.routing import Routing, Tokens, tokens_of
from shardlib.rng import Key, require_key

# ``router(logits, rng, balance)``, and ``mask=`` where there is padding.
Route = Callable[..., Routing]


def _swiglu(params: Mapping[str, Any], rows: torch.Tensor, product: Product) -> torch.Tensor:
    return product(swiglu(product(rows, params["gate"]), product(rows, params["up"])), params["down"])


def _plain(
    activation: Callable[[torch.Tensor], torch.Tensor], params: Mapping[str, Any], rows: torch.Tensor, product: Product
) -> torch.Tensor:
    hidden = activation(product(rows, params["up"], params.get("up_bias")))
    return product(hidden, params["down"], params.get("down_bias"))


class NamedExpert(NamedTuple):
    """An expert that has a name.

    Attributes:
        compute: its function.
        sizes: parameter -> "hidden" and "width" in the order of one expert's dimensions.
    """

    compute: Expert
    sizes: Mapping[str, tuple[str, ...]]


_GATED = {"gate": ("hidden", "width"), "up": ("hidden", "width"), "down": ("width", "hidden")}
_BIASED = {"up": ("hidden", "width"), "up_bias": ("hidden",), "down": ("width", "hidden"), "down_bias": ("width",)}
EXPERTS = {
    "swiglu": NamedExpert(_swiglu, _GATED),
    "gelu": NamedExpert(partial(_plain, gelu), _BIASED),
    "gelu_tanh": NamedExpert(partial(_plain, partial(gelu, approximate="tanh")), _BIASED),
    "relu": NamedExpert(partial(_plain, F.relu), _BIASED),
}


@dataclass(frozen=True)
class MoEConfig:
    """What `moe` is made of, apart from its parameters.

    Attributes:
        router: of `shardlib.nn.routers`, or a function ``(logits, rng, balance) -> Routing``, which takes a
            ``mask=`` too if layers have padding.
        expert: "swiglu" (parameters "gate", "up", "down"), "gelu", "gelu_tanh" or "relu" ("up", "down", and where there are
            any "up_bias", "down_bias"); or a function ``expert(params, rows, product)`` of the layer's ``params["experts"]``
            and of rows ``[R, W]``, each a token of some expert. ``product(rows, weight, bias=None)`` is ``F.linear`` with the
            weight ``[E, out, in]`` and bias ``[E, out]`` of each row's expert; nothing else may mix rows. Shared and residual
            experts are the same function of one expert's parameters.
        jitter: the router's input, and it alone, is multiplied by random numbers in ``[1 − jitter, 1 + jitter)`` in training
            (arXiv 2101.03961, section 2.2).

    Raises:
        ValueError: an unknown name of an expert, or a jitter outside [0, 1).

    >>> sl.nn.MoEConfig(sl.nn.routers.switch(), expert="gelu").jitter
    0.0
    """

    router: Route
    expert: str | Expert = "swiglu"
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.expert, str) and self.expert not in EXPERTS:
            raise ValueError(f"MoEConfig(expert={self.expert!r}): use a function, or {', '.join(map(repr, EXPERTS))}")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"MoEConfig(jitter={self.jitter!r}): a jitter is in [0, 1)")

    @property
    def compute(self) -> Expert:
        """The experts' function."""
        return EXPERTS[self.expert].compute if isinstance(self.expert, str) else self.expert

    @property
    def slices(self) -> dict[str, str]:
        """Parameter -> the style of `shardlib.tensor_slicing` that cuts an expert's inner width; none of a function's."""
        sizes = EXPERTS[self.expert].sizes if isinstance(self.expert, str) else {}
        return {name: "column" if order[0] == "hidden" else "row" for name, order in sizes.items()}

    def shapes(self, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
        """Parameter -> shape, for one expert of these widths.

        Raises:
            ValueError: the expert is a function, whose parameters only its author knows.
        """
        if not isinstance(self.expert, str):
            name = getattr(self.expert, "__name__", self.expert)
            raise ValueError(f"the parameters of the expert function {name!r} are unknown: make them yourself")
        sizes = {"width": width, "hidden": hidden}
        return {name: tuple(sizes[size] for size in order) for name, order in EXPERTS[self.expert].sizes.items()}


def init_moe(
    key: Key,
    config: MoEConfig,
    *,
    experts: int,
    width: int,
    hidden: int,
    shared: int = 0,
    residual: int = 0,
    balance: bool = False,
    seats: bool = False,
    replicas: bool = False,
    std: float = 0.02,
    out_std: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> dict[str, Any]:
    """Initial parameters for `moe`: matrices from N(0, std²), biases 0.

    Numbers are drawn by counters (`shardlib.init`): in a function that is passed to `shardlib.shard` each rank draws only its
    shards, and only its experts.

    Args:
        config: of an expert that has a name.
        experts: their number, E.
        width: of tokens, W.
        hidden: an expert's inner width, H.
        shared: the inner width of an expert that sees every token; 0 for none.
        residual: the inner width of PR-MoE's residual expert, whose share is one half at first; 0 for none.
        balance: whether the router has a bias for balance without a loss (`shardlib.nn.routers.balanced`), in fp32. No
            gradient reaches it; freeze it, so that weight decay does not shrink it: ``sl.freeze("*router/balance")``.
        seats: whether experts have seats, which `shardlib.relayout` changes to balance the ranks' loads.
        replicas: whether hot experts may have second copies (``sl.experts(spare=)``), which it changes too.
        out_std: for "down", which writes to the residual stream; by default ``std``.

    Raises:
        ValueError: sizes below 1, or a config with a function for an expert.
        TypeError: a ``key`` that is no key.

    >>> config = sl.nn.MoEConfig(sl.nn.routers.switch())
    >>> params = sl.nn.init_moe(sl.Key(0), config, experts=4, width=8, hidden=32)
    >>> {name: tuple(leaf.shape) for name, leaf in params["experts"].items()}
    {'gate': (4, 32, 8), 'up': (4, 32, 8), 'down': (4, 8, 32)}
    """
    require_key("init_moe", "key", key)
    if min(experts, width, hidden) < 1 or min(shared, residual) < 0:
        raise ValueError(
            f"init_moe(experts={experts}, width={width}, hidden={hidden}, shared={shared}, residual={residual}): sizes are "
            "at least 1, those of shared and residual experts 0 or more"
        )
    kind: dict[str, Any] = {"dtype": dtype, "device": device}

    def zeros(*shape: int, **other: Any) -> torch.Tensor:
        return torch.zeros(shape, **kind | other)

    def normal(name: str, *shape: int, std: float = std) -> torch.Tensor:
        return init.normal(key.fold_in(name), shape, std, **kind)

    def expert(name: str, inner: int, *number: int) -> dict[str, torch.Tensor]:
        stds = {} if out_std is None else {"down": out_std}
        return {
            leaf: normal(f"{name}/{leaf}", *number, *shape, std=stds.get(leaf, std))
            if len(shape) > 1
            else zeros(*number, *shape)
            for leaf, shape in config.shapes(width, inner).items()
        }

    params: dict[str, Any] = {
        "router": {"weight": normal("router/weight", experts, width)},
        "experts": expert("experts", hidden, experts),
    }
    if balance:
        params["router"]["balance"] = zeros(experts, dtype=torch.float32)
    if seats:
        params["router"]["seats"] = torch.arange(experts, device=device)
    if replicas:
        params["router"]["replicas"] = torch.full((experts,), -1, device=device)
    if shared:
        params["shared"] = expert("shared", shared)
    if residual:
        params["residual"] = expert("residual", residual) | {"mix": {"weight": zeros(2, width), "bias": zeros(2)}}
    return params


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
        wanted = tuple(x.shape[:-1])
        raise ValueError(f"moe: the mask is {tuple(mask.shape)} of {mask.dtype}; it must be {wanted} of torch.bool")
    if mask is not None and routing is not None:
        raise ValueError("moe: a routing was made with its mask; give mask= or routing=, not both")
    router = params["router"]
    flat = x.reshape(-1, x.shape[-1])
    if router["weight"].shape[1:] != x.shape[-1:]:
        of = tuple(router["weight"].shape)
        raise ValueError(f"moe: x is {tuple(x.shape)} and the router's weight {of}; it must be [experts, width]")
    if routing is None:
        masked = {} if mask is None else {"mask": mask.flatten()}
        routing = route(router, flat, config, tokens_of(x, rng), **masked)
    elif len(routing.experts) != len(flat) or len(routing.counts) != len(router["weight"]):
        raise ValueError(
            f"moe: the routing is of {len(routing.experts)} tokens among {len(routing.counts)} experts, and the layer has "
            f"{len(flat)} among {len(router['weight'])}"
        )
    dispatch = Dispatch(params["experts"], flat, routing, router.get("seats"), router.get("replicas"))
    # What needs no other rank is computed while tokens travel; of x as it is, whose sequence slices may have to gather.
    residual = _residual(params["residual"], x, config) if "residual" in params else None
    shared = _shared(params["shared"], x, config) if "shared" in params else None
    y = dispatch.combined(config.compute).view(x.shape)
    if residual is not None:
        shares, other = residual
        y = shares[..., :1] * y + shares[..., 1:] * other
    return y if shared is None else y + shared, routing


def route(
    router: Mapping[str, Any], x: torch.Tensor, config: MoEConfig, tokens: Tokens | None = None, **masked: torch.Tensor
) -> Routing:
    """The routing of ``x`` ``[T, W]`` by a layer's "router"; by the random numbers of ``tokens``, if it is to have any."""
    balance, bias = router.get("balance"), router.get("bias")
    dtype = torch.promote_types(x.dtype, torch.float32)
    noisy = _jittered(x, config.jitter, tokens).to(dtype)
    logits = F.linear(noisy, router["weight"].to(dtype), None if bias is None else bias.to(dtype))
    return config.router(logits, tokens, None if balance is None else balance.detach(), **masked)


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
