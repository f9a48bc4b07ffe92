"""Gradient transformations in optax's shape, and learning-rate schedules.

An optimizer of one's own is ``GradientTransformation(init, update, locality)``, two pure functions as in optax that also take
``shards``: ``init(params, shards) -> state`` and ``update(updates, state, params, shards=...) -> (updates, state)``. A train
step calls them with trees of this rank's flat shards. `Locality` declares what is read beyond the element that is written,
and a method of `Shards` reads it: sums over all elements, sums over each parameter, or whole parameters.
"""

from shardlib.collectives.summation import SumOf
from shardlib.optim.axis_owner.onebit_adam import onebit_adam
from shardlib.optim.axis_owner.onebit_lamb import onebit_lamb
from shardlib.optim.axis_owner.zero_one_adam import Sent, ZeroOneSteps, zero_one_adam
from shardlib.optim.base import GradientTransformation, Owned
from shardlib.optim.combine import chain, named_chain
from shardlib.optim.norms import global_norm, leaf_norms, vdot
from shardlib.optim.optimizers.adafactor import adafactor
from shardlib.optim.optimizers.adagrad import adagrad
from shardlib.optim.optimizers.adam import adam, adamw, add_decayed_weights
from shardlib.optim.optimizers.adam8bit import adamw8bit
from shardlib.optim.optimizers.clip import adaptive_grad_clip, clip_by_block_norm, clip_by_global_norm, clip_by_value
from shardlib.optim.optimizers.lamb import lamb
from shardlib.optim.optimizers.lion import lion
from shardlib.optim.optimizers.muon import muon
from shardlib.optim.optimizers.noise import add_noise
from shardlib.optim.optimizers.rmsprop import rmsprop
from shardlib.optim.optimizers.sgd import sgd
from shardlib.optim.schedules.base import (
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
from shardlib.optim.schedules.cycles import (
    OneCycle,
    cosine_onecycle_schedule,
    linear_onecycle_schedule,
    lr_range_test_schedule,
    one_cycle,
)
from shardlib.optim.schedules.large_batch import batch_schedule, linear_scaling, sqrt_scaling, token_schedule
from shardlib.optim.schedules.warmup import (
    warmup_constant_schedule,
    warmup_cosine_decay_schedule,
    warmup_exponential_decay_schedule,
    warmup_linear_decay_schedule,
    warmup_stable_decay_schedule,
)
from shardlib.optim.shards import Locality, Shards
from shardlib.optim.storing import apply_updates
from shardlib.optim.wrappers.averages import ema, swa
from shardlib.optim.wrappers.from_torch import from_torch
from shardlib.optim.wrappers.inject import inject_hyperparams
from shardlib.optim.wrappers.lookahead import lookahead
from shardlib.optim.wrappers.masked import masked, partition
from shardlib.optim.wrappers.nonfinite import skip_nonfinite
from shardlib.optim.wrappers.rounding import stochastic_rounding
from shardlib.optim.wrappers.unused import skip_unused

__all__ = [
    "GradientTransformation",
    "Locality",
    "OneCycle",
    "Owned",
    "Schedule",
    "Sent",
    "Shards",
    "SumOf",
    "ZeroOneSteps",
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "add_decayed_weights",
    "add_noise",
    "adamw8bit",
    "adaptive_grad_clip",
    "apply_updates",
    "batch_schedule",
    "chain",
    "clip_by_block_norm",
    "clip_by_global_norm",
    "clip_by_value",
    "constant_schedule",
    "cosine_decay_schedule",
    "cosine_onecycle_schedule",
    "ema",
    "exponential_decay",
    "from_torch",
    "global_norm",
    "inject_hyperparams",
    "join_schedules",
    "lamb",
    "leaf_norms",
    "linear_onecycle_schedule",
    "linear_scaling",
    "linear_schedule",
    "lion",
    "lookahead",
    "lr_range_test_schedule",
    "masked",
    "muon",
    "named_chain",
    "one_cycle",
    "onebit_adam",
    "onebit_lamb",
    "partition",
    "piecewise_constant_schedule",
    "piecewise_interpolate_schedule",
    "polynomial_schedule",
    "rmsprop",
    "sgd",
    "skip_nonfinite",
    "skip_unused",
    "sqrt_scaling",
    "stochastic_rounding",
    "swa",
    "token_schedule",
    "vdot",
    "warmup_constant_schedule",
    "warmup_cosine_decay_schedule",
    "warmup_exponential_decay_schedule",
    "warmup_linear_decay_schedule",
    "warmup_stable_decay_schedule",
    "zero_one_adam",
]
