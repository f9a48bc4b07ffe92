"""Adam's running means and direction without bias correction, on flat tensors: what the 1-bit papers build on.

(arXiv 2102.02888, 2104.06069, 2202.06009.)
"""

from __future__ import annotations

import torch


def moments(
    g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, b1: float, b2: float, scale: torch.Tensor | None
) -> None:
    """``m ← b1·m + (1−b1)·g``, ``v ← b2·v + (1−b2)·g²`` in place, with g·scale for g; g is used up."""
    if scale is not None:
        g.mul_(scale)
    m.lerp_(g, 1 - b1)
    v.mul_(b2).addcmul_(g, g, value=1 - b2)


def mask(m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Zero m where v is: signs are sent of elements that no gradient ever reached too, and would be divided by eps.

    In place. A product, since torch's masked operations take several times as long.
    """
    return m.mul_(v.sign())


def root(v: torch.Tensor, eps: float) -> torch.Tensor:
    """``√v + eps``."""
    return v.sqrt().add_(eps)


def direction(p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, eps: float, weight_decay: float) -> torch.Tensor:
    """``m/(√v + eps) + weight_decay·p``."""
    u = root(v, eps)
    torch.div(m, u, out=u)
    return u.add_(p, alpha=weight_decay) if weight_decay else u
