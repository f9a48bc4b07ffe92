"""Transports, by which the ranks along one mesh axis exchange flat tensors, and the interface of a transport of one's own.

A transport is a class with the attributes and methods of `Group`:

- ``size`` and ``rank``: the number of ranks along the axis, and this rank's index among them;
- ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``permute``, ``send``, ``recv``: start an
  exchange of contiguous tensors, and return a `Work`, whose ``wait`` returns once the output may be used;
- ``all_gather_object``: every rank's small picklable value, blocking; for set-up, not for steps.

``mesh.with_transport(make)`` returns a mesh that uses it. ``make(axis, group)`` is called for each axis with other ranks, and
may return a transport that wraps ``group`` (to count, to delay, to log) or replaces it.
"""

from shardlib.mesh.transport.base import Group, Splits, Work
from shardlib.mesh.transport.echo import EchoGroup
from shardlib.mesh.transport.process import ProcessGroup
from shardlib.mesh.transport.simulation import SimulatedGroup, Simulation

__all__ = ["EchoGroup", "Group", "ProcessGroup", "SimulatedGroup", "Simulation", "Splits", "Work"]
