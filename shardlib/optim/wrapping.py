"""What transformations around others have in common."""

from __future__ import annotations

from shardlib.errors import IllegalComposition
from shardlib.optim.base import GradientTransformation


def require_no_axis(what: str, *inner: GradientTransformation) -> None:
    """Refuse optimizers that reduce gradients themselves: the train step must see when they do."""
    for tx in inner:
        if tx.owns is not None:
            raise IllegalComposition(
                f"{what} around {tx.owns.name}, which reduces gradients over axis {tx.owns.axis!r} itself: that is done for "
                f"all parameters and at every step, or by none; use {tx.owns.name} without {what}"
            )
