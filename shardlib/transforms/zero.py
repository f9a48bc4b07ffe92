"""ZeRO stages 0 to 3, and hybrid sharding (arXiv 1910.02054, section 5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardlib.errors import IllegalComposition
from shardlib.plan.arguments import axes_of, axis_of, flag, integer, refused
from shardlib.plan.claims import Claim, LeafInfo, Live, Reduce, Step
from shardlib.plan.code import CodeCall, CodedTransform
from shardlib.plan.tables import parse_size
from shardlib.plan.transform import Resolved

_SPLIT = {0: (), 1: ("optimizer",), 2: ("grad", "optimizer"), 3: ("param", "grad", "optimizer")}
_STAGES = f"use {', '.join(map(str, _SPLIT))}"


@dataclass(frozen=True, repr=False)
class Zero(CodedTransform):
    """The transform that `zero` makes, with the arguments given there."""

    stage: int
    axes: tuple[str, ...]
    replicate: str | None
    prefetch: bool
    keep: str | int | None

    @property
    def call(self) -> CodeCall:
        given = {"stage": self.stage, "replicate": self.replicate, "prefetch": self.prefetch, "keep": self.keep}
        return CodeCall(zero, {**given, "axis": self.axes[0] if len(self.axes) == 1 else self.axes})

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        for axis in (*self.axes, *([self.replicate] if self.replicate else [])):
            yield Reduce(axis, method="sum")
        for axis in self.axes:
            for role in _SPLIT[self.stage]:
                yield Live(role, axis)
        if not self.prefetch:
            yield Step(prefetch=False)
        if self.keep is not None:
            yield Step(keep=self.keep)

    def check(self, resolved: Resolved) -> None:
        if self.keep is not None and resolved.step.stages is not None:
            raise IllegalComposition(
                f"{self.name}: in a pipeline each of the micro-batches in flight would keep its own gathered parameters. "
                "Leave out keep=, or use accumulate"
            )


def zero(
    stage: int = 0,
    axis: str | Sequence[str] = "data",
    replicate: str | None = None,
    *,
    prefetch: bool = True,
    keep: str | int | None = None,
) -> Zero:
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
        axis: mesh axis over which the batch is divided and the state is split, or several. A leaf that has slices on one of
            them (`experts`) is split over the others.
        replicate: a second mesh axis, over which the batch is divided and the state is replicated (hybrid sharding: split
            inside a node, replicate across nodes).
        prefetch: whether the next unit is gathered while one computes (stage 3).
        keep: units that stay gathered from forward until backward has used them, so that backward does not gather them again
            (stage 3): "forward" for all of them, or as many as fit into this number of bytes ("2GiB", say) on each rank. The
            smallest ones stay, since each saves a message; of equal ones the last, which forward uses last.

    Raises:
        IllegalComposition: a stage outside 0 to 3, an axis twice, or none; ``keep`` at other stages than 3; when a plan is
            made, ``keep`` in a pipeline.

    >>> mesh, params = sl.abstract_mesh(data=4), {"w": torch.ones(256, 256)}
    >>> [sl.make_plan(params, mesh, sl.zero(stage)).bytes("param") for stage in range(4)]
    [262144, 262144, 262144, 65536]
    >>> [sl.make_plan(params, mesh, sl.zero(3, keep=keep)).payload()["data"] for keep in (None, "forward")]
    [589824, 393216]
    """
    stage = integer("zero", "stage", stage, 0, _STAGES)
    if stage not in _SPLIT:
        raise refused("zero", "stage", stage, _STAGES)
    axes = axes_of("zero", axis)
    replicate = None if replicate is None else axis_of("zero", "replicate", replicate)
    if replicate in axes:
        raise IllegalComposition(
            f"zero cannot both split and replicate over axis {replicate!r}; name two axes of the mesh"
        )
    return Zero(stage, axes, replicate, flag("zero", "prefetch", prefetch), _kept(keep, stage))


def _kept(keep: Any, stage: int) -> str | int | None:
    if keep is None:
        return None
    if stage < 3:
        raise refused(
            "zero", "keep", keep, f"stage {stage} gathers no parameters for use: use stage 3, or leave it out"
        )
    if isinstance(keep, str) and keep == "forward":
        return "forward"
    try:
        return parse_size(keep)
    except ValueError:
        raise refused("zero", "keep", keep, "use 'forward', or a number of bytes, such as '2GiB'") from None
