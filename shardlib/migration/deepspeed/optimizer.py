"""The optimizer of a ds_config, and the schedule of its rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardlib.migration import optimizers
from shardlib.migration.calls import Call, Variable
from shardlib.migration.draft import Draft, rate
from shardlib.migration.reader import Reader

_LR = 1e-3  # of DeepSpeed's optimizers, where none is given


def read_schedule(reader: Reader, draft: Draft) -> None:
    makers = {
        "WarmupLR": _warmup,
        "WarmupDecayLR": _decay,
        "WarmupCosineLR": _cosine,
        "LRRangeTest": _range_test,
        "OneCycle": _one_cycle,
    }
    kind = reader.choice("scheduler.type", tuple(makers))
    if kind is not None:
        makers[kind](reader, draft)


def _lr(reader: Reader) -> float:
    if reader.given("optimizer"):
        return float(reader.number("optimizer.params.lr", _LR))
    if (lr := reader.filled.get("optimizer.params.lr")) is None:
        reader.refuse(
            "scheduler.type", "its rate is that of an optimizer, and there is none; write optimizer.params.lr"
        )
    return float(_LR if lr is None else lr)


def _warm(reader: Reader, default_peak: float | None) -> tuple[float, float, int, dict[str, Any]]:
    at = "scheduler.params."
    steps = max(2, reader.integer(f"{at}warmup_num_steps", 1000))
    shape = reader.choice(f"{at}warmup_type", ("log", "linear"), "log")
    peak = reader.number(f"{at}warmup_max_lr", default_peak)
    peak = _lr(reader) if peak is None else float(peak)
    return float(reader.number(f"{at}warmup_min_lr", 0.0)), peak, steps, {"warmup": "log"} if shape == "log" else {}


def _warmup(reader: Reader, draft: Draft) -> None:
    low, high, steps, shape = _warm(reader, None)
    draft.schedule = Call("optim.warmup_constant_schedule", (low, high, steps), shape)


def _decay(reader: Reader, draft: Draft) -> None:
    low, high, steps, shape = _warm(reader, 1e-3)
    if (total := _total(reader, steps)) is not None:
        draft.schedule = Call("optim.warmup_linear_decay_schedule", (low, high, steps, total), shape)


def _cosine(reader: Reader, draft: Draft) -> None:
    at, lr = "scheduler.params.", _lr(reader)
    steps = max(2, reader.integer(f"{at}warmup_num_steps", 1000))
    shape = reader.choice(f"{at}warmup_type", ("log", "linear"), "log")
    low = lr * float(reader.number(f"{at}warmup_min_ratio", 0.0))
    last = lr * float(reader.number(f"{at}cos_min_ratio", 1e-4))
    if (total := _total(reader, steps)) is not None:
        draft.schedule = Call(
            "optim.warmup_cosine_decay_schedule",
            (low, lr, steps, total, last),
            {"warmup": "log"} if shape == "log" else {},
        )


def _total(reader: Reader, warmup: int) -> int | None:
    key = "scheduler.params.total_num_steps"
    total = reader.integer(key)
    if total is None or total <= warmup:
        reader.refuse(
            key if reader.given(key) else "scheduler.type",
            f"{total} steps leave none to decay after {warmup} of warm-up; write a larger {key}",
        )
        return None
    return total


def _range_test(reader: Reader, draft: Draft) -> None:
    at = "scheduler.params.lr_range_test_"
    stairs = reader.given(f"{at}staircase") and reader.flag(f"{at}staircase")
    draft.schedule = Call(
        "optim.lr_range_test_schedule",
        (
            float(reader.number(f"{at}min_lr", 1e-3)),
            reader.integer(f"{at}step_size", 2000),
            float(reader.number(f"{at}step_rate", 1.0)),
        ),
        {"staircase": True} if stairs else {},
    )


def _one_cycle(reader: Reader, draft: Draft) -> None:
    at = "scheduler.params."
    first = reader.integer(f"{at}cycle_first_step_size", 2000)
    options: dict[str, Any] = {}
    if (second := reader.integer(f"{at}cycle_second_step_size")) is not None and second != first:
        options["second_steps"] = second
    decay, interval = reader.number(f"{at}decay_lr_rate", 0.0), reader.integer(f"{at}decay_step_size", 0)
    if decay and interval:
        options |= {"decay_rate": float(decay), "decay_steps": interval}
    for ours, theirs in {"min_momentum": "cycle_min_mom", "max_momentum": "cycle_max_mom"}.items():
        if (value := reader.number(f"{at}{theirs}")) is not None:
            options[ours] = float(value)
    low, high = reader.number(f"{at}cycle_min_lr"), reader.number(f"{at}cycle_max_lr")
    if low is None or high is None:
        reader.refuse("scheduler.type", f"OneCycle needs {at}cycle_min_lr and {at}cycle_max_lr; write both")
        return
    draft.program["cycle"] = Call("optim.one_cycle", (float(low), float(high), first), options)
    draft.schedule = Variable("cycle.lr")


def read_optimizer(reader: Reader, draft: Draft) -> None:
    norm = reader.number("gradient_clipping", 0.0)
    inner = reader.number("optimizer.params.max_grad_norm", 0.0)
    draft.clip = float(norm or inner or 0.0) or None
    for key, value in (("gradient_clipping", norm), ("optimizer.params.max_grad_norm", inner)):
        if reader.given(key) and not value:
            reader.skip(key, "0 clips nothing")
    kind = reader.read("optimizer.type")
    if kind is None:
        return
    maker = OPTIMIZERS.get(str(kind).lower())
    if maker is None:
        known = "Adam, AdamW, Lamb, Lion, Adagrad, Muon, OneBitAdam, ZeroOneAdam, OneBitLamb, SGD, RMSprop"
        reader.refuse(
            "optimizer.type",
            f"{kind!r} is not known; write one of {known}, or leave it out and give sl.optim.from_torch(torch.optim.{kind}, "
            "...) to make_train_step",
        )
        return
    corrected = "optimizer.params.bias_correction"
    if (
        reader.given(corrected)
        and not reader.flag(corrected, True)
        and not str(kind).lower().startswith(("onebit", "zero"))
    ):
        reader.refuse(corrected, "means are corrected for their start at 0; leave it out")
    draft.optimizer = maker(reader, draft)
    if draft.clip and str(kind).lower() in ("onebitadam", "zerooneadam", "onebitlamb"):
        key = "gradient_clipping" if norm else "optimizer.params.max_grad_norm"
        reader.refuse(
            key,
            f"{kind} takes gradients before they are summed, so nobody knows their norm; write 0, or another optimizer",
        )
        draft.clip = None
    cycle = "scheduler.params.cycle_momentum"
    if "cycle" in draft.program and reader.flag(cycle, True):
        if str(kind).lower() in ("adam", "adamw") and draft.optimizer.function == "optim.adamw":
            made = draft.optimizer
            options = {**made.options, "b1": Variable("cycle.momentum"), "b2": 0.99}
            draft.optimizer = Call(Call("optim.inject_hyperparams", (Variable("sl.optim.adamw"),)), made.args, options)
        elif reader.given(cycle):
            reader.refuse(cycle, f"the momentum of {kind} does not follow the cycle; write false, or AdamW")


def _moments(reader: Reader, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> tuple[Any, float, float]:
    given = reader.read("optimizer.params.betas", betas)
    if not (
        isinstance(given, (list, tuple)) and len(given) == 2 and all(isinstance(each, (int, float)) for each in given)
    ):
        reader.refuse("optimizer.params.betas", f"{given!r} are not two numbers; write [0.9, 0.999]")
        given = betas
    decay = float(reader.number("optimizer.params.weight_decay", 0.0))
    return given, float(reader.number("optimizer.params.eps", eps)), decay


def _adam(reader: Reader, draft: Draft) -> Call:
    betas, eps, decay = _moments(reader)
    coupled = str(reader.value("optimizer.type")).lower() == "adam" and any(
        reader.given(key) and not reader.flag(key, True)
        for key in ("optimizer.params.adam_w_mode", "optimizer.params.adamw_mode")
    )
    return optimizers.adam(rate(draft, _lr(reader)), betas, eps, decay, decoupled=not coupled)


def _lamb(reader: Reader, draft: Draft) -> Call:
    betas, eps, decay = _moments(reader)
    options = {"b1": betas[0], "b2": betas[1], "eps": eps, "weight_decay": decay, **_bounds(reader)}
    return Call("optim.lamb", (rate(draft, _lr(reader)),), options)


def _bounds(reader: Reader) -> dict[str, float]:
    """Bounds of LAMB's trust ratio."""
    found = {name: reader.number(f"optimizer.params.{name}") for name in ("min_coeff", "max_coeff")}
    return {name: float(value) for name, value in found.items() if value is not None}


def _lion(reader: Reader, draft: Draft) -> Call:
    betas, _, decay = _moments(reader)
    return Call("optim.lion", (rate(draft, _lr(reader)),), {"b1": betas[0], "b2": betas[1], "weight_decay": decay})


def _adagrad(reader: Reader, draft: Draft) -> Call:
    lr = float(reader.number("optimizer.params.lr", 1e-2))
    eps, decay = reader.number("optimizer.params.eps", 1e-10), reader.number("optimizer.params.weight_decay", 0.0)
    return optimizers.adagrad(
        rate(draft, lr), eps, decay, reader.number("optimizer.params.initial_accumulator_value", 0.0)
    )


def _muon(reader: Reader, draft: Draft) -> Call:
    betas, eps, decay = _moments(reader)
    shared = reader.number("optimizer.params.lr")
    fast, slow = reader.number("optimizer.params.muon_lr", shared), reader.number("optimizer.params.adam_lr", shared)
    if draft.schedule is not None and len({shared, fast, slow}) > 1:
        reader.refuse(
            "scheduler.type",
            "the schedule would be the rate of both parts, which differ; scale it for each: lambda step: 10 * schedule(step)",
        )
    rest = optimizers.adam(rate(draft, 3e-4 if slow is None else slow), betas, eps, decay)
    momentum = reader.number("optimizer.params.momentum", 0.95)
    return optimizers.muon(
        rate(draft, 0.02 if fast is None else fast),
        momentum,
        reader.integer("optimizer.params.ns_steps", 5),
        reader.flag("optimizer.params.nesterov", True),
        decay,
        rest,
    )


def _sgd(reader: Reader, draft: Draft) -> Call:
    at = "optimizer.params."
    return optimizers.sgd(
        rate(draft, _lr(reader)),
        reader.number(f"{at}momentum", 0.0),
        reader.flag(f"{at}nesterov"),
        reader.number(f"{at}weight_decay", 0.0),
    )


def _rmsprop(reader: Reader, draft: Draft) -> Call:
    at = "optimizer.params."
    return optimizers.rmsprop(
        rate(draft, float(reader.number(f"{at}lr", 1e-2))),
        reader.number(f"{at}alpha", 0.99),
        reader.number(f"{at}eps", 1e-8),
        reader.number(f"{at}momentum", 0.0),
        reader.flag(f"{at}centered"),
        reader.number(f"{at}weight_decay", 0.0),
    )


def _onebit_adam(reader: Reader, draft: Draft) -> Call:
    betas, eps, decay = _moments(reader)
    freeze = reader.integer("optimizer.params.freeze_step", 100000)
    options = {"b1": betas[0], "b2": betas[1], "eps": eps, "weight_decay": decay}
    return Call("optim.onebit_adam", (rate(draft, _lr(reader)), freeze), options)


def _zero_one_adam(reader: Reader, draft: Draft) -> Call:
    betas, eps, decay = _moments(reader)
    options: dict[str, Any] = {"b1": betas[0], "b2": betas[1], "eps": eps, "weight_decay": decay}
    for name in ("var_update_scaler", "local_step_scaler", "local_step_clipper"):
        if (value := reader.integer(f"optimizer.params.{name}")) is not None:
            options[name] = value
    freeze = reader.integer("optimizer.params.var_freeze_step", 100000)
    return Call("optim.zero_one_adam", (rate(draft, _lr(reader)), freeze), options)


def _onebit_lamb(reader: Reader, draft: Draft) -> Call:
    betas, eps, decay = _moments(reader)
    options: dict[str, Any] = {"b1": betas[0], "b2": betas[1], "eps": eps, "weight_decay": decay, **_bounds(reader)}
    names = {
        "coeff_beta": "coeff_beta",
        "min_factor": "factor_min",
        "max_factor": "factor_max",
        "factor_threshold": "factor_threshold",
    }
    for ours, theirs in names.items():
        if (value := reader.number(f"optimizer.params.{theirs}")) is not None:
            options[ours] = float(value)
    freeze = reader.integer("optimizer.params.freeze_step", 100000)
    return Call("optim.onebit_lamb", (rate(draft, _lr(reader)), freeze), options)


OPTIMIZERS: dict[str, Callable[[Reader, Draft], Call]] = {
    "adam": _adam,
    "adamw": _adam,
    "lamb": _lamb,
    "lion": _lion,
    "adagrad": _adagrad,
    "muon": _muon,
    "sgd": _sgd,
    "rmsprop": _rmsprop,
    "onebitadam": _onebit_adam,
    "zerooneadam": _zero_one_adam,
    "onebitlamb": _onebit_lamb,
}
