"""Schedules that several libraries give by the same numbers: warm-up, a rate that stays, a decay."""

from __future__ import annotations

from shardlib.migration.calls import Call


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
