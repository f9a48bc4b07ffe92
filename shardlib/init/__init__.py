"""Initialisers, and initialising piece by piece."""

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
