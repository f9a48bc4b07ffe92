"""Transports: how the ranks along one mesh axis exchange flat tensors."""

from shardlib.groups.base import Group, Work
from shardlib.groups.echo import EchoGroup
from shardlib.groups.process import ProcessGroup
from shardlib.groups.simulated import SimulatedGroup
from shardlib.groups.simulation import Simulation

__all__ = ["EchoGroup", "Group", "ProcessGroup", "SimulatedGroup", "Simulation", "Work"]
