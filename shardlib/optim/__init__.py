"""Gradient transformations in optax's shape, schedules and loss scaling."""

from shardlib.optim.adam import adam, adamw
from shardlib.optim.base import GradientTransformation
from shardlib.optim.clip import clip_by_global_norm
from shardlib.optim.combine import chain
from shardlib.optim.lamb import lamb
from shardlib.optim.locality import Locality
from shardlib.optim.onebit_adam import onebit_adam
from shardlib.optim.onebit_lamb import onebit_lamb
from shardlib.optim.schedules import constant, cosine, linear
from shardlib.optim.sgd import sgd
from shardlib.optim.shards import Shards, apply_updates
from shardlib.optim.zero_one_adam import zero_one_adam
from shardlib.optim.zero_one_steps import Sent, ZeroOneSteps

__all__ = [
    "GradientTransformation",
    "Locality",
    "Sent",
    "Shards",
    "ZeroOneSteps",
    "adam",
    "adamw",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "lamb",
    "linear",
    "onebit_adam",
    "onebit_lamb",
    "sgd",
    "zero_one_adam",
]
