"""Training whose bits do not depend on the mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardlib.collectives.codecs.in_order import InOrder
from shardlib.collectives.summation import EXACT
from shardlib.errors import IllegalComposition, axes_named, listing
from shardlib.plan.arguments import integer
from shardlib.plan.claims import Claim, LeafInfo, Reduce, Step
from shardlib.plan.code import CodeCall, CodedTransform
from shardlib.plan.placement import reduce_dtype, splits_of
from shardlib.plan.transform import Resolved


@dataclass(frozen=True, repr=False)
class Reproducible(CodedTransform):
    """The transform that `reproducible` makes, with the arguments given there."""

    microbatches: int

    @property
    def call(self) -> CodeCall:
        return CodeCall(reproducible, vars(self))

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        yield Step(total_microbatches=self.microbatches)
        yield Reduce("*", codec=InOrder(self.microbatches), summation=EXACT)

    def check(self, resolved: Resolved) -> None:
        problems = [*self._other_contractions(resolved), *self._other_reductions(resolved), *self._schedule(resolved)]
        if problems:
            raise IllegalComposition(f"{self.name} cannot give the same bits on every mesh:\n{listing(problems)}")
        self._check_blocks(resolved)

    def _other_contractions(self, resolved: Resolved) -> Iterable[str]:
        sequence = resolved.step.sequence
        cut = dict.fromkeys(resolved.sliced_axes, "slices of layers, or experts of their own,")
        cut |= {sequence.axis: "parts of sequences,"} if sequence else {}
        for axis, what in cut.items():
            if resolved.sizes[axis] > 1:
                yield (
                    f"axis {axis!r}: ranks compute with {what} so that products and sums inside the loss are over fewer "
                    "elements and round otherwise than on one device; divide the batch over that axis, by zero"
                )

    def _other_reductions(self, resolved: Resolved) -> Iterable[str]:
        for axis, reduce in resolved.reductions.items():
            if axis != "*" and (form := reduce.codec or reduce.gathered):
                yield f"axis {axis!r}: what is rounded when values travel in {form} depends on the ranks; leave it out"
        narrow = [leaf.path for leaf in resolved.leaves if reduce_dtype(resolved.dtype(leaf), resolved).itemsize < 4]
        if any(resolved.dtype(leaf).is_floating_point for leaf in resolved.leaves if leaf.path in narrow):
            yield "gradients are summed in 16 bits; leave precision(reduce_dtype=) at 'fp32'"

    def _schedule(self, resolved: Resolved) -> Iterable[str]:
        if resolved.step.sync == "each":
            yield "sync='each' sums each micro-batch over ranks first, before neighbouring micro-batches; leave it out"
        for path, use in resolved.uses.items():
            if use.stages is not None and len(use.stages) > 1:
                yield (
                    f"{path} is used in stages {', '.join(map(str, use.stages))}, each of which sums its own gradient over "
                    "micro-batches; give the blocks parameters of their own, or leave pipeline out"
                )

    def _check_blocks(self, resolved: Resolved) -> None:
        """Refuse ranks that hold unequal numbers of micro-batches, and axes that are summed in another order."""
        batch = [axis for axis, size in resolved.sizes.items() if size > 1 and resolved.varies_over(axis)]
        ranks, total = math.prod(resolved.sizes[axis] for axis in batch), self.microbatches
        local, rest = divmod(total, ranks)
        if rest:
            allowed = [n for n in range(1, total + 1) if total % n == 0]
            raise IllegalComposition(
                f"{self.name}: {ranks} ranks divide the batch, and each must hold equally many of the {total} micro-batches. "
                f"Use {_listed(allowed)} ranks, or reproducible({ranks * -(-total // ranks)})"
            )
        if resolved.step.microbatches not in (None, local):
            raise IllegalComposition(
                f"{self.name} gives each of {ranks} ranks {local} micro-batches, and another transform asks for "
                f"{resolved.step.microbatches}: use microbatches={local} in pipeline(), and leave accumulate() out"
            )
        split = [axis for axis in splits_of(resolved).optimizer if axis in batch]
        order = [*split, *(axis for axis in reversed(batch) if axis not in split)]
        if len(split) > 1:
            others = [axis for axis in split if axis != batch[-1]]
            raise IllegalComposition(
                f"{self.name}: the state is split over {axes_named(split)}, and sums begin with the mesh's last: "
                f"use zero(stage, axis={batch[-1]!r}, replicate={others[0]!r})"
            )
        if order != batch[::-1]:
            raise IllegalComposition(
                f"{self.name}: gradients are summed over {axes_named(order)}, in this order, and the tree begins with "
                f"{batch[-1]!r}: name the axes of the mesh in the order {', '.join(order[::-1])}"
            )


def _listed(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def reproducible(microbatches: int) -> Reproducible:
    """Sum everything in an order that does not depend on the mesh: the state and the losses have the same bits on any mesh.

    The global batch is ``microbatches`` micro-batches, however many ranks divide it. Gradients are summed over them in one
    binary tree, inside ranks and between; losses, weights and norms are summed exactly and rounded once. So one device, and
    any mesh of data, hybrid (``replicate=``) and pipeline axes at any ZeRO stage, train to the same last bit. Any number of
    ranks that divides ``microbatches`` can divide the batch. Where a rank's share is not 1, 2, 4, ... micro-batches, it sends
    the gradient two or more times, which the plan counts. See docs/reproducible.md for what must also be equal, and for what
    it costs.

    A rank cuts its share of the batch into its share of the micro-batches itself: `accumulate` is left out, and a pipeline's
    ``microbatches`` are ``microbatches`` over the ranks that divide the batch. While it sums them, it holds whole gradients,
    at every stage: log₂ of its number of micro-batches of them.

    Args:
        microbatches: number of micro-batches of all ranks together, at least 1.

    Raises:
        IllegalComposition: when a plan is made, a number of ranks that does not fit, or another transform whose rounding
            depends on the mesh: slices and parts of sequences, whose products are over fewer elements; compressed exchanges.
            When a step is made, optimizers that sum gradients themselves or keep moments in blocks of a shard, and buffers.

    >>> parallel = sl.chain(sl.zero(2), sl.reproducible(8))
    >>> [sl.make_plan({"w": torch.ones(8, 8)}, sl.abstract_mesh(data=n), parallel).step.microbatches for n in (1, 2, 8)]
    [8, 4, 1]
    """
    return Reproducible(integer("reproducible", "microbatches", microbatches))
