"""Gradient transformations in optax's shape, schedules and loss scaling."""

from shardlib.optim.adafactor import adafactor
from shardlib.optim.adagrad import adagrad
from shardlib.optim.adam import adam, adamw
from shardlib.optim.averages import ema, swa
from shardlib.optim.base import GradientTransformation
from shardlib.optim.clip import clip_by_block_norm, clip_by_global_norm, clip_by_value
from shardlib.optim.combine import chain, named_chain
from shardlib.optim.decay import add_decayed_weights
from shardlib.optim.from_torch import from_torch
from shardlib.optim.inject import inject_hyperparams
from shardlib.optim.lamb import lamb
from shardlib.optim.locality import Locality
from shardlib.optim.lookahead import lookahead
from shardlib.optim.masked import masked, partition
from shardlib.optim.muon import muon
from shardlib.optim.noise import add_noise
from shardlib.optim.nonfinite import skip_nonfinite
from shardlib.optim.onebit_adam import onebit_adam
from shardlib.optim.onebit_lamb import onebit_lamb
from shardlib.optim.rmsprop import rmsprop
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
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "add_decayed_weights",
    "add_noise",
    "apply_updates",
    "chain",
    "clip_by_block_norm",
    "clip_by_global_norm",
    "clip_by_value",
    "constant",
    "cosine",
    "ema",
    "from_torch",
    "inject_hyperparams",
    "lamb",
    "linear",
    "lookahead",
    "masked",
    "muon",
    "named_chain",
    "onebit_adam",
    "onebit_lamb",
    "partition",
    "rmsprop",
    "sgd",
    "skip_nonfinite",
    "swa",
    "zero_one_adam",
]
