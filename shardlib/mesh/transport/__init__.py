"""Transports: how the ranks along one mesh axis exchange flat tensors, and what a transport of one's own is.

A transport is a class with what `Group` names:

- ``size`` and ``rank``: how many ranks there are along the axis, and the number of this one among them;
- ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``permute``, ``send``, ``recv``: start an
  exchange of contiguous tensors, and return a `Work`, whose ``wait`` returns once the output may be used;
- ``all_gather_object``: every rank's small picklable value, at once; for set-up, not for steps.

``mesh.with_transport(make)`` gives a mesh that uses it: ``make(axis, group)`` is called for each axis with other ranks, and
may put its transport before the ``group`` that is there (to count, to delay, to log) or in its place.
"""

from shardlib.mesh.transport.base import Group, Work
from shardlib.mesh.transport.echo import EchoGroup
from shardlib.mesh.transport.process import ProcessGroup
from shardlib.mesh.transport.simulated import SimulatedGroup
from shardlib.mesh.transport.simulation import Simulation

__all__ = ["EchoGroup", "Group", "ProcessGroup", "SimulatedGroup", "Simulation", "Work"]
