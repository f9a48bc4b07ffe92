"""`simulate`: every rank in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextvars import copy_context
from typing import Any, TypeVar, TypeVarTuple

import torch

from shardlib.common.environment import settle
from shardlib.mesh.mesh import Mesh, check_shape, simulated_mesh
from shardlib.mesh.transport import Simulation
from shardlib.mesh.transport.activity import begin_rank

Ts = TypeVarTuple("Ts")
R = TypeVar("R")


def simulate(
    fn: Callable[[Mesh, *Ts], R], *args: *Ts, mesh: Mapping[str, int], device: str | torch.device = "cpu"
) -> list[R]:
    """Run ``fn(mesh, *args)`` on every rank of ``mesh`` in this process; returns the ranks' values.

    Ranks are threads that run one at a time and switch only where a collective waits, so a run is deterministic. Each rank
    draws from torch's generator as a process would. A failure on one rank stops all ranks and is raised here, with
    the rank's number. Ranks that call different collectives, or wait for each other for ever, are reported at once. ``args``
    are shared by the ranks: make models inside ``fn``.

    Ctrl-C (a notebook's stop button) ends the ranks at their next collective, or after two seconds wherever they are, and
    then raises KeyboardInterrupt. A rank inside one long operation ends after it, and a note on the error names the rank.

    Args:
        mesh: axis name -> size.
        device: where the tensors of all ranks live.

    Raises:
        TypeError: a mesh that is no mapping.

    >>> sl.simulate(lambda mesh, n: n * mesh.coords["data"], 10, mesh=dict(data=4))
    [0, 10, 20, 30]
    """
    shape, where = check_shape(mesh), torch.device(device)
    ranks = math.prod(shape.values())
    simulation = Simulation(ranks)
    exchanges: dict[Any, Any] = {}

    def body(rank: int) -> Callable[[], R]:
        view = simulated_mesh(shape, rank, simulation, exchanges, where)

        def run() -> R:
            settle(mesh=view)
            begin_rank()
            return fn(view, *args)

        context = copy_context()
        return lambda: context.run(run)

    return simulation.run([body(rank) for rank in range(ranks)])
