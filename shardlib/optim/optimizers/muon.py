"""Muon: momentum orthogonalised by Newton–Schulz iterations (Jordan et al., 2024; the scale is of arXiv 2502.16982)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from shardlib.errors import IllegalComposition, listing
from shardlib.optim.base import GradientTransformation
from shardlib.optim.checks import check, is_number, is_positive, is_share, is_size, is_step
from shardlib.optim.code import coded
from shardlib.optim.schedules.base import Schedule, as_schedule
from shardlib.optim.shards import Locality, Shards
from shardlib.optim.stepping import ParameterChange, each, stepping
from shardlib.tree import Tree, tree_map

NS_COEFFS = (3.4445, -4.7750, 2.0315)


class MuonState(NamedTuple):
    """``count``: steps taken (0-d float); ``mu``: running mean of g."""

    count: torch.Tensor  # type: ignore[assignment]  # optax's name, though tuples have a method of it
    mu: Tree


@coded
def muon(
    lr: float | Schedule,
    ns_coeffs: tuple[float, float, float] = NS_COEFFS,
    ns_steps: int = 5,
    beta: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    nesterov: bool = True,
    consistent_rms: float | None = None,
) -> GradientTransformation:
    """Update ``−lr·(scale·orthogonalise(m̂) + weight_decay·p)``, only for matrices ``[out, in]`` and stacks of matrices.

    m̂ is the bias-corrected running mean of g; with ``nesterov`` it is beta times the running mean, corrected as in the next
    step, plus (1−beta) times g, corrected. scale is ``√max(1, out/in)``, or ``consistent_rms·√max(out, in)``. Defaults as
    optax.contrib.muon, whose matrix branch this is: give vectors, embeddings and heads to another optimizer by `partition`.
    torch.optim.Muon computes in bfloat16 and corrects no bias.

    On shards each matrix is gathered on one of the ranks that it is split over, orthogonalised there, and sent back. ``plan``
    shows this as the optimizer's payload. Ranks that hold copies compute the same matrices.

    Raises:
        ValueError: a hyper-parameter out of range.
        IllegalComposition: parameters with fewer than two dimensions; lists them.

    >>> p, g = {"w": torch.ones(4, 4)}, {"w": torch.eye(4)}
    >>> tx = sl.optim.muon(0.1)
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"].shape
    torch.Size([4, 4])
    """
    check(
        "muon",
        "beta is at least 0 and below 1 (usually 0.95), ns_coeffs three numbers, ns_steps an integer from 1, eps above 0, "
        "weight_decay at least 0, consistent_rms above 0 or None",
        ns_coeffs=(
            ns_coeffs,
            isinstance(ns_coeffs, Sequence) and len(ns_coeffs) == 3 and all(map(is_number, ns_coeffs)),
        ),
        beta=(beta, is_share(beta)),
        ns_steps=(ns_steps, is_step(ns_steps)),
        eps=(eps, is_positive(eps)),
        weight_decay=(weight_decay, is_size(weight_decay)),
        consistent_rms=(consistent_rms, consistent_rms is None or is_positive(consistent_rms)),
    )
    rate = as_schedule(lr, "muon")

    def init(params: Tree, shards: Shards) -> MuonState:
        flat = [f"{info.path}: shape {info.shape}" for info in shards.about(params) if len(info.shape) < 2]
        if flat:
            raise IllegalComposition(
                f"muon orthogonalises matrices, and these parameters are not matrices:\n{listing(flat)}\nGive them to "
                "another optimizer: sl.optim.partition({'muon': muon(...), 'rest': adamw(...)}, labels)"
            )
        return MuonState(torch.zeros(()), tree_map(torch.zeros_like, params))

    def step(
        params: Tree, grads: Tree, state: MuonState, scale: torch.Tensor | None, shards: Shards
    ) -> tuple[MuonState, ParameterChange]:
        size, count = rate(state.count), state.count + 1
        exact = count.to(torch.float64)
        now, next_step = 1 - beta**exact, 1 - beta ** (exact + 1)

        def direct(g: torch.Tensor, m: torch.Tensor) -> None:
            if scale is not None:
                g.mul_(scale)
            m.lerp_(g, 1 - beta)
            if nesterov:
                g.mul_((1 - beta) / now).add_(m * (beta / next_step))
            else:
                torch.div(m, now, out=g)

        each(direct, grads, state.mu)
        directions = shards.whole(lambda number, matrix: _orthogonal(matrix) * _scale(matrix), grads)

        def move(p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
            return u.add_(p, alpha=weight_decay).mul_(-size)

        return MuonState(count, state.mu), ParameterChange(move, (directions,))

    def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
        return orthogonalize(matrix, ns_coeffs, ns_steps, eps)

    def _scale(matrix: torch.Tensor) -> float:
        rows, columns = matrix.shape[-2:]
        if consistent_rms is not None:
            return consistent_rms * max(rows, columns) ** 0.5
        return max(1.0, rows / max(columns, 1)) ** 0.5

    def sends(shards: Shards) -> Mapping[str, int]:
        return shards.whole_sends()

    return stepping("muon", init, step, Locality.WHOLE, sends=sends)


def orthogonalize(matrix: torch.Tensor, coeffs: tuple[float, float, float], steps: int, eps: float) -> torch.Tensor:
    """Newton–Schulz: ``x ← a·x + (b·xxᵀ + c·(xxᵀ)²)·x`` from ``matrix/‖matrix‖``, which brings singular values near 1.

    ``[..., rows, columns]`` -> the same shape. Tall matrices are transposed for the iteration, which makes xxᵀ smaller and
    does not change the result.
    """
    a, b, c = coeffs
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
