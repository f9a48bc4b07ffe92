"""Tracing on fake tensors, which have no values: of plans on any number of ranks, before there is one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardlib.common._compat import DataDependentOutputException, FakeTensorMode
from shardlib.execute.losses import require_function
from shardlib.execute.stages.tracing import trace, walk
from shardlib.execute.stages.walk import Walk
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport import EchoGroup
from shardlib.nn.blocks import Sequential
from shardlib.plan.plan import Plan
from shardlib.plan.records import Trace
from shardlib.plan.reductions import Reductions
from shardlib.plan.tiers.depth import short_form
from shardlib.plan.tiers.known import seen_in_traces
from shardlib.rng import Key
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, tree_map

_log = logging.getLogger("shardlib.plan")
_KEY = Key(0)
_UNEVEN = "if values decide which units a rank uses, all ranks gather the units that any rank uses"


@dataclass(frozen=True)
class Tracing:
    """Traces of one loss function under any plan.

    Attributes:
        batch: one rank's share, on any device.
        buffers: those that the loss takes, or None.
        device: the ranks' device.
        step: the number of the step, for what it leaves out of layers; None for a step that leaves out nothing.
        key: of the step.
    """

    loss_fn: Callable[..., Any]
    batch: Tree
    buffers: Tree
    device: torch.device
    step: int | None = None
    key: Key = _KEY

    def traced(self, plan: Plan) -> Plan:
        """The plan with its traces, from one micro-batch. If tracing fails, a note in the log says so."""
        try:
            with self._setting(plan) as setting:
                return replace(plan, traces=trace(self.loss_fn, *setting, self.key, self.step))
        except DataDependentOutputException as error:
            notes = f"not traced: the loss reads values ({error})", _UNEVEN
            return replace(plan, claims=plan.claims and plan.claims.noting(notes))

    def walk(self, plan: Plan) -> Walk:
        """What one micro-batch does, under a plan of one stage."""
        with self._setting(plan) as setting:
            return walk(self.loss_fn, *setting, self.key, self.step)

    @contextmanager
    def _setting(self, plan: Plan) -> Iterator[tuple[Plan, Mesh, Sharded, Tree, Tree]]:
        """What a plan is traced with."""
        needed = "params, batch" if self.buffers is None else "params, buffers, batch"
        require_function(self.loss_fn, "the loss function", needed)
        groups = {axis: EchoGroup(size) for axis, size in plan.sizes.items()}
        mesh = Mesh(plan.sizes, 0, groups, self.device, abstract=True)
        fake = FakeTensorMode(allow_non_fake_inputs=True)

        def pretend(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if leaf.device == self.device or leaf.layout is not torch.strided:
                return fake.from_tensor(leaf)
            with fake:  # a tensor of another device, or without memory: the trace runs on one device
                return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=self.device)

        batch, buffers = tree_map(pretend, self.batch), tree_map(pretend, self.buffers)
        # Codecs' kernels do not run on tensors without values, so everything is sent uncompressed.
        plain = replace(plan, reductions=Reductions(second_level=plan.reductions.second_level))
        with fake:
            stored = {
                b.name: torch.empty(b.size(b.param_level), dtype=b.dtype, device=self.device) for b in plan.buckets
            }
            yield plain, mesh, Sharded(plain, mesh, "param", stored), batch, buffers


class Shortly:
    """Traces of deep functions from short forms of their plans. A short form serves any number of blocks."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._walks: list[tuple[Plan, Walk | None]] = []

    def __call__(self, plan: Plan) -> tuple[Trace, ...] | None:
        """The traces of a plan; None where no short form shows them."""
        loss_fn = self._tracing.loss_fn
        sequential = isinstance(loss_fn, Sequential)
        short = short_form(plan, sequential=sequential)
        if short is None:
            return None
        tracing = self._tracing
        if isinstance(loss_fn, Sequential):
            functions = loss_fn.functions
            gone = set(range(len(functions))).difference(short.kept)
            if any(functions[number] is not functions[number - 1] for number in gone):
                return None
            tracing = replace(tracing, loss_fn=Sequential([functions[number] for number in short.kept]))
        walk = self._walk(short.plan, tracing)
        blocks = len(short.stands) + (short.others if sequential else 0)
        if walk is None or walk.blocks != blocks or not all(map(walk.steady, short.repeats)):
            return None
        return (walk.trace(short.repeats, short.stands),)

    def _walk(self, plan: Plan, tracing: Tracing) -> Walk | None:
        seen = seen_in_traces(plan)
        known = next((each for each in self._walks if each[0] == seen), None)
        if known is None:
            try:
                known = seen, tracing.walk(plan)
            except Exception as error:  # the function's own: it may need all of its parameters
                _log.debug("no short form: %s", error)
                known = seen, None
            self._walks.append(known)
        return known[1]
