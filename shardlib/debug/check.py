"""`check`: the laws of a plan, tested leaf by leaf against one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from shardlib.debug.calls import forward, placing
from shardlib.debug.codec_laws import codec_laws
from shardlib.debug.finding import Difference, Finding, difference, ranks_named
from shardlib.debug.one_device import mean_over_rows
from shardlib.debug.reduction import reduction
from shardlib.debug.replay import PlanTrial, Replay, replay, share_of
from shardlib.debug.subject import drawn, eagerly, in_float64, left_out, plan_of, widened
from shardlib.debug.update import norm, update
from shardlib.debug.view import StepView, side_by_side
from shardlib.debug.watching import own_copy
from shardlib.evaluate import make_eval_step
from shardlib.execute.batches import as_tensors
from shardlib.execute.losses import read_loss
from shardlib.execute.stages.tracing import Tracing
from shardlib.mesh.launch import simulate
from shardlib.mesh.mesh import Mesh, coordinates
from shardlib.optim import adamw, chain, clip_by_global_norm
from shardlib.optim.base import GradientTransformation
from shardlib.optim.combine import require_transformations
from shardlib.plan.build import with_needs, with_owner
from shardlib.plan.claims import Live, Reduce, Use
from shardlib.plan.plan import Plan
from shardlib.rng import Key
from shardlib.sharded.given import whole_params
from shardlib.sharded.shard import shard_alike
from shardlib.tree import Tree

_STEPS = 2  # the second one shows what is kept from step to step


@dataclass(frozen=True)
class Law:
    """One law of a plan.

    Attributes:
        name: what must hold.
        finding: where it does not; None where it holds.
        measured: what was compared, in words.
        remedy: what to do about it.
    """

    name: str
    finding: Finding | None = None
    measured: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        head = f"{'FAILS' if self.finding else 'holds'}  {self.name}{f': {self.measured}' if self.measured else ''}"
        if self.finding is None:
            return head
        lines = [*str(self.finding).splitlines(), self.remedy]
        return "\n".join([head, *(f"       {line}" for line in lines if line)])


@dataclass(frozen=True)
class Check:
    """The result of `check`; ``print`` it. True if every law holds.

    Attributes:
        laws: in the order of a step.
        notes: what was not tested, a line each.
    """

    laws: tuple[Law, ...]
    notes: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[Law, ...]:
        """The laws that do not hold."""
        return tuple(law for law in self.laws if law.finding)

    def __bool__(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        return "\n".join([*map(str, self.laws), *(f"not tested: {note}" for note in self.notes)])


def check(
    plan: Any,
    loss_fn: Callable[..., Any],
    batch: Tree,
    *,
    params: Tree = None,
    optimizer: GradientTransformation | None = None,
    rng: Key | int = 0,
) -> Check:
    """Test the laws of a plan against one device, in float64 on simulated ranks, before a large run.

    The laws: parameters lie where their specs say; each call of the loss function, each leaf's gradient, loss, norm, update
    and gathered parameters are those of plain autograd on one device; the loss is a mean over rows, so that micro-batches
    train as the whole batch does; a step sends the bytes that the plan says; two runs give the same bits; an evaluation gives
    the same loss. Each is tested on what the one before it gave, in two steps. A step
    that raises an error ends the check after the laws that are broken before it.

    Args:
        plan: a plan of `make_plan`, or a pair of the mesh's sizes and a transform, ``(dict(data=2), sl.zero(3))``. Give the
            large run's transforms on a small mesh (every axis of 2, at most 64 ranks) and a narrow model.
        loss_fn: as for `make_train_step`, without buffers.
        batch: the global batch, whose rows are a multiple of the ranks times micro-batches.
        params: the parameters' values; by default drawn from N(0, 0.2²) in the shapes of the plan.
        optimizer: by default AdamW after a clip that takes part.
        rng: as for `make_train_step`.

    Raises:
        TypeError: a plan of another form, a pair without ``params``, or an optimizer that is not a gradient transformation;
            a loss that takes buffers.
        IllegalComposition: a plan for too many ranks, on disk, or with ``offload(delay=True)``.
        TreeError: sharded parameters, or a module in their place.
        LossError: a loss that is not callable, or a module; one that runs in float32 and not in float64.
        BatchError: rows that do not divide; a batch without tensors, on which the loss raises an error.
        NonFiniteError: the loss or its gradient is not finite on one device.
        Exception: what the step raised, if all laws hold before it.

    >>> loss_fn = lambda params, batch: (batch @ params["w"]).square().mean()
    >>> bool(sl.debug.check((dict(data=2), sl.zero(3)), loss_fn, torch.ones(4, 4), params={"w": torch.ones(4, 4)}))
    True
    """
    if params is None and not isinstance(plan, Plan):
        raise TypeError("check: give params= with a pair of sizes and a transform: only a plan knows the shapes")
    optimizer = chain(clip_by_global_norm(0.01), adamw(1e-3)) if optimizer is None else optimizer
    require_transformations("check", optimizer)
    params = whole_params("check", params)
    given = plan_of(plan, params, "plan")
    values = widened(drawn(given) if params is None else params)
    key = rng if isinstance(rng, Key) else Key(rng)
    rows = as_tensors(batch, torch.device("cpu"))
    subject = _Subject(in_float64(given), PlanTrial(loss_fn, values, widened(rows), optimizer, _STEPS, key))
    with eagerly():
        laws = (*subject.laws(), *_in_few_bits(with_owner(given, optimizer)))
        return Check(laws, (*left_out(given, optimizer), *subject.notes))


@dataclass
class _Subject:
    """What is checked, in float64.

    Attributes:
        notes: what could not be tested.
    """

    plan: Plan
    trial: PlanTrial
    notes: list[str] = field(default_factory=list)

    def laws(self) -> Iterator[Law]:
        first: dict[str, Finding] = {}
        leaves: dict[str, Difference] = {}
        made, views = side_by_side(self.plan, self.trial)
        for view in views:
            self._note(view, first, leaves)
            if first:  # the next step begins from what differs
                break
        worst_leaf = max(leaves.items(), key=lambda item: item[1].error, default=("", Difference(0.0, 0.0, 0.0)))
        ranks = math.prod(self.plan.sizes.values())
        measured = {
            "placing": f"{len(self.plan.placements)} leaves on {ranks} ranks",
            "reduction": f"{len(leaves)} leaves, {worst_leaf[0]} differs by {worst_leaf[1].error:.1g} at most",
        }
        for phase, name in _LAWS.items():
            found = first.get(phase)
            yield Law(name, found, measured.get(phase, ""), (found and self._remedy(found)) or "")
        if made.error is not None:
            if not first:
                raise made.error
            return
        yield from self._over_rows()
        yield from (self._payload(made), self._repeated(made, replay(self.plan, self.trial)), *self._evaluated())

    def _note(self, view: StepView, first: dict[str, Finding], leaves: dict[str, Difference]) -> None:
        found = [placing(view), forward(view), reduction(view)]
        if view.ended:
            found += [norm(view), update(view, self.trial.optimizer)]
            for _, path, _, apart, _, _ in view.of_buckets(view.mean[1], view.grads, "optimizer"):
                leaves[path] = max(leaves.get(path, apart), apart)
        for each in found:
            if each is not None:
                first.setdefault("reduction" if each.phase == "backward" else each.phase, each)

    def _remedy(self, found: Finding) -> str:
        """The transforms that claim the leaf, or else an axis that the operation names, and what to do."""
        if self.plan.claims is None:
            return ""
        by = [
            name
            for name, slots in self.plan.claims.written.items()
            if any(_concerns(kind, subject, value, found) for (kind, subject, _), value in slots)
        ]
        who = f"claimed by {' and '.join(dict.fromkeys(by))}; " if by else ""
        return f"{who}take transforms out one by one: sl.debug.bisect(..., steps={found.step + 1}) tells which it needs"

    def _over_rows(self) -> Iterator[Law]:
        """The loss function is a mean over rows."""
        found = mean_over_rows(self.plan, self.trial)
        if found.note:
            self.notes.append(found.note)
        else:
            yield Law("micro-batches train as the whole batch does", found.finding, f"{found.parts} of them")

    def _payload(self, made: Replay) -> Law:
        """Bytes that ranks send in a step are those of the plan."""
        name = "a step sends what the plan says"
        optimizer, step = self.trial.optimizer, _STEPS - 1
        if optimizer.owns:
            return Law(name, None, f"not tested, since {optimizer.owns.name} sends other bytes from step to step")
        rows, key = share_of(self.trial.batch, self.plan, coordinates(self.plan.sizes, 0)), self.trial.rng.fold_in(step)
        try:
            planned = with_needs(with_owner(self.plan, optimizer), optimizer)
            tracing = Tracing(self.trial.loss_fn, rows, None, torch.device("cpu"), step, key)
            said = tracing.traced(planned.at_step(step, key)).payload()
        except Exception as error:  # the loss function's own, on tensors without values
            return Law(name, None, f"not tested, as the loss function cannot be traced ({type(error).__name__})")
        if self.plan.step.tokens is not None:  # how many bytes its axes carry is for routers to say
            said = {axis: count for axis, count in said.items() if axis not in self.plan.step.tokens.axes}
        sent = {axis: max(steps[-1].payload.get(axis, 0) for steps in made.steps.values()) for axis in said}
        if sent == said:
            return Law(name, None, ", ".join(f"{count} bytes over {axis!r}" for axis, count in sent.items()))
        axis = next(axis for axis in said if sent[axis] != said[axis])
        apart = Difference(float(abs(sent[axis] - said[axis])), 0.0, float(said[axis]))
        what = f"{sent[axis]} bytes are sent over axis {axis!r}, and the plan says {said[axis]}"
        return Law(name, Finding("reduction", what, step, apart), "", "compare print(plan) with sl.report's counts")

    def _repeated(self, made: Replay, again: Replay) -> Law:
        """Two runs give the same bits."""
        name = "two runs give the same bits"
        for rank, steps in made.steps.items():
            for bucket, values in steps[-1].params.items():
                if not torch.equal(values, again.steps[rank][-1].params[bucket]):
                    apart = difference(again.steps[rank][-1].params[bucket], values)._replace(limit=0.0)
                    found = Finding("update", f"parameters of bucket {bucket}", _STEPS - 1, apart, (rank,))
                    return Law(name, found, "", "draw by the loss function's rng, not by generators or time")
        return Law(name)

    def _evaluated(self) -> Iterator[Law]:
        """An evaluation gives the loss of one device."""
        name, batch = "an evaluation gives the loss of one device", self.trial.batch
        try:
            whole = read_loss(self.trial.loss_fn(own_copy(self.trial.params), own_copy(batch)), False)
        except Exception as error:  # a loss function that is for training alone, with dropout say
            yield Law(name, None, f"not tested, as the loss function needs more than a batch ({type(error).__name__})")
            return

        def of_rank(mesh: Mesh) -> Any:
            placed = shard_alike(self.trial.params, self.plan.at(mesh.coords), mesh)
            return make_eval_step(self.trial.loss_fn, placed)(placed, share_of(batch, self.plan, mesh.coords))

        for rank, value in enumerate(simulate(of_rank, mesh=self.plan.sizes)):
            rows = share_of(batch, self.plan, coordinates(self.plan.sizes, rank))
            outcome = (
                whole
                if whole.weighted
                else read_loss(self.trial.loss_fn(own_copy(self.trial.params), own_copy(rows)), False)
            )
            due = outcome.total.double() / outcome.weights[0]
            got = torch.as_tensor(value[0] if isinstance(value, tuple) else value, dtype=torch.float64)
            apart = difference(got.reshape(()), due)
            if apart.matters:
                found = Finding("forward", f"the loss without gradients on {ranks_named((rank,))}", 0, apart, (rank,))
                yield Law(name, found, "", "look for torch.is_grad_enabled() in the loss function")
                return
        yield Law(name)


def _in_few_bits(plan: Plan) -> Iterator[Law]:
    """Sums in few bits, in the plan's own dtypes, lose nothing but by noise."""
    if not plan.channels:
        return
    name = "sums in few bits count every rank and every element alike"
    try:
        found = codec_laws(plan)
    except Exception as error:  # a codec that is for buffers of one kind alone
        yield Law(name, None, f"not tested, as the codec raised {type(error).__name__} on drawn buffers")
        return
    yield Law(name, found, "", "see what the codec sends for, and adds up of, each rank" if found else "")


_LAWS = {
    "placing": "parameters lie where their specs say",
    "forward": "the loss function computes what one device does",
    "reduction": "every leaf's gradient is that of one device",
    "norm": "loss and norm are those of one device",
    "update": "the optimizer's update and states are those of one device",
    "gather after the update": "stored parameters are the updated ones",
}


def _concerns(kind: type, subject: str, value: Any, found: Finding) -> bool:
    """Whether a claim is about a finding's leaf, or about an axis that its operation names."""
    if kind is Use and found.leaf:
        return subject == found.leaf
    if kind is Reduce:
        return repr(subject) in found.operation
    return kind is Live and repr(value) in found.operation
