"""`search_plan`: the quickest plan that fits a machine, of all meshes and chains of a space."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardlib.common.thresholds import Threshold
from shardlib.errors import BatchError, IllegalComposition, MeshError, ShardlibError, listing
from shardlib.execute.batches import as_tensors
from shardlib.execute.losses import require_no_buffers
from shardlib.nn.functional import LossResult
from shardlib.optim.base import GradientTransformation
from shardlib.optim.checks import check, is_share, is_step
from shardlib.optim.combine import require_transformations
from shardlib.plan.limits import Limits
from shardlib.plan.machine import Machine, require_machine
from shardlib.plan.plan import Plan
from shardlib.plan.prediction import predict_on
from shardlib.plan.records import Trace
from shardlib.search.bounds import Bounds, Times
from shardlib.search.model import Model, paced
from shardlib.search.space import Choice, Space, choices, meshes
from shardlib.search.value import Found, Rejected, Search
from shardlib.sharded.shard import outline
from shardlib.tree import Tree

_SMALLER = (0.75, 0.5)  # of the memory of the quickest plan: budgets for which a search is made again
_REMEDIES = ("recompute", "offload")  # what of a choice takes time to save memory
_NO_MORE = "no more"
_ABOUT = 1.05  # of the bytes that are held: what a plan put together from blocks says at most
_ACTIONS = Threshold(4096)  # of a schedule: what is more of its steady part is not run on the clock


class _Unfit(Exception):
    """What rejects a choice: the kind of the reason, and the reason."""


class Searching:
    """A search, with what it has learnt so far.

    Args:
        within: the share of time that does not matter.

    Attributes:
        rejected: choice -> why.
        timed: choice -> seconds on the clock with traces put together from blocks, and bytes that a device holds at least.
    """

    def __init__(self, model: Model, machine: Machine, ranks: int, choices: Sequence[Choice], within: float) -> None:
        self.choices = choices
        self.rejected: dict[Choice, Rejected] = {}
        self.timed: dict[Choice, tuple[float, int]] = {}
        self._model, self._machine, self._ranks, self._within = model, machine, ranks, within
        self._bounds, self._times = Bounds(model, machine, ranks), Times(model, machine, ranks)
        self._bounded: dict[Choice, tuple[float, int]] = {}
        # Choice -> its exact plan, and the bytes that a device holds.
        self._planned: dict[Choice, tuple[Plan, int]] = {}
        self._found: dict[Choice, Found] = {}
        self._all = set(choices)
        self._after = {name: _followers(getattr(choice, name) for choice in choices) for name in _REMEDIES}

    def front(self) -> Iterator[Found]:
        """The quickest choice, and the quickest ones of those that hold less."""
        first = last = self.quickest(self._machine.memory)
        if first is None or last is None:
            return
        yield first
        for share in _SMALLER:
            found = self.quickest(int(share * first.bytes))
            if found is not None and found.bytes < last.bytes:
                yield found
                last = found

    def quickest(self, budget: int) -> Found | None:
        """The quickest choice that holds no more than a budget: each comes up in the order of what is known of its time.

        Recompute and offload take time to save memory: a choice with them comes up once it is known not to fit without.
        """
        plain, numbers, best = self._plain(), itertools.count(), None
        heap: list[tuple[float, int, int, Choice]] = []
        seen: set[Choice] = set()

        def add(choice: Choice, least: float, known: int = 0) -> None:
            heapq.heappush(heap, (least, next(numbers), known, choice))

        def remedy(choice: Choice, least: float) -> None:
            again = replace(choice, recompute=self._after["recompute"].get(choice.recompute, _NO_MORE))
            moved = replace(choice, offload=self._after["offload"].get(choice.offload, _NO_MORE))
            for other in (again, moved):
                if other in self._all and other not in seen:
                    seen.add(other)
                    add(other, least)

        for choice in self.choices:
            if all(getattr(choice, name) == next(iter(self._after[name])) for name in _REMEDIES):
                add(choice, self._times.soonest(choice, plain))
        while heap:
            least, _, known, choice = heapq.heappop(heap)
            if best is not None and least >= best.seconds * (1 - self._within):
                break
            try:
                if choice in self.rejected:
                    fits = False
                elif known == 2:
                    fits = self._exact(choice)[1] <= budget
                    if fits and (best is None or self._ran(choice).seconds < best.seconds):
                        best = self._ran(choice)
                else:
                    seconds, held = self._clocked(choice) if known else self._bound(choice)
                    fits = held <= budget
                    if fits:
                        add(choice, max(least, seconds), known + 1)
            except (_Unfit, ShardlibError) as error:
                kind, reason = error.args if isinstance(error, _Unfit) else ("does not compose", str(error))
                self.timed.pop(choice, None)
                self.rejected[choice] = Rejected(choice, kind, reason)
                fits = False
            if not fits:
                remedy(choice, least)
        return best

    def _plain(self) -> Sequence[Trace]:
        """The traces of blocks on one device, for one row."""
        return self._model.blocks(Choice((), 1, 1, precision=self.choices[0].precision)).one

    def _bound(self, choice: Choice) -> tuple[float, int]:
        """The seconds that a choice takes, and the bytes that a device holds, at least, by its blocks."""
        if choice not in self._bounded:
            if excess := self._bounds.excess(choice):
                raise _Unfit(f"{excess.what} exceed {excess.memory} memory", str(excess))
            seconds = self._times.seconds(choice, self._bounds.stages(choice))
            self._bounded[choice] = seconds, self._bounds.held(choice)
        return self._bounded[choice]

    def _clocked(self, choice: Choice) -> tuple[float, int]:
        if choice not in self.timed:
            self.timed[choice] = self._timed(choice)
        return self.timed[choice]

    def _timed(self, choice: Choice) -> tuple[float, int]:
        """As in `timed`. Of many micro-batches, which come at a steady pace, some are run."""
        stages = choice.size("pipe")
        few = 2 * max(2, stages)
        if choice.microbatches <= 2 * few or 2 * stages * choice.microbatches <= _ACTIONS():
            plan = self._model.assembled(choice)
            return predict_on(plan, self._machine).total, self._held(choice, plan, _ABOUT)
        plan, more = self._model.assembled(replace(choice, microbatches=few)), few + few // 2
        first, second = (predict_on(paced(plan, number), self._machine).total for number in (few, more))
        each = (second - first) / (more - few)
        return first + each * (choice.microbatches - few), self._held(choice, plan, _ABOUT)

    def _exact(self, choice: Choice) -> tuple[Plan, int]:
        """The exact plan, and the bytes that a device holds."""
        if choice not in self._planned:
            try:
                plan = self._model.exact(choice)
            except ShardlibError:
                raise
            except Exception as error:  # the loss's own: it does not run on such micro-batches, say
                raise _Unfit("cannot be traced", f"{type(error).__name__}: {error}") from error
            self._planned[choice] = plan, self._held(choice, plan, 1.0)
        return self._planned[choice]

    def _ran(self, choice: Choice) -> Found:
        """The exact plan on the clock, which takes long for many micro-batches: only of what fits."""
        if choice not in self._found:
            plan, held = self._exact(choice)
            self._found[choice] = Found(choice, predict_on(plan, self._machine).total, held, plan)
        return self._found[choice]

    def _held(self, choice: Choice, plan: Plan, about: float) -> int:
        """The peak of a rank's device under a plan that fits, at least.

        Args:
            about: how often what the plan says may be what is held.
        """
        limits = self._limits(choice)
        misfits = [use for use in limits.uses(plan) if use.bytes > about * use.limit]
        if misfits:
            worst = max(misfits, key=lambda use: use.bytes - use.limit)
            raise _Unfit(f"the plan exceeds {worst.peak.memory} memory", str(worst))
        return int(limits.peak(plan) / about)

    def _limits(self, choice: Choice) -> Limits:
        machine, batch = self._machine, self._model.batch_bytes(choice.rows * choice.microbatches)
        sharing = min(self._ranks, machine.ranks_per_host)
        limits = Limits.given(machine.memory, machine.host_memory, machine.disk, sharing, batch)
        assert limits is not None  # the device's is one
        return limits


def _followers(values: Iterable[str | None]) -> dict[str | None, str | None]:
    """Value -> the one that is tried after it: none comes first, the others as they are given."""
    order = sorted(dict.fromkeys(values), key=lambda value: value is not None)
    return dict(zip(order, [*order[1:], _NO_MORE], strict=True))


def search_plan(
    loss_fn: Callable[..., LossResult],
    params: Tree | Callable[[], Tree],
    machine: Machine,
    batch: Any,
    *,
    optimizer: GradientTransformation,
    ranks: int,
    rules: Mapping[str, Any] | None = None,
    space: Space | None = None,
    within: float = 0.02,
) -> Search:
    """Search all meshes, stages, slices, pipelines, recompute, precisions and micro-batches for the quickest step that fits.

    Nothing runs. Choices are taken in the order of a bound of their time, which is refined as they come up: by products
    alone; by traces of single blocks; by the virtual clock; at last by the exact plan. The first whose exact plan has come
    up is the result, as all others take longer by what is known of them. What cannot fit by a bound of its memory is
    rejected when it comes up, and no plan is returned that holds more than there is. Recompute and offload, which only take
    time, are tried where a choice does not fit without.

    Args:
        loss_fn: an `sl.sequential` is cut into stages too, with ``params`` a list of trees.
        params: as for `make_plan`.
        machine: what ranks have and do per second.
        batch: of all ranks together, shapes alone, such as tensors on the meta device or arrays.
        optimizer: a gradient transformation.
        ranks: number of ranks, all of which are used.
        rules: of `tensor_slicing`; without them no layer is sliced.
        space: what is tried; by default `Space` with its own values.
        within: a share of time: what may be quicker by no more is left.

    Raises:
        TypeError: an optimizer that is not a gradient transformation, or a machine that is no `shardlib.plan.Machine`;
            a loss that takes buffers.
        ValueError: fewer than one rank, or a share ``within`` that is none.
        BatchError: a batch without rows.
        MeshError: no mesh of the ranks can share the batch.
        IllegalComposition: no precision of the space that the machine has a rate for.

    >>> from shardlib.models import gpt
    >>> config = gpt.GPTConfig(layers=2, width=32, heads=2, sequence=16)
    >>> machine = sl.plan.Machine("8MiB", {"fp32": 1e11}, sl.plan.Link(1e9, 1e-5), ranks_per_host=4, launches=1e5)
    >>> batch = {name: torch.empty(8, 16, dtype=torch.int64, device="meta") for name in ("tokens", "targets")}
    >>> job = dict(optimizer=sl.optim.adamw(1e-3), ranks=4, rules=gpt.slicing_rules(config, blocks=True))
    >>> params = gpt.to_blocks(gpt.init(config, device="meta"))
    >>> found = sl.search_plan(gpt.make_sequential(config), params, machine, batch, **job)
    >>> found.winner.bytes <= machine.memory and found.winner.code.startswith("sl.make_plan(params, sl.abstract_mesh(")
    True
    """
    require_transformations("search_plan", optimizer)
    require_machine("search_plan", machine)
    space = space or Space()
    known = tuple(name for name in space.precisions if name in machine.flops)
    if not known:
        raise IllegalComposition(
            f"the machine has no rate for {', '.join(space.precisions)}, only for {', '.join(machine.flops)}: give "
            "search_plan(space=Space(precisions=...))"
        )
    require_no_buffers(
        loss_fn, "close over them, lambda params, batch: loss_fn(params, buffers, batch)[0], and leave memory for them"
    )
    tree = outline("search_plan", params)
    model = Model(loss_fn, tree, as_tensors(batch, torch.device("cpu")), optimizer, rules)
    words = "ranks are an integer of at least 1, and within is a share of time, at least 0 and below 1"
    check("search_plan", words, ranks=(ranks, is_step(ranks)), within=(within, is_share(within)))
    if model.rows < 1:
        raise BatchError("search_plan: the batch has 0 rows: give the batch of all ranks together")
    memories = {"host": machine.host_memory, "disk": machine.disk}
    there = frozenset(name for name, held in memories.items() if held is not None)
    space = replace(space, precisions=known)
    found = list(meshes(space, ranks, model.count, rules is not None, model.experts))
    tried = list(choices(space, found, model.rows, there))
    if not tried:
        raise MeshError(
            f"search_plan has no choice for {ranks} ranks and {model.rows} rows:\n"
            f"{listing(_reasons(space, ranks, found, model, rules is not None, [n for n in memories if n not in there]))}"
        )
    searching = Searching(model, machine, ranks, tried, within)
    front = list(searching.front())
    return Search(
        tuple(replace(found, rules=rules) for found in front),
        tuple(searching.rejected.values()),
        len(searching.choices) - len(searching.rejected) - len(searching.timed),
        len(searching.timed),
        within,
    )


def _reasons(
    space: Space, ranks: int, found: Sequence[Mapping[str, int]], model: Model, slices: bool, missing: Collection[str]
) -> list[str]:
    """Why there is nothing to choose from, with remedies.

    Args:
        found: the meshes.
        missing: memories that the machine does not have.
    """
    rows, shares = model.rows, sorted({mesh.get("data", 1) * mesh.get("expert", 1) for mesh in found})
    if not found:
        return [f"Space(largest={dict(space.largest or {})}) leaves no mesh of {ranks} ranks: let an axis be larger"]
    if any(rows % share == 0 for share in shares):
        machine = f" (the machine has no {' and no '.join(missing)})" if missing else ""
        given = f"offloads={space.offloads}{machine}, sequences={space.sequences}, codecs={space.codecs}"
        return [f"no mesh of {ranks} ranks goes with Space({given}): put None among them"]
    over, fitting = " or ".join(map(str, shares)), max(1, round(rows / shares[0])) * shares[0]
    stages = "a loss that is no sl.sequential is not cut into" if model.count == 1 else f"{model.count} blocks make no"
    reasons = [f"{rows} rows do not divide over {over} ranks: give a batch of {fitting} rows, say"]
    reasons += [f"{stages} {ranks} stages: use another number of ranks"]
    return reasons + ([] if slices else ["without rules= no layer is sliced"])
