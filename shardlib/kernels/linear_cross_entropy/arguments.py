"""What the implementations of the cross entropy of an output layer are given beside its logits."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Aim(NamedTuple):
    """What the logits of some tokens are held to.

    Attributes:
        targets: ``[tokens]``, int64: a word's number each.
        ignore_index: the target that counts for nothing.
        label_smoothing: how much of a target is spread over all words.
    """

    targets: torch.Tensor
    ignore_index: int
    label_smoothing: float
