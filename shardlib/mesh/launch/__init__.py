"""Run a function on many ranks: real processes (`launch`) or all of them in this process (`simulate`)."""

from shardlib.mesh.launch.processes import launch
from shardlib.mesh.launch.simulate import simulate

__all__ = ["launch", "simulate"]
