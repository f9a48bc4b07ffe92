"""Traces that are made once: of layers that are alike a few are traced, and of plans that are alike one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import optree

from shardlib.plan.buckets import Bucket
from shardlib.plan.plan import Plan
from shardlib.plan.records import Shape, Trace
from shardlib.plan.value import PlanValue
from shardlib.tree import Tree, leaves_of, path_name, unflatten

# Of many neighbouring blocks that are treated alike (their signatures are equal) the representatives are traced: these many
# at the beginning and at the end. What is gathered ahead in forward, or still on its way in backward, reaches a few blocks
# far; the last of the first ones, which stands for those that are left out, is then like the next one.
_FIRST, _LAST = 3, 5
# Blocks after which as many gradients end their way as begin it, beyond those of two largest units: the one that is the first
# to end another's, the next one, which does all that it does, and the one whose parameters are gathered ahead.
_SETTLED = 3

Signatures = dict[int, list[Any]]  # number of a block in its list -> what a plan does with its parameters


class DedupStage(NamedTuple):
    """A stage of a short form.

    Attributes:
        first: number of blocks in the stages before it, in the whole plan.
        blocks: number of its own that are left.
        repeats: number of a block, from 1 -> how many like it are left out right after it.
        leaving: number of such a block -> bytes of its gradients that stay until all have left for another memory; 0 if they
            go while others come.
    """

    first: int
    blocks: int
    repeats: dict[int, int]
    leaving: dict[int, int]


class Deduplicated(NamedTuple):
    """The short form of a plan: one of representatives alone.

    Attributes:
        plan: for parameters with fewer blocks.
        stages: of the plan.
        represents: path of each block -> paths of the blocks of the whole plan that it represents: its own, or more.
        kept: numbers of the elements that the list of blocks still has.
    """

    plan: Plan
    stages: tuple[DedupStage, ...]
    represents: dict[str, tuple[str, ...]]
    kept: tuple[int, ...]


def deduplicated(plan: Plan, functions: Sequence[Any] | None = None) -> Deduplicated | None:
    """The plan of representatives; None if there is none that is shorter.

    Args:
        functions: of blocks, where every element of the parameters, which are a list, is one: those before and after the
            blocks that are alike, too.
    """
    stacks = _stacks(unflatten(plan.shape.treedef, range(plan.shape.treedef.num_leaves)), ())
    stack = max(stacks, key=lambda stack: len(stack.blocks), default=None)
    if stack is None or (functions is None and plan.stages.axes):
        return None
    if isinstance(plan.step.keep, int):  # which units fit depends on all of them
        return None
    if functions is not None and (stack.at or len(functions) != stack.whole):
        return None
    paths = {number: path_name((*stack.at, number)) for number in stack.blocks}
    signatures = _signatures(plan, paths)
    if signatures is None:
        return None
    if functions is not None:
        for number, signature in signatures.items():
            signature.append(functions[number])
    cuts = _cuts(plan, stack, signatures, (0, stack.whole) if functions else (stack.blocks.start, stack.blocks.stop))
    represented = {n: group for cut in cuts for n, group in zip(cut.present(signatures), cut.groups, strict=True)}
    again = _again(plan, cuts)
    if len(represented) == len(paths) or again is None:
        return None
    kept = tuple(number for number in range(stack.whole) if number in represented or number not in paths)
    short = _without(plan, stack.at, kept, {path for number, path in paths.items() if number not in represented})
    if short is None:
        return None
    if plan.step.remat is not None and plan.step.remat.blocks is not None:
        short = replace(short, step=replace(short.step, remat=replace(plan.step.remat, blocks=again)))
    if plan.stages.axes:
        stops = list(itertools.accumulate(cut.blocks for cut in cuts))
        short = replace(short, stages=replace(short.stages, spans=tuple(zip([0, *stops], stops))))
    stages = tuple(
        DedupStage(
            cut.span.start if plan.stages.axes else 0, cut.blocks, cut.repeats, _left(plan.of_stage(n), cut, signatures)
        )
        for n, cut in enumerate(cuts)
    )
    named = {paths[number]: tuple(paths[n] for n in group) for number, group in represented.items()}
    return Deduplicated(short, stages, named, kept)


class _Cut(NamedTuple):
    """The blocks of a stage, by their numbers in the list: all of them, those of the stack, and these in groups: one alone,
    or one with those after it that it stands for."""

    span: range
    inside: range
    groups: list[tuple[int, ...]]

    @property
    def before(self) -> int:
        """Number of the stage's blocks before those of the stack."""
        return self.inside.start - self.span.start

    @property
    def blocks(self) -> int:
        """Number of blocks that are left."""
        return len(self.span) - len(self.inside) + len(self.groups)

    @property
    def representatives(self) -> dict[int, tuple[int, ...]]:
        """Number of a block that is left, from 1 -> its group, for representatives."""
        return {n: group for n, group in enumerate(self.groups, 1 + self.before) if len(group) > 1}

    @property
    def repeats(self) -> dict[int, int]:
        """As in `DedupStage`."""
        return {n: len(group) - 1 for n, group in self.representatives.items()}

    def present(self, signatures: Signatures) -> Sequence[int]:
        """The blocks that are left. Where only recompute differs, the first ones serve any number of recomputed ones."""
        alike = all(signatures[number] == signatures[self.inside[0]] for number in self.inside)
        return self.inside[: len(self.groups)] if alike else [group[0] for group in self.groups]


def _cuts(plan: Plan, stack: _Stack, signatures: Signatures, whole: tuple[int, int]) -> list[_Cut]:
    """The stages.

    Args:
        whole: the blocks of a plan of one stage.
    """
    spans = [range(*span) for span in (plan.stages.spans if plan.stages.axes else (whole,))]
    cuts = []
    for span in spans:
        start, stop = max(span.start, stack.blocks.start), min(span.stop, stack.blocks.stop)
        cuts.append(_Cut(span, range(start, stop) if start < stop else range(span.start, span.start), []))
    ahead = max(cut.before for cut in cuts)
    for cut in cuts:
        recomputed = cut.span.start + _recomputed(plan, len(cut.span))
        for _, run in itertools.groupby(cut.inside, key=lambda number: (number < recomputed, signatures[number])):
            numbers = list(run)
            # In all stages as many blocks are recomputed, whatever they have before those of the stack, or wait for.
            first = _FIRST + (ahead - cut.before if numbers[0] == cut.inside.start else 0)
            last = max(_LAST, _leaving(plan, signatures[numbers[0]]))
            cut.groups.extend(_grouped(numbers, first, last))
    return cuts


def _recomputed(plan: Plan, blocks: int) -> int:
    """How many of a stage's blocks may be recomputed, the first ones."""
    remat = plan.step.remat
    return 0 if remat is None else blocks if remat.blocks is None else remat.blocks


def _again(plan: Plan, cuts: list[_Cut]) -> int | None:
    """How many blocks of each stage that are left are recomputed; None if no number is right for all of them."""
    numbers = []
    for cut in cuts:
        recomputed = _recomputed(plan, len(cut.span))
        outside = min(cut.before, recomputed) + max(0, recomputed - cut.before - len(cut.inside))
        numbers.append(outside + sum(group[0] < cut.span.start + recomputed for group in cut.groups))
    most = max(numbers)
    right = all(min(most, cut.blocks) == min(number, cut.blocks) for number, cut in zip(numbers, cuts, strict=True))
    return most if right else None


def _grouped(run: list[int], first: int, last: int) -> list[tuple[int, ...]]:
    """Neighbours of one signature, each alone; or the last of the ``first`` ones with those that it represents, all but the
    ``last`` ones."""
    if len(run) <= first + last:
        return [(number,) for number in run]
    before, middle, after = run[: first - 1], run[first - 1 : -last], run[-last:]
    return [*((number,) for number in before), tuple(middle), *((number,) for number in after)]


def _leaving(plan: PlanValue, signature: list[Any]) -> int:
    """How many blocks of a stage it takes in backward until as many gradients end their way as begin it; 0 if none must.

    Up to there each block's gradients come on top of those that are on their way.
    """
    steady = 0
    for way in _WAYS:
        elements, _ = way(plan, signature)
        if elements and _crowded(plan, way):
            steady = max(steady, plan.most_in_flight // elements + _SETTLED)
    return steady


def _left(plan: PlanValue, cut: _Cut, signatures: Signatures) -> dict[int, int]:
    """See `DedupStage.leaving`."""
    several = plan.step.microbatches > 1 and not plan.stages.axes  # then what the first ones leave goes before the last
    ways = [way for way in _WAYS if not (_crowded(plan, way) or (several and way is _reduced))]
    return {n: sum(way(plan, signatures[group[0]])[1] for way in ways) for n, group in cut.representatives.items()}


def _crowded(plan: PlanValue, way: _Way) -> bool:
    """Whether gradients must end their way before all of them have begun it."""
    return way(plan, plan.trained)[0] > plan.most_in_flight


def _moved(plan: PlanValue, of: Iterable[Any]) -> tuple[int, int]:
    """Elements and bytes of the gradients that go to another memory: see `shardlib.sharded.gradient_offload`."""
    moved = [each for each in _buckets(of) if each.memory.optimizer != "device"]
    return sum(each.owned for each in moved), sum(each.owned * each.reduce_dtype.itemsize for each in moved)


def _reduced(plan: PlanValue, of: Iterable[Any]) -> tuple[int, int]:
    """Elements and bytes of the whole gradients that a micro-batch frees when their exchanges end: see
    `shardlib.execute.gradients`. Those that go on to another memory then do not count: one at most is on its way."""
    staged, once = bool(plan.stages.axes), plan.step.microbatches == 1

    def piles_up(bucket: Bucket) -> bool:
        goes_on = not staged and (bucket.memory.optimizer if once else bucket.memory.grad) != "device"
        return bucket.levels > 0 and not goes_on and (bucket.grad_level > 0 or (once and not staged))

    wholes = [(each.size(0), each.reduce_dtype.itemsize) for each in _buckets(of) if piles_up(each)]
    return sum(size for size, _ in wholes), sum(size * itemsize for size, itemsize in wholes)


_Way = Callable[[PlanValue, Iterable[Any]], tuple[int, int]]
_WAYS: tuple[_Way, ...] = (_moved, _reduced)


def _buckets(of: Iterable[Any]) -> list[Bucket]:
    return [each for each in of if isinstance(each, Bucket) and each.trainable]


class _Stack(NamedTuple):
    """Neighbours in a list that have equal structures: the way to the list, their numbers, and the list's length."""

    at: tuple[Any, ...]
    blocks: range
    whole: int


def _stacks(node: Any, at: tuple[Any, ...]) -> Iterator[_Stack]:
    if optree.tree_is_leaf(node):
        return
    children, _, entries, _ = optree.tree_flatten_one_level(node)
    if isinstance(node, (list, tuple)) and len(node) > _FIRST + _LAST and not any(map(optree.tree_is_leaf, children)):
        forms = [optree.tree_structure(child) for child in node]
        runs = [list(run) for _, run in itertools.groupby(range(len(node)), key=forms.__getitem__)]
        longest = max(runs, key=len)
        if len(longest) > _FIRST + _LAST:
            yield _Stack(at, range(longest[0], longest[-1] + 1), len(node))
            return
    for child, entry in zip(children, entries, strict=True):
        yield from _stacks(child, (*at, entry))


def _signatures(plan: Plan, blocks: Mapping[int, str]) -> Signatures | None:
    """What a plan does with each block's parameters, without names; None if one is tied to another block's, or in a bucket
    with it.

    Args:
        blocks: number -> path.
    """
    number = {path: number for number, path in blocks.items()}
    depth = next(iter(number)).count("/") + 1
    signatures: Signatures = {block: [] for block in blocks}  # where parameters are stored follows from their buckets

    def local(path: str) -> tuple[int | None, str]:
        """The block that a path lies in, and the path within it."""
        parts = path.split("/")
        return number.get("/".join(parts[:depth])), "/".join(parts[depth:])

    for bucket in plan.buckets:
        paths = tuple(local(path) for path in bucket.paths)
        block, unit = paths[0][0], local(bucket.unit)[1]
        if any(other != block for other, _ in paths):
            return None
        if block is not None:
            home = None if bucket.home is None else local(bucket.home)[1]
            signatures[block].append(
                replace(bucket, name="", unit=unit, paths=tuple(path for _, path in paths), home=home)
            )
    for placement in plan.placements:
        block, path = local(placement.path)
        if any(local(alias)[0] != block for alias in placement.aliases):
            return None
        if block is not None:
            leaf, aliases = replace(placement.compute, path=path), [local(alias)[1] for alias in placement.aliases]
            signatures[block].append((leaf, aliases, placement.style, placement.dealt, placement.scaled))
    for module, tiles in plan.step.module_tiles.items():
        block, path = local(module)
        if block is not None:
            signatures[block].append((path, tiles))
    return signatures


def _without(plan: Plan, at: tuple[Any, ...], kept: tuple[int, ...], gone: set[str]) -> Plan | None:
    """A plan for parameters of which the list at ``at`` has only the elements ``kept``; those at the paths ``gone`` have
    none."""
    depth = len(at) + 1

    def stays(path: str) -> bool:
        return "/".join(path.split("/")[:depth]) not in gone

    tree = _with(unflatten(plan.shape.treedef, range(len(plan.shape.paths))), at, kept)
    leaves = leaves_of(tree)
    placements = [number for number, placement in enumerate(plan.placements) if stays(placement.path)]
    places = {number: place for place, number in enumerate(placements)}
    owners = [plan.shape.owners[leaf] for leaf in leaves]
    paths = tuple(plan.shape.paths[leaf] for leaf in leaves)
    if not all(owner in places for owner in owners):
        return None
    shape = Shape(optree.tree_structure(tree), paths, tuple(places[owner] for owner in owners))
    return replace(
        plan,
        shape=shape,
        placements=tuple(plan.placements[number] for number in placements),
        buckets=tuple(bucket for bucket in plan.buckets if stays(bucket.paths[0])),
    )


def _with(node: Any, at: tuple[Any, ...], kept: tuple[int, ...]) -> Tree:
    if not at:
        return type(node)(node[number] for number in kept)
    children, how, entries, build = optree.tree_flatten_one_level(node)
    index = list(entries).index(at[0])
    return build(how, [_with(child, at[1:], kept) if n == index else child for n, child in enumerate(children)])


# Traces that are known: plans that differ only in what no micro-batch sees share one.


class TraceCache:
    """Traces plans, each kind once: optimizers, their states' files and how these are updated show in no trace.

    Plans of deep functions are traced by representatives. Unless these surely show what the whole would, the first plan is
    traced as a whole, and the next ones by representatives if those of the first one give the same.

    Args:
        trace: returns a plan with its traces.
        shortly: returns the traces of a plan by representatives; None where none show them.
        sure: whether representatives that show any traces show those of the whole.
    """

    def __init__(
        self, trace: Callable[[Plan], Plan], shortly: Callable[[Plan], tuple[Trace, ...] | None], sure: bool = False
    ) -> None:
        self._trace, self._shortly, self._sure = trace, shortly, sure
        self._known: list[tuple[Plan, tuple[Trace, ...], bool]] = []  # and whether they are of the whole function
        self._trusts: bool | None = sure or None  # None before representatives were held against a whole

    def __call__(self, plan: Plan) -> Plan:
        """The plan with its traces."""
        seen = seen_in_traces(plan)
        traces = next((traces for known, traces, _ in self._known if known == seen), None)
        if traces is None:
            if self._trusts is None and self._known:
                first, wanted, _ = self._known[-1]
                short = self._shortly(first)
                self._trusts = None if short is None else short == wanted
            traces = self._shortly(plan) if self._trusts else None
            whole = traces is None
            if traces is None:
                found = self._trace(plan)
                if found.traces is None:
                    return found
                traces = found.traces
            self._known.append((seen, traces, whole))
        return replace(plan, traces=traces)

    def holds(self, plan: Plan) -> bool:
        """Whether a plan's traces are those of the whole function. If not, representatives are not trusted from now on."""
        seen = seen_in_traces(plan)
        if self._sure or any(whole and known == seen for known, _, whole in self._known):
            return True
        found = self._trace(plan).traces
        right = found == plan.traces
        self._trusts = self._trusts if right else False
        self._known = [each for each in self._known if each[0] != seen and (right or each[2])]
        if found is not None:
            self._known.append((seen, found, True))
        return right


def seen_in_traces(plan: Plan) -> Plan:
    """What of a plan a micro-batch sees."""
    step, how = plan.step, plan.step.remat
    if how is not None and how.blocks == 0 and not how.save:
        step = replace(step, remat=None)
    placements, other = plan.placements, "host"
    if plan.stages.axes:  # gradients leave for the states' memory after all micro-batches
        placements, other = tuple(replace(placement, optimizer=None) for placement in placements), "device"
    buckets = tuple(
        replace(bucket, memory=bucket.memory._replace(optimizer=other))
        if bucket.memory.optimizer != "device"
        else bucket
        for bucket in plan.buckets
    )
    return replace(plan, step=step, placements=placements, buckets=buckets, needs=None, traces=None)


def assumed(before: Plan, after: Plan) -> tuple[Trace, ...] | None:
    """At most what a trace of ``after`` would find, from the traces of a plan with one transform less or other.

    A step has the same operations in forward, and no fewer in backward, but for what ``before`` recomputes. Smaller
    micro-batches have their share of the elements, as each row is computed alone, and all of the launches. Nobody knows how
    little activations may take.
    """
    if before.traces is None or len(before.traces) != after.stages.count:
        return None
    share = before.step.microbatches / after.step.microbatches
    again = before.step.remat is not None

    def least(of: tuple[int, int], share: float) -> tuple[int, int]:
        forward, backward = of
        return int(share * forward), int(share * max(0, backward - again * forward))

    return tuple(Trace(None, {}, flops=least(t.flops, share), launches=least(t.launches, 1.0)) for t in before.traces)
