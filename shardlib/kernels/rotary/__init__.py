"""Rotary position embedding."""

from shardlib.kernels.rotary.op import angles, rotary

__all__ = ["angles", "rotary"]
