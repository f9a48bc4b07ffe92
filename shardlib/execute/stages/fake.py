"""Tracing on fake tensors, which have no values: of plans on any number of ranks, before there is one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from shardlib.common._compat import FakeTensorMode
from shardlib.errors import ShardlibError
from shardlib.execute.losses import require_function, require_no_buffers
from shardlib.execute.stages.tracing import walks
from shardlib.execute.stages.values import UNKNOWN, Values
from shardlib.execute.stages.walk import Walk
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport import EchoGroup
from shardlib.nn.blocks import Sequential
from shardlib.plan.deduplication import TraceCache, deduplicated, seen_in_traces
from shardlib.plan.exchanges import Reductions
from shardlib.plan.plan import Plan
from shardlib.plan.records import Trace
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
            walks, spans = self.walks(plan), plan.stages.spans
        except Untraceable as error:
            notes = f"not traced: {error}", _UNEVEN
            return replace(plan, claims=plan.claims and plan.claims.noting(notes))
        return replace(plan, traces=tuple(walk.trace(start) for walk, (start, _) in zip(walks, spans, strict=True)))

    def walks(self, plan: Plan) -> tuple[Walk, ...]:
        """What one micro-batch does in each stage.

        Raises:
            Untraceable: the loss reads values that nobody has, or fails on tensors of the largest sizes that they can have.
        """
        values = Values()
        with self._setting(plan, values) as setting:
            try:
                seen = walks(self.loss_fn, *setting, self.key, self.step)
            except UNKNOWN as error:
                raise Untraceable(f"the loss reads values ({error})") from error
            except Exception as error:
                if not values.bounded or isinstance(error, ShardlibError):
                    raise
                why = str(error).partition("\n")[0]
                raise Untraceable(f"sizes depend on values ({', '.join(values.bounded)}): {why}") from error
        return tuple(replace(walk, assumptions=values.assumptions) for walk in seen)

    @contextmanager
    def _setting(self, plan: Plan, values: Values) -> Iterator[tuple[Plan, Mesh, Sharded, Tree, Tree]]:
        """What a plan is traced with."""
        needed = "params, batch" if self.buffers is None else "params, buffers, batch"
        require_function(self.loss_fn, "the loss function", needed)
        if self.buffers is None:
            require_no_buffers(self.loss_fn, "give them by buffers=")
        groups = {axis: EchoGroup(size) for axis, size in plan.sizes.items()}
        mesh = Mesh(plan.sizes, 0, groups, self.device, abstract=True)
        fake = FakeTensorMode(allow_non_fake_inputs=True)

        def pretend(leaf: Any, given: bool = False) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            whole_numbers = not (leaf.is_floating_point() or leaf.is_complex())
            if given and whole_numbers and type(leaf) is torch.Tensor and leaf.device == self.device:
                return values.known(leaf)
            if leaf.device == self.device or leaf.layout is not torch.strided:
                return fake.from_tensor(leaf)
            with fake:  # a tensor of another device, or without memory: the trace runs on one device
                return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=self.device)

        batch, buffers = tree_map(partial(pretend, given=True), self.batch), tree_map(pretend, self.buffers)
        # Codecs' kernels do not run on tensors without values, so everything is sent uncompressed.
        plain = replace(plan, reductions=Reductions(second_level=plan.reductions.second_level))
        with fake:
            stored = {
                b.name: torch.empty(b.size(b.param_level), dtype=b.dtype, device=self.device) for b in plan.buckets
            }
            with values:
                yield plain, mesh, Sharded(plain, mesh, "param", stored), batch, buffers


class Untraceable(Exception):
    """A loss of which no trace can be made; says why."""


def traced_once(tracing: Tracing) -> TraceCache:
    """Traces of plans, each kind once. A function that is a sequence of blocks shows in short forms all that it does: blocks
    that are left out are the same function of parameters that are treated alike, and get a carry of the same form."""
    return TraceCache(tracing.traced, Shortly(tracing), sure=isinstance(tracing.loss_fn, Sequential))


class Shortly:
    """Traces of deep functions from short forms of their plans. A short form serves any number of blocks."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._walks: list[tuple[Plan, tuple[Walk, ...]]] = []

    def __call__(self, plan: Plan) -> tuple[Trace, ...] | None:
        """The traces of a plan; None where no short form shows them."""
        loss_fn, tracing = self._tracing.loss_fn, self._tracing
        functions = loss_fn.functions if isinstance(loss_fn, Sequential) else None
        if plan.step.thins and tracing.step is not None:  # that step leaves out some layers, not others
            return None
        short = deduplicated(plan, functions)
        if short is None:
            return None
        if functions is not None:
            tracing = replace(tracing, loss_fn=Sequential([functions[number] for number in short.kept]))
        walks = self._seen(short.plan, tracing)
        if len(walks) != len(short.stages):
            return None
        for walk, stage in zip(walks, short.stages):
            if walk.blocks != stage.blocks or not all(walk.steady(n, stage.leaving[n]) for n in stage.repeats):
                return None
        return tuple(
            walk.trace(stage.first, stage.repeats, short.represents) for walk, stage in zip(walks, short.stages)
        )

    def _seen(self, plan: Plan, tracing: Tracing) -> tuple[Walk, ...]:
        """What one micro-batch does in each stage; nothing if the function fails."""
        seen = seen_in_traces(plan)
        known = next((walks for other, walks in self._walks if other == seen), None)
        if known is None:
            try:
                known = tracing.walks(plan)
            except Exception as error:  # the function's own: it may need all of its parameters
                _log.debug("no short form: %s", error)
                known = ()
            self._walks.append((seen, known))
        return known
