"""The targets that the implementations of the cross entropy of an output layer take beside logits."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Aim(NamedTuple):
    """The targets of some tokens, and how they count.

    Attributes:
        targets: ``[tokens]``, int64: the number of a word for each token.
        ignore_index: a target whose token has no loss.
        label_smoothing: the share of a target that is spread over all words.
    """

    targets: torch.Tensor
    ignore_index: int
    label_smoothing: float
