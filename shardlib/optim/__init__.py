"""Gradient transformations in optax's shape, schedules and loss scaling."""

from shardlib.optim.adam import adam, adamw
from shardlib.optim.adam8bit import adamw8bit
from shardlib.optim.base import GradientTransformation, Locality
from shardlib.optim.clip import clip_by_global_norm
from shardlib.optim.combine import chain
from shardlib.optim.cycles import (
    OneCycle,
    cosine_onecycle_schedule,
    linear_onecycle_schedule,
    lr_range_test_schedule,
    one_cycle,
)
from shardlib.optim.lamb import lamb
from shardlib.optim.large_batch import linear_scaling, sqrt_scaling
from shardlib.optim.lion import lion
from shardlib.optim.onebit_adam import onebit_adam
from shardlib.optim.onebit_lamb import onebit_lamb
from shardlib.optim.schedules import (
    Schedule,
    constant_schedule,
    cosine_decay_schedule,
    exponential_decay,
    join_schedules,
    linear_schedule,
    piecewise_constant_schedule,
    piecewise_interpolate_schedule,
    polynomial_schedule,
)
from shardlib.optim.sgd import sgd
from shardlib.optim.shards import Shards, apply_updates
from shardlib.optim.warmup import (
    warmup_constant_schedule,
    warmup_cosine_decay_schedule,
    warmup_exponential_decay_schedule,
    warmup_linear_decay_schedule,
    warmup_stable_decay_schedule,
)
from shardlib.optim.zero_one_adam import zero_one_adam
from shardlib.optim.zero_one_steps import Sent, ZeroOneSteps

__all__ = [
    "GradientTransformation",
    "Locality",
    "OneCycle",
    "Schedule",
    "Sent",
    "Shards",
    "ZeroOneSteps",
    "adam",
    "adamw",
    "adamw8bit",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "constant_schedule",
    "cosine_decay_schedule",
    "cosine_onecycle_schedule",
    "exponential_decay",
    "join_schedules",
    "lamb",
    "linear_onecycle_schedule",
    "linear_scaling",
    "linear_schedule",
    "lr_range_test_schedule",
    "one_cycle",
    "lion",
    "onebit_adam",
    "onebit_lamb",
    "piecewise_constant_schedule",
    "piecewise_interpolate_schedule",
    "polynomial_schedule",
    "sgd",
    "sqrt_scaling",
    "warmup_constant_schedule",
    "warmup_cosine_decay_schedule",
    "warmup_exponential_decay_schedule",
    "warmup_linear_decay_schedule",
    "warmup_stable_decay_schedule",
    "zero_one_adam",
]
