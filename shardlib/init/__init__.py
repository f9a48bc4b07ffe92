"""Initialisers by counter-based keys, and the deferred initialisation of a model leaf by leaf."""

from shardlib.init.draws import (
    kaiming_normal,
    kaiming_uniform,
    normal,
    truncated_normal,
    uniform,
    xavier_normal,
    xavier_uniform,
)

__all__ = [
    "kaiming_normal",
    "kaiming_uniform",
    "normal",
    "truncated_normal",
    "uniform",
    "xavier_normal",
    "xavier_uniform",
]
