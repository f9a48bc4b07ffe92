"""Checks of arguments that all functions for the cross entropy of an output layer share, and the dtype of its scores."""

from __future__ import annotations

import torch


def check_options(function: str, reduction: str, label_smoothing: float, reductions: tuple[str, ...]) -> None:
    """Refuses options that ``function`` does not have.

    Raises:
        ValueError: ``reduction`` is none of ``reductions``, or ``label_smoothing`` is outside [0, 1].
    """
    if reduction not in reductions:
        allowed = f"{', '.join(map(repr, reductions[:-1]))} or {reductions[-1]!r}"
        raise ValueError(f"{function}(reduction={reduction!r}): use {allowed}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{function}(label_smoothing={label_smoothing}): give a share of the target, in [0, 1]")


def check_layer(function: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Refuses activations and an output layer's weight that cannot be multiplied.

    Raises:
        ValueError: the shapes do not fit, or the dtypes differ.
    """
    alike = x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type)
    if x.dim() < 1 or weight.dim() != 2 or not len(weight) or x.shape[-1] != weight.shape[1] or not alike:
        raise ValueError(
            f"{function}: x is {x.dtype} {tuple(x.shape)} and weight {weight.dtype} {tuple(weight.shape)}: they must be "
            "[..., width] and [V, width], of one dtype"
        )


def check_targets(function: str, targets: torch.Tensor, shape: torch.Size, of: str) -> None:
    """Refuses targets that are not one number of a word per row of ``of``.

    Raises:
        ValueError: the targets have another shape than ``shape``.
    """
    if targets.shape != shape:
        raise ValueError(f"{function}: targets have shape {tuple(targets.shape)}, and {of} asks for {tuple(shape)}")


def refuse_unknown(targets: torch.Tensor, words: int, ignore_index: int) -> None:
    """Refuses targets outside the vocabulary.

    Raises:
        IndexError: a target is none of the words, and not ignored.
    """
    if bool(((targets != ignore_index) & ((targets < 0) | (targets >= words))).any()):
        raise IndexError(f"a target lies outside the {words} words, and is not ignore_index ({ignore_index})")


def widened(scores: torch.Tensor) -> torch.Tensor:
    """``scores`` in fp32 at least: a sum over a whole vocabulary in 16 bits would lose too many digits."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
