"""What ranks must agree on: inputs, numbers of rows, the form of results, the loss, and gradients of copies."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from shardlib.collectives import primitives
from shardlib.collectives.primitives import sum_over
from shardlib.errors import HandleError, LossError, RankMismatch, axes_named, listing
from shardlib.execute.batches import batch_index
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming
from shardlib.nn.functional import Mean
from shardlib.plan.plan import Plan
from shardlib.sharded.checksum import checksums
from shardlib.sharded.gradient_offload import GradientOffload
from shardlib.tree import Tree

# Agreement of all ranks on the form of their results, checked by summing a few numbers.
# Ranks combine their results position by position, so results of different forms would be combined wrongly or deadlock. The
# numbers join a sum that the ranks make anyway, and show every rank whether forms differ; only then do the ranks exchange
# the forms themselves.


_WORD = 20  # bits: sums of squares over up to 8,192 ranks are exact in float64


@dataclass(frozen=True)
class Agreement:
    """The form of one rank's results.

    Attributes:
        form: a description of the form; None on a rank without results, such as one that does not compute the loss.
        faults: errors in this rank's results alone, each with its remedy.
    """

    form: str | None
    faults: tuple[str, ...] = ()

    def numbers(self) -> list[float]:
        """The numbers to sum over ranks: 1 for faults, 1 for results, and two words of the form's hash with their squares."""
        if self.form is None:
            return [float(bool(self.faults)), 0, 0, 0, 0, 0]
        digest = int.from_bytes(hashlib.blake2b(self.form.encode(), digest_size=2 * _WORD // 8).digest(), "big")
        first, second = digest >> _WORD, digest % (1 << _WORD)
        return [float(bool(self.faults)), 1, first, first**2, second, second**2]

    def refuse(self, mesh: Mesh, remedy: str) -> NoReturn:
        """Raise the same error on every rank, with all ranks' faults or forms. Collective: all ranks call it."""
        everyone = primitives.all_gather_object(mesh, list(mesh.shape), (mesh.rank, self.form, self.faults))
        problems = [f"rank {rank}: {fault}" for rank, _, faults in everyone for fault in faults]
        if not problems:
            forms: dict[str, list[int]] = {}
            for rank, form, _ in everyone:
                if form is not None:
                    forms.setdefault(form, []).append(rank)
            problems = [f"rank {', '.join(map(str, ranks))}: {form}" for form, ranks in forms.items()]
            raise LossError(f"the ranks' results differ in form:\n{listing(problems)}\n{remedy}")
        raise LossError(f"results that cannot be put together:\n{listing(problems)}")


def agree(sums: Sequence[float]) -> bool:
    """Whether all ranks have one form and no fault, given the sums of their `Agreement.numbers`.

    n numbers are equal if and only if n times the sum of their squares is the square of their sum.
    """
    faults, ranks, *words = map(int, sums)
    return not faults and all(ranks * words[i + 1] == words[i] ** 2 for i in (0, 2))


# Checks, in every step, that ranks which must be given the same inputs are given the same.
# In the first step the ranks compare digests before anything runs. In later steps each rank adds an integer to a sum that
# the step makes anyway. Of n ranks that must agree, the first adds n−1 times its digest and each other subtracts its own,
# so that the sum is zero if all agree. If digests differ the sum is zero with a probability below 2^-35 (for 4,096 ranks).
# If the sum is not zero, the ranks make another exchange to find what differs.


EVERY = 16  # steps between two comparisons of batches' contents: reading them costs a pass over their memory


class Inputs:
    """Compares the inputs of the ranks of one plan.

    Batches must be equal along the axes over which the batch does not vary: dtypes and shapes are compared in every step,
    contents in the first and in every 16th. Other inputs must be equal on all ranks and are compared in every step.

    Args:
        together: axes along which ranks take every step together, among them all axes over which the batch does not vary; by
            default all axes.

    Attributes:
        axes: the axes along which batches must be equal.
    """

    def __init__(self, plan: Plan, mesh: Mesh, together: tuple[str, ...] | None = None) -> None:
        self._plan, self._mesh = plan, mesh
        self._together = tuple(mesh.shape) if together is None else together
        self.axes: list[str] = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in plan.batch_axes]
        self._calls = 0
        self._batch: dict[str, str] = {}
        self._equal: dict[str, str] = {}

    def share(self, batch: Tree, equal: Mapping[str, Any]) -> float:
        """This rank's number, an integer. If the sum over ranks, in float64, is not zero, all of them must call `explain`.

        Args:
            equal: name -> value that must be equal on all ranks; compared as text. If empty, the sum may be over only the
                ranks that take steps together.

        Raises:
            RankMismatch: in the first call, as `explain`.
        """
        if self._mesh.alone:
            return 0.0
        self._equal = {name: str(value) for name, value in equal.items()}
        if self.axes:
            sums = checksums(batch, self._calls % EVERY == 0)
            self._batch = {path or "batch": checksum for path, checksum in sums.items()}
        self._calls += 1
        if self._calls == 1:
            self.explain()
        mesh, ranks = self._mesh, self._mesh.size
        index, sharing, group = 0, 1, []
        for axis, size in mesh.shape.items():
            if axis in self.axes:
                index, sharing = index * size + mesh.coords[axis], sharing * size
            else:
                group.append(mesh.coords[axis])
        # The digest covers the group's coordinates; without them opposite differences in two groups would cancel.
        number = _digest((group, self._batch), mesh) * (sharing * (index == 0) - 1)
        if equal:
            number += _digest(self._equal, mesh) * (ranks * (mesh.rank == 0) - 1)
        return float(number)

    def explain(self) -> None:
        """Compare the inputs of the last call of `share`. Collective: all ranks that take steps together call it.

        Raises:
            RankMismatch: on all ranks, where any differ; names the leaves and the ranks.
        """
        mesh, batch_axes = self._mesh, self._plan.batch_axes
        remedy = (
            "Step all ranks from one state: made with the same arguments, restored from the same checkpoint, and with "
        )
        remedy += "the same hyper-parameters written to it."
        if self._equal:
            primitives.require_equal(mesh, "steps", self._equal, remedy, self._together)
        if not self.axes:
            return
        differences = primitives.differences(mesh, self._batch, self.axes)
        of_ranks = primitives.all_gather_object(mesh, self._together, differences)
        problems = list(dict.fromkeys(problem for of_rank in of_ranks for problem in of_rank))
        if problems:
            chosen = " and ".join(f"mesh.coords[{axis!r}]" for axis in batch_axes)
            remedy = f"choose it by {chosen} alone" if chosen else "pass all ranks the same"
            remedy = f"Ranks along {axes_named(self.axes)} work on one batch: {remedy}."
            raise RankMismatch(primitives.mismatch("batches", problems, remedy))


def _digest(value: Any, mesh: Mesh) -> int:
    """An integer of so few bits that sums over all ranks stay below 2^53, where float64 is exact."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - (50 - mesh.size.bit_length()))


def taken_together(plan: Plan) -> tuple[str, ...]:
    """The axes along which ranks take each batch together: they share the batch, gather parameters from each other, or send
    each other tokens for experts."""
    waiting = {axis for bucket in plan.everywhere.buckets for axis in bucket.axes[: bucket.param_level]}
    if plan.step.tokens is not None:
        waiting.update(plan.step.tokens.axes)
    return tuple(
        axis for axis, size in plan.sizes.items() if size > 1 and (axis in waiting or axis not in plan.batch_axes)
    )


# How many rows of the global batch the ranks have: equally many, but in the last batch of a dataset.


class Shares:
    """The first row of a rank's share of the batch, by which keys draw.

    Ranks are taken to have equally many rows, and each adds an integer to a sum that the step makes anyway, which is zero if
    they have. If it is not, they exchange their numbers and take the step again; from then on they exchange them before each
    step, until they are equal.

    Args:
        draws: whether steps draw by keys. If not, nothing is exchanged.
    """

    def __init__(self, plan: Plan, mesh: Mesh, draws: bool) -> None:
        self._plan, self._mesh = plan, mesh
        self._ranks, self._index = plan.batch_ranks if draws else 1, batch_index(plan, mesh)
        self._exchanges = self._ranks > 1  # before the next step

    def first(self, rows: int) -> int | None:
        """The first row of this rank, which has ``rows``; None if all are taken to have as many. Collective."""
        return self.exchanged(rows) if self._exchanges else None

    def number(self, rows: int) -> float:
        """This rank's integer: over all ranks these sum to zero if they have as many rows each, and else to another one."""
        if self._ranks == 1 or self._exchanges:
            return 0.0
        few = _digest(rows, self._mesh)
        return float(few * (self._ranks * (self._index == 0) - 1))

    @naming("the ranks' numbers of rows")
    def exchanged(self, rows: int) -> int | None:
        """`first`, once the ranks have exchanged their numbers of rows. Collective."""
        if self._ranks == 1:
            return None
        of_ranks = torch.zeros(self._ranks, dtype=torch.float64)
        of_ranks[self._index] = rows
        of_ranks = of_ranks.to(self._mesh.device)
        sum_over(self._mesh, self._plan.batch_axes, of_ranks)
        found = of_ranks.tolist()
        self._exchanges = len(set(found)) > 1
        return round(sum(found[: self._index])) if self._exchanges else None


# Checks that ranks that share a batch compute the same loss, and the same gradients for parameters that are not sliced.


# _TOLERANCE: relative difference up to which two ranks' sums over the same numbers count as equal. _ROUNDING: a gradient with
# a norm below this share of the whole gradient's is rounding error, and so is a difference of losses below it.
_TOLERANCE, _ROUNDING = 1e-3, 1e-6
_Losses = Sequence[Mean]


def require_alike(
    grads: Mapping[str, torch.Tensor], landing: GradientOffload, losses: _Losses, plan: Plan, mesh: Mesh
) -> None:
    """Refuse losses that ranks compute from their slices, and whole parameters that layers apply to slices.

    Ranks would otherwise train on different losses, or with partial gradients of whole parameters.

    Args:
        grads: bucket name -> this rank's shard of the gradient, summed over the batch.
        landing: that of ``grads``.
        losses: total and weight of each mean of each micro-batch on this rank.

    Raises:
        HandleError: on every rank; names the losses, or the parameters.
    """
    axes = sorted({style.axis for style in plan.styles.values()})
    if not axes:
        return
    _require_one_loss(losses, [axis for axis in axes if axis not in plan.loss_axes], mesh)
    bad: list[str] = []
    found = landing.examined(lambda: [_sums(grads, plan, axis) for axis in axes])
    for axis, sums in zip(axes, found, strict=True):
        of_ranks = primitives.all_gather_object(mesh, [axis], sums)
        smallest = _ROUNDING**2 * max(squares for of_rank in of_ranks for squares, _, _ in of_rank.values())
        for path in sums:
            if path and any(_differ(of_rank[path], of_ranks[0][path], smallest) for of_rank in of_ranks[1:]):
                bad.append(f"{path}: along axis {axis!r}")
    if failures := _of_any_rank(mesh, bad):
        raise HandleError(
            f"gradients of whole parameters differ between ranks:\n{listing(failures)}\nUse the style 'shared' "
            "between a column and a row layer; slice all layers side by side, or none"
        )


def _require_one_loss(losses: _Losses, axes: Sequence[str], mesh: Mesh) -> None:
    numbers = [float(number) for loss in losses for number in loss]
    bad: list[str] = []
    for axis in axes:
        of_ranks = primitives.all_gather_object(mesh, [axis], numbers)
        columns = list(zip(*of_ranks, strict=False))
        if any(_far(first, other) for first, *others in columns for other in others):
            bad.append(f"along axis {axis!r}: {', '.join(f'{total:g}' for total in columns[0])} (first micro-batch)")
    if failures := _of_any_rank(mesh, bad):
        raise HandleError(
            f"losses of one batch differ between ranks:\n{listing(failures)}\nGive a column layer without a row layer "
            "sl.column(gather=True), or 'replicated'"
        )


def _of_any_rank(mesh: Mesh, failures: list[str]) -> list[str]:
    """The failures of all ranks, without repetitions. Collective: all ranks call it."""
    everyone = primitives.all_gather_object(mesh, list(mesh.shape), failures)
    return list(dict.fromkeys(failure for of_rank in everyone for failure in of_rank))


def _far(a: float, b: float) -> bool:
    return abs(a - b) > max(_TOLERANCE * max(abs(a), abs(b)), _ROUNDING)


def _sums(grads: Mapping[str, torch.Tensor], plan: Plan, axis: str) -> dict[str, tuple[float, float, int]]:
    """Path -> sum of squares, sum and number of the gradient's elements, for leaves that ranks along the axis hold copies of.

    The entry for "" has the sum of squares of this rank's gradients of all leaves.
    """
    whole = sum(float(grad.double().square().sum()) for grad in grads.values())
    sums = {"": (whole, 0.0, 1)}
    for bucket in plan.trained:
        if axis in (*bucket.slices, *bucket.axes, *bucket.replicas):
            continue
        for path, grad in zip(bucket.paths, bucket.leaf_segments(grads[bucket.name], bucket.levels), strict=True):
            wide = grad.double()
            sums[path] = float(wide.square().sum()), float(wide.sum()), grad.numel()
    return sums


def _differ(a: tuple[float, float, int], b: tuple[float, float, int], smallest: float) -> bool:
    """Whether the sums of two ranks differ by more than rounding; False for sums that are not finite."""
    squares = max(a[0], b[0])
    return squares > smallest and (
        abs(a[0] - b[0]) > _TOLERANCE * squares or abs(a[1] - b[1]) > _TOLERANCE * (a[2] * squares) ** 0.5
    )
