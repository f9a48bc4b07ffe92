"""Placements: how each parameter is placed on the mesh as a parameter, as a gradient and in the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardlib.collectives.styles.base import Style
from shardlib.common._compat import post_accumulate_hooks, read_backward_hooks
from shardlib.errors import TreeError, listing
from shardlib.mesh.specs import Leaf
from shardlib.plan.resolved import Resolved
from shardlib.tree import untrained


@dataclass(frozen=True)
class Placement:
    """How one parameter is placed in each role.

    Attributes:
        path: the parameter's path; the first one of a tied leaf.
        aliases: the other paths of a tied leaf.
        unit: name of the parameter's unit.
        bucket: name of the parameter's bucket.
        compute: shape, dtype and spec in the loss.
        param: the stored parameter.
        grad: the accumulated gradient; None for a frozen leaf.
        optimizer: the layout of the optimizer's state; None for a frozen leaf.
        style: how ranks that hold slices compute a layer together; None for an unsliced leaf.
        dealt: axes over which experts are dealt out: ranks hold different ones, and all of their tokens reach each.
        scaled: whether matrix products by the parameter are in 8 bits.
    """

    path: str
    aliases: tuple[str, ...]
    unit: str
    bucket: str
    compute: Leaf
    param: Leaf
    grad: Leaf | None
    optimizer: Leaf | None
    style: Style | None = None
    dealt: tuple[str, ...] = ()
    scaled: bool = False


def check_dtypes(placements: Sequence[Placement], resolved: Resolved) -> None:
    """Refuse leaves of dtypes that optimizers do not train (complex and 8-bit floats), unless they are frozen."""
    failures = [
        f"{placement.path}: {placement.compute.dtype}; {instead}"
        for placement in placements
        if resolved.use(placement.path).trainable is not False and (instead := untrained(placement.compute.dtype))
    ]
    if failures:
        raise TreeError(
            f"{len(failures)} leaves of dtypes that are not trained:\n{listing(failures)}\nOr leave them as they are, by "
            "sl.freeze(path)."
        )


def check_parameters(leaves: Mapping[str, torch.Tensor], resolved: Resolved) -> None:
    """Refuse leaves that are `torch.nn.Parameter` objects with ``requires_grad=False``, or tensors with hooks on their
    gradients, unless they are frozen here too."""
    trained = {path: leaf for path, leaf in leaves.items() if resolved.use(path).trainable is not False}
    still = [
        path
        for path, leaf in trained.items()
        if isinstance(leaf, torch.nn.Parameter) and leaf.is_floating_point() and not leaf.requires_grad
    ]
    if still:
        raise TreeError(
            f"{len(still)} leaves are parameters with requires_grad=False, and would be trained:\n{listing(still)}\n"
            "Add sl.freeze(paths) to the plan, or give leaf.detach(), or call leaf.requires_grad_(True)"
        )
    hooked = [path for path, leaf in trained.items() if read_backward_hooks(leaf) or post_accumulate_hooks(leaf)]
    if hooked:
        raise TreeError(
            f"{len(hooked)} leaves have hooks on their gradients, which would not run:\n{listing(hooked)}\nMask in the loss, "
            "mask * weight + (~mask * weight).detach(), or let the optimizer do it, sl.optim.chain(...); hooks on a module's "
            "parameters run if sl.from_module is given the module"
        )
