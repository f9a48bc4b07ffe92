"""The time of a step: the plan's exchanges, with given compute times, on a virtual clock.

A rank has one processor, one link for every mesh axis (on a machine one to ranks of its host and one to other hosts, which
axes share), one to its host's memory and one from it, one for reading its disks and one for writing them, and a host that
updates what is not on the device; each does one thing at a time. Work overlaps as
in the executor: the next unit comes up and is gathered while one computes, a unit's gradients are reduced and go down while
backward goes on, and are waited for before the rank computes again, once what the stage before needs is sent. A rank waits
for its activations' collectives and not for its messages to other stages, and the update starts when every rank has every
gradient (the global norm needs all of them). Ranks differ along the stages' axis only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from shardlib.errors import MeshError, axes_named, listing
from shardlib.mesh.memories import WAYS
from shardlib.plan.machine import PRECISIONS, Link, Machine, is_rate, is_seconds, named, require_machine
from shardlib.plan.ops import Op, Rates, Send, VirtualClock
from shardlib.plan.program import Program
from shardlib.plan.value import PlanValue
from shardlib.schedules import Action, Kind
from shardlib.schedules.actions import run

Seconds = dict[tuple[int, bool], Mapping[str, float]]  # (stage, whether backward) -> unit -> seconds of a micro-batch


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step, in seconds.

    Attributes:
        total: time from the batch to the next parameters.
        ranks: time each rank along the stages' axis computes; one number for one stage.
        links: axis or way -> time its link is busy, on the rank where it is busiest; "update": time that a host updates;
            "launches": time that operators take however small they are, which is part of the time a rank computes.
    """

    total: float
    ranks: tuple[float, ...]
    links: Mapping[str, float]

    @property
    def compute(self) -> float:
        """Time that the rank which computes most computes."""
        return max(self.ranks)

    @property
    def exposed(self) -> float:
        """Time that the rank which computes most waits, for links and for other stages."""
        return self.total - self.compute

    @property
    def bubble(self) -> float:
        """Waiting time over computing time, all ranks together, as in `shardlib.schedules.Timeline`."""
        return self.total * len(self.ranks) / sum(self.ranks) - 1

    def __str__(self) -> str:
        links = "".join(f", {axis} busy {seconds:.4g} s" for axis, seconds in self.links.items())
        bubble = f", bubble {self.bubble:.1%}" if len(self.ranks) > 1 else ""
        return f"step {self.total:.4g} s: compute {self.compute:.4g} s, waiting {self.exposed:.4g} s{bubble}{links}"


def predict_step(
    plan: PlanValue,
    forward: float | Mapping[str, float],
    bandwidth: Mapping[str, float],
    *,
    backward: float = 2.0,
    update: float = 0.0,
    owned: bool = False,
) -> StepTime:
    """The predicted time of one step of a plan.

    Messages between stages take time only if the plan was traced (``make_plan(..., loss_fn=, batch=)``). A
    backward that the schedule splits takes half its time for input gradients and half for weight gradients.

    Args:
        forward: seconds of one micro-batch's forward: of all units together (divided in proportion to their elements), or
            unit by unit.
        bandwidth: bytes per second of one rank: axis -> what it sends; "down" and "up" -> what it moves from its device and
            to it; "read" and "written" -> of states on disk; "update" -> of masters and moments that the host updates.
            "launches" -> operators per second, which ``forward`` then leaves out: each takes that fixed time beside what its
            elements take. They are counted if the plan was traced. What is left out takes no time.
        backward: seconds of backward per second of forward.
        update: seconds of the optimizer on each device.
        owned: predicts a step whose optimizer sums over its axis itself, after backward (1-bit Adam, once frozen).

    Raises:
        MeshError: an axis or a unit that the plan does not have, or ``owned`` where no optimizer owns an axis; an axis with
            the name of a way.
        TypeError: bandwidths that are not given by name.
        ValueError: seconds below 0 or not finite, or a bandwidth that is not above 0; names them all.

    >>> plan = sl.make_plan({"w": torch.ones(1000, 1000)}, sl.abstract_mesh(data=2), sl.zero(1))
    >>> predicted = sl.report.predict_step(plan, forward=0.001, bandwidth={"data": 1e9})
    >>> round(predicted.total, 3)
    0.007
    """
    _require_numbers(forward, bandwidth, {"backward": backward, "update": update})
    plan = plan.everywhere
    units = plan.tiled.units
    ways = (*WAYS, "update", "launches")
    if taken := [axis for axis in plan.sizes if axis in ways]:
        raise MeshError(
            f"the mesh has {axes_named(taken)}, and links have the names {', '.join(ways)}: rename the axis"
        )
    unknown = [f"axis {axis!r}" for axis in bandwidth if axis not in plan.sizes and axis not in ways]
    unknown += [f"unit {unit!r}" for unit in forward if unit not in units] if isinstance(forward, Mapping) else []
    if unknown:
        raise MeshError(f"the plan does not have\n{listing(unknown)}\nIt has axes {list(plan.sizes)} and units {units}")
    if owned and plan.reductions.owner is None:
        raise MeshError("no optimizer of this plan owns an axis; pass one that does to make_plan: optimizer=...")
    return _run(plan, _seconds(plan, forward, backward), Rates(bandwidth), [update] * len(plan.views), owned)


def _require_numbers(forward: Any, bandwidth: Any, others: dict[str, Any]) -> None:
    if not isinstance(bandwidth, Mapping):
        raise TypeError(
            f"predict_step(bandwidth={bandwidth!r}): give bytes per second by the name of an axis or a way, such as "
            '{"data": 1e9}'
        )
    by_unit = isinstance(forward, Mapping)
    times = {f"forward[{unit!r}]": seconds for unit, seconds in forward.items()} if by_unit else {"forward": forward}
    wrong = {name: value for name, value in (times | others).items() if not is_seconds(value)}
    wrong |= {f"bandwidth[{name!r}]": rate for name, rate in bandwidth.items() if not is_rate(rate)}
    if wrong:
        raise ValueError(
            f"predict_step({named(wrong)}): times are finite numbers of seconds, at least 0, and bandwidths are above 0"
        )


def predict_on(plan: PlanValue, machine: Machine, *, owned: bool = False) -> StepTime:
    """The predicted time of one step of a traced plan on a machine.

    A stage takes the time of its products at the rate of the precision that most parameters have, of the bytes that other
    operators read and write, and of each operator's launch; an update that of the bytes of states, gradients and
    parameters; a message what its link takes. Of a pipeline's ranks that share processors the stages compute alone, which is
    as fast as they can, and all together no faster than the processors.

    Args:
        plan: made with ``loss_fn`` and ``batch``, and with the optimizer, whose states are counted.
        owned: as for `predict_step`.

    Raises:
        TypeError: a machine that is no `shardlib.plan.Machine`.
        ValueError: a plan without traces, or a precision that the machine has no rate for.
        MeshError: as for `predict_step`; ranks of several hosts on a machine of one.

    >>> from shardlib.models import gpt
    >>> config = gpt.GPTConfig(layers=2, width=32, heads=2, sequence=16)
    >>> batch = {name: torch.zeros(4, 16, dtype=torch.int64) for name in ("tokens", "targets")}
    >>> job = dict(loss_fn=gpt.make_loss(config), batch=batch, optimizer=sl.optim.adamw(1e-3))
    >>> plan = sl.make_plan(gpt.init(config), sl.abstract_mesh(data=4), sl.zero(2), **job)
    >>> machine = sl.plan.Machine("1GiB", {"fp32": 1e11}, sl.plan.Link(1e9), ranks_per_host=4)
    >>> sl.report.predict_on(plan, machine).total < 0.01
    True
    """
    require_machine("predict_on", machine)
    plan = plan.everywhere
    if plan.traces is None:
        raise ValueError("predict_on counts the operations of a traced plan: give make_plan loss_fn= and batch=")
    alone = machine.apart(plan.stages.schedule.ranks)
    found = _predicted(plan, alone, owned)
    crowded = machine.crowd / alone.crowd * fmean(found.ranks)
    return replace(found, total=max(found.total, crowded))


def _predicted(plan: PlanValue, machine: Machine, owned: bool) -> StepTime:
    """The time of a step if each stage's ranks compute at the machine's rates."""
    assert plan.traces is not None
    links = {axis: machine.link(plan.sizes, axis) for axis, ways in plan.sizes.items() if ways > 1}
    bandwidth = {**machine.ways, "launches": machine.launches, **{axis: link.bandwidth for axis, link in links.items()}}
    # Messages between stages are small, and no pass waits for them: as if they had a link of their own.
    lines = {axis: machine.line(plan.sizes, axis) for axis in links if axis not in plan.stages.axes}
    rates = Rates(bandwidth, links, lines, machine.overheads)
    flops = _products(plan, machine)
    found: Seconds = {}
    for number, (stage, trace) in enumerate(zip(map(plan.of_stage, plan.local_stages), plan.traces, strict=True)):
        counts = _elements(stage.tiled)
        whole = sum(counts.values()) or 1
        for backward, (products, streamed) in enumerate(zip(trace.flops, trace.streamed, strict=True)):
            taken = products / flops + streamed / machine.streaming
            found[number, bool(backward)] = {unit: taken * count / whole for unit, count in counts.items()}
    return _run(plan, found, rates, [_updated(view) / machine.in_place for view in plan.views], owned)


def _products(plan: PlanValue, machine: Machine) -> float:
    """Operations per second of products, in the dtype that is computed in."""
    dtype = plan.computed_dtype
    name = next((name for name, known in PRECISIONS.items() if known == dtype), str(dtype))
    if name not in machine.flops:
        raise ValueError(f"the machine has no rate of products in {name}, only in {', '.join(machine.flops)}")
    return machine.flops[name]


def _updated(view: PlanValue) -> int:
    """Bytes that a device reads and writes in the update: states and parameters both ways, gradients one."""
    here = [bucket for bucket in view.trained if bucket.memory.optimizer == "device"]
    states = sum(needs.states["device"] for needs in view.needs or ())
    return 2 * states + sum(b.owned * (2 * b.dtype.itemsize + b.reduce_dtype.itemsize) for b in here)


def _seconds(plan: PlanValue, forward: float | Mapping[str, float], backward: float) -> Seconds:
    """The seconds of units. A unit that several stages use (of a tied leaf) computes in each of them."""
    plans = [stage.tiled for stage in map(plan.of_stage, plan.local_stages)]
    if isinstance(forward, Mapping):
        seconds = [{unit: forward.get(unit, 0.0) for unit in stage.units} for stage in plans]
    else:
        elements = [_elements(stage) for stage in plans]
        whole = sum(sum(counts.values()) for counts in elements) or 1
        seconds = [{unit: forward * count / whole for unit, count in counts.items()} for counts in elements]
    found: Seconds = {}
    for number, each in enumerate(seconds):
        found[number, False] = each
        found[number, True] = {unit: backward * time for unit, time in each.items()}
    return found


def _elements(stage: PlanValue) -> dict[str, int]:
    return {unit: sum(bucket.size(0) for bucket in buckets) for unit, buckets in stage.buckets_of.items()}


def _run(plan: PlanValue, seconds: Seconds, rates: Rates, updates: Sequence[float], owned: bool) -> StepTime:
    """The time of a step; ``updates`` has the seconds of the update for each of the plan's views."""
    programs = [Program.of(view, owned) for view in plan.views]
    clocks = [VirtualClock(rates, seconds, update) for update in updates]
    ready: dict[Action | None, float] = {None: 0.0}  # an action -> when its result has arrived where it is needed

    def visit(rank: int, action: Action, need: Action | None) -> None:
        program, clock = programs[rank], clocks[rank]
        one = program.actions[action]
        ops = program.ops(one)
        clock.wait(max(ready[need], clock.held.get("pass", 0.0)))
        if any(isinstance(op, Send) and op.moves for op in ops):
            _take(ops, clock)  # which waits for what earlier passes have moved
        else:
            clock.again(one, lambda: _take(ops, clock))
        handed = program.handed(one)
        _take(handed, clock)
        if action.kind is not Kind.W:
            result = Action(action.stage, Kind.B if action.kind is Kind.I else action.kind, action.microbatch)
            ready[result] = max((clock.when[send.name] for send in handed), default=clock.now)

    run(plan.stages.schedule, visit)
    for program, clock in zip(programs, clocks, strict=True):
        _take(program.ending, clock)
    start = max(clock.now for clock in clocks)
    for program, clock in zip(programs, clocks, strict=True):
        clock.now = start
        _take(program.updating, clock)
    links = {link: max(clock.busy.get(link, 0.0) for clock in clocks) for link in rates.bandwidth}
    return StepTime(max(clock.now for clock in clocks), tuple(clock.computed for clock in clocks), links)


def _take(ops: Sequence[Op], clock: VirtualClock) -> None:
    for op in ops:
        op.take(clock)


# The time of a step on a machine of our days, by which plans are compared when nobody has said what they will run on.


# All ranks as if on one host, whose memories are not limited.
NOMINAL = Machine(
    memory=sys.maxsize,
    flops=dict.fromkeys(PRECISIONS, 2e14),
    inside=Link(5e10),
    ranks_per_host=sys.maxsize,
    launches=2e5,
    ways={"down": 2e10, "up": 2e10, "read": 3e9, "written": 2e9, "update": 2e10},
)


def nominal_seconds(plan: PlanValue) -> float:
    """The seconds of a step."""
    return predict_on(plan, NOMINAL).total
