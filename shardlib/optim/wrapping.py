"""Checks of the gradient transformations that are passed to other functions."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.errors import IllegalComposition
from shardlib.optim.base import GradientTransformation


def require_transformations(what: str, *given: Any) -> None:
    """Refuse arguments of ``what`` that are not gradient transformations.

    Raises:
        TypeError: names the argument, and what to pass instead.
    """
    for tx in given:
        if not isinstance(tx, GradientTransformation):
            raise TypeError(f"{what} takes gradient transformations, such as sl.optim.adamw(3e-4), not {_instead(tx)}")


def _instead(tx: Any) -> str:
    """A description of ``tx``, and what to pass instead."""
    if tx is None:
        return "None; give one"
    if isinstance(tx, (list, tuple)) and any(isinstance(item, GradientTransformation) for item in tx):
        return f"a {type(tx).__name__} of them; give them one by one to sl.optim.chain, or sl.optim.named_chain"
    kind = tx if isinstance(tx, type) else type(tx)
    if issubclass(kind, torch.optim.Optimizer):
        equivalent = f" or sl.optim.{kind.__name__.lower()}(...)" if kind.__name__ in _EQUIVALENT else ""
        holds = "" if tx is kind else ", which holds parameters of its own"
        return (
            f"torch's {kind.__name__}{holds}; give sl.optim.from_torch(torch.optim.{kind.__name__}, lr=...){equivalent}"
        )
    if callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)):
        return (
            f"{kind.__name__} of {kind.__module__}, whose arrays are not torch's; sl.optim has optax's transformations by "
            "their names, and GradientTransformation(init, update, locality) takes two functions of torch's tensors"
        )
    if callable(tx) and not isinstance(tx, type):
        name = getattr(tx, "__name__", repr(tx))
        return (
            f"the function {name}; call it if it makes one, {name}(...), or give GradientTransformation(init, update)"
        )
    return f"{tx!r}"


# Optimizers of torch that sl.optim has too.
_EQUIVALENT = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adafactor", "Muon")


def require_no_axis(what: str, *inner: GradientTransformation) -> None:
    """Refuse transformations that reduce gradients themselves as arguments of ``what``.

    The train step must know at which steps they do so, which it cannot see inside another transformation.

    Raises:
        TypeError: an argument that is not a gradient transformation.
        IllegalComposition: one that reduces gradients itself.
    """
    require_transformations(what, *inner)
    for tx in inner:
        if tx.owns is not None:
            raise IllegalComposition(
                f"{what} around {tx.owns.name}, which reduces gradients over axis {tx.owns.axis!r} itself and must do so for "
                f"all parameters and at every step; use {tx.owns.name} without {what}"
            )
