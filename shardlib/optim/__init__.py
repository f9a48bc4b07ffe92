"""Gradient transformations in optax's shape, schedules and loss scaling."""

from shardlib.optim.adam import adam, adamw
from shardlib.optim.base import GradientTransformation, Locality
from shardlib.optim.clip import clip_by_global_norm
from shardlib.optim.combine import chain
from shardlib.optim.schedules import constant, cosine, linear
from shardlib.optim.sgd import sgd
from shardlib.optim.shards import Shards, apply_updates

__all__ = [
    "GradientTransformation",
    "Locality",
    "Shards",
    "adam",
    "adamw",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "linear",
    "sgd",
]
