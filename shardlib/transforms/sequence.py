"""Sequence parallelism: activations are cut along the sequence over a mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from shardlib.collectives.sequence import KINDS, SequenceKind
from shardlib.errors import IllegalComposition
from shardlib.plan.arguments import axis_of
from shardlib.plan.claims import Claim, LeafInfo, Step
from shardlib.plan.code import CodeCall, CodedTransform, options_of
from shardlib.plan.transform import Resolved


@dataclass(frozen=True, repr=False)
class SequenceParallel(CodedTransform):
    """The transform that `sequence` makes, with the arguments given there."""

    kind: SequenceKind

    @property
    def call(self) -> CodeCall:
        kind, known = type(self.kind), KINDS.get(self.kind.name)
        given = {name: value for name, value in options_of(self.kind).items() if name != "axis"}
        named = self.kind.name if kind is known else kind
        return CodeCall(sequence, {"axis": self.kind.axis, "kind": partial(kind, **given) if given else named})

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        yield Step(sequence=self.kind)

    def check(self, resolved: Resolved) -> None:
        self.kind.check(resolved.sliced_axes)


def sequence(axis: str, kind: str | Callable[[str], SequenceKind] = "ulysses") -> SequenceParallel:
    """Cut activations along the sequence (dimension 1) over ``axis``. The ranks along the axis share one batch.

    ========  =================================================================================================
    kind      how positions meet
    ========  =================================================================================================
    megatron  ``axis`` is also that of `tensor_slicing`: sliced layers gather the sequence before them and
              reduce-scatter it after them, instead of all-reduces (Korthikanti et al., arXiv 2205.05198)
    ulysses   all-to-all before attention, from parts of the sequence to shares of the heads, and back after
              it (arXiv 2309.14509)
    ring      keys and values travel around the ring of ranks, and no rank ever holds all of them (arXiv
              2310.01889); each rank has one chunk from either end of the sequence, so that causal work is even
    ========  =================================================================================================

    For another kind pass a subclass of `shardlib.collectives.sequence.SequenceKind`.

    The model calls `shard_sequence` (or `embedding`), `attention` and `linear_cross_entropy`, which are plain PyTorch
    without this transform; dropout draws the whole sequence's mask. A parameter that is not sliced over ``axis``
    is whole on every rank along it, and its gradient is summed. With "ulysses" and "ring", ``zero(stage, axis=axis)`` also
    splits the training state over the axis.

    Raises:
        IllegalComposition: an unknown kind; when a plan is made, "megatron" without `tensor_slicing` over the axis or
            with `zero` over it, and another kind with `tensor_slicing` over the axis.

    >>> mesh, parallel = sl.abstract_mesh(data=2, seq=4), sl.chain(sl.sequence("seq", "ring"), sl.zero(1))
    >>> plan = sl.make_plan({"w": torch.ones(8, 8)}, mesh, parallel)
    """
    axis = axis_of("sequence", "axis", axis)
    make = KINDS.get(kind) if isinstance(kind, str) else kind
    made = make(axis) if callable(make) else None
    if not isinstance(made, SequenceKind):
        raise IllegalComposition(
            f"sequence(kind={kind!r}) is not one of {', '.join(map(repr, KINDS))}, and makes no "
            "shardlib.collectives.sequence.SequenceKind of an axis, as a subclass does"
        )
    return SequenceParallel(made)
