"""How blocks are recomputed in backward, and where what they are recomputed from is kept meanwhile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardlib.collectives.sequence.base import SequenceKind
from shardlib.errors import IllegalComposition

NO_BLOCKS = (
    "remat recomputes blocks, and the loss function has none: all activations are kept. Mark its layers with sl.block, or "
    "cut the module by sl.from_module(module, blocks=[...]); models of transformers recompute themselves after "
    "gradient_checkpointing_enable()"
)
SMALLEST = 1 << 16  # bytes; the latency of moving less costs more than its memory is worth


@dataclass(frozen=True)
class Recompute:
    """How blocks are recomputed in backward.

    Attributes:
        policy: "full", "dots", "auto" or a policy function.
        save: names of values that are kept.
        sharded: whether inputs of blocks are to be divided over the axis of slices.
        host: whether they are kept in host memory.
        smallest: bytes below which an input stays where it is.
        blocks: how many of a micro-batch's blocks are recomputed, the first of each stage; None for all.
        axis: the axis over which inputs are divided, once a plan has decided it.
    """

    policy: str | Callable[..., Any]
    save: tuple[str, ...] = ()
    sharded: bool = False
    host: bool = False
    smallest: int = SMALLEST
    blocks: int | None = None
    axis: str | None = None

    @property
    def store(self) -> tuple[str, ...]:
        """The names of the stores, as `shardlib.remat` takes them."""
        return ("sharded",) * self.sharded + ("host",) * self.host

    def covers(self, block: int) -> bool:
        """Whether a block is recomputed, by its number in a micro-batch, or in a stage of it."""
        return self.blocks is None or block < self.blocks

    def without_blocks(self, count: int) -> str:
        """What to say of a function in which ``count`` blocks ran: that nothing is recomputed, if none did; else "".

        (Inputs of checkpoints that the function makes itself go to the store too.)
        """
        return "" if count or self.store else NO_BLOCKS

    def require_decided(self) -> None:
        """Refuse a policy that leaves the choice to a plan.

        Raises:
            IllegalComposition: the policy is "auto".
        """
        if self.policy == "auto":
            raise IllegalComposition(
                "remat('auto') needs a budget and a trace: plan = sl.make_plan(..., loss_fn=, batch=, optimizer=, "
                "device_memory=) chooses. Shard with sl.remat(blocks=plan.step.remat.blocks)"
            )

    def __str__(self) -> str:
        policy = str(getattr(self.policy, "__qualname__", self.policy))
        policy += f" but for {', '.join(self.save)}" if self.save else ""
        of = "" if self.blocks is None else f" of the first {self.blocks} blocks"
        return f"{policy}{of}" + (f", from inputs in store {' and '.join(self.store)}" if self.store else "")

    def over(
        self, sliced: Iterable[str], sizes: Mapping[str, int], sequence: SequenceKind | None
    ) -> tuple[Recompute, list[str]]:
        """With the axis over which inputs are divided; and notes for the plan's log.

        Args:
            sliced: the axes of slices.
            sizes: axis -> size, for all axes.
            sequence: how sequences are cut; None if they are not.

        Raises:
            IllegalComposition: inputs are to be divided, and there is no axis along which ranks hold the same.
        """
        axes = sorted(axis for axis in sliced if sizes[axis] > 1)
        if not self.sharded or (not axes and 1 in sizes.values()):
            return self, []  # slices over an axis of one rank are whole leaves, like any others
        if sequence and axes in ([], [sequence.axis]):
            return self, [
                f"inputs of blocks are parts of sequences over axis {sequence.axis!r} already: not divided further"
            ]
        if len(axes) != 1:
            number = f"are several: {', '.join(axes)}" if axes else "is none"
            raise IllegalComposition(
                f"remat(store={self.store!r}) divides inputs of blocks over the axis of tensor_slicing, and there {number}; "
                "use store='host' or store='device', or tensor_slicing over one axis"
            )
        return replace(self, axis=axes[0]), []


def fewest(count: int, peak: Callable[[int], int], budget: int) -> int | None:
    """The smallest number of ``count`` blocks whose ``peak`` is within the budget, in few calls; None if not even all do.

    More blocks must not have a higher peak. Most models' blocks save alike, so the next number tried is where a line between
    the known peaks meets the budget. Every third is the middle one, for models whose blocks do not.
    """
    low, high = 0, count  # the first is too few, and the last is enough
    if (below := peak(count)) > budget:
        return None
    if (above := peak(0)) <= budget:
        return 0
    calls = itertools.count()
    while high - low > 1:
        share = (above - budget) / (above - below) if next(calls) % 3 < 2 else 0.5
        number = min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)
        found = peak(number)
        if found <= budget:
            high, below = number, found
        else:
            low, above = number, found
    return high
