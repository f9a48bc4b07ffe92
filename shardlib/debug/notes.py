"""Notes of one rank's step: the calls of a loss function with their values and gradients, blocks, keys, batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class NotedCall:
    """One call of a function of torch, or of `shardlib.nn`, in a loss function.

    Attributes:
        name: of the function.
        block: number of the block that it is in; None outside of blocks.
        paths: of the parameters among its arguments.
        where: file and line of the code that calls it.
        before: numbers of the earlier calls whose results it takes.
        values: copies of its results.
        grads: of its results, as far as backward has come.
    """

    name: str
    block: int | None
    paths: tuple[str, ...]
    where: str
    before: tuple[int, ...]
    values: list[torch.Tensor]
    grads: list[torch.Tensor | None]

    @property
    def label(self) -> str:
        return f"{self.name}({', '.join(self.paths)})" if self.paths else self.name


@dataclass
class Block:
    """One run of a block.

    Attributes:
        name: the path that its parameters have in common, or its number.
        params: path -> the parameter as the block gets it; handles, which stand for parameters, are left out.
        outputs: copies of the tensors that it returns.
        again: the calls of each of its recomputations.
    """

    name: str
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: list[torch.Tensor] = field(default_factory=list)
    again: list[list[NotedCall]] = field(default_factory=list)


@dataclass
class NotedRun:
    """One run of a loss function, or of the blocks of one stage, on one micro-batch.

    Attributes:
        stage: number of the stage.
        batch: the micro-batch.
        key: the key that it was given, or None.
        blocks: number -> block.
        leaf_grads: path -> gradient of the parameter, for parameters that stand in the loss as tensors.
        total, weight: of the loss; None where the stage is not the last.
        seed: the gradient from which backward began.
    """

    stage: int
    batch: Any
    key: Any
    calls: list[NotedCall] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)
    leaf_grads: dict[str, torch.Tensor] = field(default_factory=dict)
    total: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    seed: float | None = None


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that nothing writes to, with all of its elements: an embedding's gradient may be sparse."""
    return tensor.detach().to_dense() if tensor.is_sparse else tensor.detach().clone()
