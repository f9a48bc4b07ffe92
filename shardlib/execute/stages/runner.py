"""The choice of a runner for a plan."""

from __future__ import annotations

from typing import Any

from shardlib.execute.stages.base import Runner
from shardlib.execute.stages.one import OneStage
from shardlib.execute.stages.pipe import Pipe
from shardlib.mesh.mesh import Mesh
from shardlib.plan.plan import Plan


def runner_of(fn: Any, plan: Plan, mesh: Mesh, trained: bool, with_buffers: bool = False) -> Runner:
    """The runner of ``fn`` on a plan. Raises what `OneStage` and `Pipe` raise."""
    runner = Pipe if plan.stages.axes else OneStage
    return runner(fn, plan, mesh, trained, with_buffers)
