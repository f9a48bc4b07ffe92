"""Routers: functions ``router(logits, rng=None, balance=None, mask=None) -> Routing``, and what they are made of."""

from shardlib.nn.moe.placement import balanced_replicas, balanced_seats
from shardlib.nn.moe.routers.base import Router, balanced, entropy, load_loss, z_loss
from shardlib.nn.moe.routers.expert_choice import expert_choice
from shardlib.nn.moe.routers.gshard import gshard
from shardlib.nn.moe.routers.switch import switch
from shardlib.nn.moe.routers.top_k import top_k
from shardlib.nn.moe.routing import Capacity, Routing

__all__ = [
    "Capacity",
    "Router",
    "Routing",
    "balanced",
    "balanced_replicas",
    "balanced_seats",
    "entropy",
    "expert_choice",
    "gshard",
    "load_loss",
    "switch",
    "top_k",
    "z_loss",
]
