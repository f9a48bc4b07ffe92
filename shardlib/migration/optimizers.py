"""Optimizers and schedules by the names and numbers that torch, DeepSpeed, torchtitan and transformers give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardlib.migration.calls import Call, Verbatim


def adam(lr: Any, betas: Any, eps: float, weight_decay: float, *, decoupled: bool = True, kind: str = "adamw") -> Call:
    """Adam: with weight decay of its own, or as a part of the gradient."""
    moments = {"b1": float(betas[0]), "b2": float(betas[1]), "eps": float(eps)}
    if decoupled:
        return Call(f"optim.{kind}", (lr,), {**moments, "weight_decay": float(weight_decay)})
    return decayed(Call("optim.adam", (lr,), moments), weight_decay)


def decayed(optimizer: Call, weight_decay: float) -> Call:
    """An optimizer with ``weight_decay * p`` added to the gradient, as torch's older ones."""
    if not weight_decay:
        return optimizer
    return Call("optim.chain", (Call("optim.add_decayed_weights", (float(weight_decay),)), optimizer))


def adagrad(lr: Any, eps: float, weight_decay: float, initial: float = 0.0) -> Call:
    """torch's Adagrad divides by √s + eps, and this one by √(s + eps²), which differs where s is near eps² alone."""
    made = Call("optim.adagrad", (lr,), {"initial_accumulator_value": float(initial), "eps": float(eps) ** 2})
    return decayed(made, weight_decay)


def sgd(lr: Any, momentum: float, nesterov: bool, weight_decay: float) -> Call:
    """torch's SGD, without dampening."""
    options = {"momentum": float(momentum)} if momentum else {}
    if nesterov:
        options["nesterov"] = True
    return decayed(Call("optim.sgd", (lr,), options), weight_decay)


def rmsprop(lr: Any, alpha: float, eps: float, momentum: float, centered: bool, weight_decay: float) -> Call:
    """torch's RMSprop."""
    options: dict[str, Any] = {"decay": float(alpha), "eps": float(eps), "eps_in_sqrt": False}
    if centered:
        options["centered"] = True
    if momentum:
        options["momentum"] = float(momentum)
    return decayed(Call("optim.rmsprop", (lr,), options), weight_decay)


def muon(lr: Any, momentum: float, ns_steps: int, nesterov: bool, weight_decay: float, rest: Call) -> Call:
    """Muon for matrices, and ``rest`` for vectors, embeddings and the output layer."""
    options: dict[str, Any] = {"beta": float(momentum), "weight_decay": float(weight_decay)}
    if ns_steps != 5:
        options["ns_steps"] = ns_steps
    if not nesterov:
        options["nesterov"] = False
    text = 'lambda path, shape: "muon" if len(shape) > 1 and "embed" not in path and "lm_head" not in path else "rest"'
    return Call("optim.partition", ({"muon": Call("optim.muon", (lr,), options), "rest": rest}, Verbatim(text, _label)))


def _label(path: str, shape: tuple[int, ...]) -> str:
    return "muon" if len(shape) > 1 and "embed" not in path and "lm_head" not in path else "rest"


def weighted(options: Mapping[str, Any]) -> float:
    """The weight decay among arguments of an optimizer."""
    return float(options.get("weight_decay") or 0.0)


def warm_stay_decay(
    first: float,
    peak: float,
    warmup: int,
    stay: int,
    decay: int,
    last: float,
    shape: str = "linear",
    power: float = 1.0,
) -> Call:
    """``warmup`` steps up to the peak, ``stay`` there, and ``decay`` down to ``last``, as a line or half a cosine."""
    if not decay:
        return Call("optim.warmup_constant_schedule", (first, peak, warmup))
    if shape == "cosine":
        if not stay:
            return Call("optim.warmup_cosine_decay_schedule", (first, peak, warmup, warmup + decay, last))
        rise = Call("optim.warmup_constant_schedule", (first, peak, warmup))
        fall = Call("optim.cosine_decay_schedule", (peak, decay, last / peak))
        return Call("optim.join_schedules", ([rise, fall], [warmup + stay]))
    if not stay and power == 1:
        return Call("optim.warmup_linear_decay_schedule", (first, peak, warmup, warmup + decay, last))
    options = {} if power == 1 else {"power": float(power)}
    return Call("optim.warmup_stable_decay_schedule", (first, peak, warmup, stay, decay, last), options)
