"""ZeRO stages 0 to 3, and hybrid sharding (arXiv 1910.02054, section 5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardlib.errors import IllegalComposition
from shardlib.plan.claims import Claim, LeafInfo, Live, Reduce, Step
from shardlib.plan.code import Call, Coded

_SPLIT = {0: (), 1: ("optimizer",), 2: ("grad", "optimizer"), 3: ("param", "grad", "optimizer")}


@dataclass(frozen=True, repr=False)
class Zero(Coded):
    """The transform that `zero` makes, with the arguments given there."""

    stage: int
    axis: str
    replicate: str | None
    prefetch: bool

    @property
    def call(self) -> Call:
        return Call(zero, vars(self))

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        yield Reduce(self.axis, method="sum")
        if self.replicate:
            yield Reduce(self.replicate, method="sum")
        for role in _SPLIT[self.stage]:
            yield Live(role, self.axis)
        if not self.prefetch:
            yield Step(prefetch=False)


def zero(stage: int = 0, axis: str = "data", replicate: str | None = None, *, prefetch: bool = True) -> Zero:
    """Divide the batch over ``axis``, and split the training state over it.

    ======  ============================================
    stage   split over ``axis``
    ======  ============================================
    0       nothing: plain data parallelism
    1       optimizer state
    2       optimizer state and gradients
    3       optimizer state, gradients and parameters
    ======  ============================================

    Args:
        stage: 0 to 3.
        axis: mesh axis over which the batch is divided and the state is split.
        replicate: a second mesh axis, over which the batch is divided and the state is replicated (hybrid sharding: split
            inside a node, replicate across nodes).
        prefetch: whether the next unit is gathered while one computes (stage 3).

    Raises:
        IllegalComposition: a stage outside 0 to 3, or one axis as both ``axis`` and ``replicate``.

    >>> mesh, params = sl.abstract_mesh(data=4), {"w": torch.ones(256, 256)}
    >>> [sl.make_plan(params, mesh, sl.zero(stage)).bytes("param") for stage in range(4)]
    [262144, 262144, 262144, 65536]
    """
    if stage not in _SPLIT or isinstance(stage, bool):
        raise IllegalComposition(f"ZeRO stage {stage!r} is not one of 0, 1, 2, 3")
    if replicate == axis:
        raise IllegalComposition(f"zero cannot both split and replicate over axis {axis!r}; name two axes of the mesh")
    return Zero(int(stage), axis, replicate, prefetch)
