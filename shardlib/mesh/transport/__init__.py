"""Transports, by which the ranks along one mesh axis exchange flat tensors."""

from shardlib.mesh.transport.base import Group, Work
from shardlib.mesh.transport.echo import EchoGroup
from shardlib.mesh.transport.process import ProcessGroup
from shardlib.mesh.transport.simulated import SimulatedGroup
from shardlib.mesh.transport.simulation import Simulation

__all__ = ["EchoGroup", "Group", "ProcessGroup", "SimulatedGroup", "Simulation", "Work"]
