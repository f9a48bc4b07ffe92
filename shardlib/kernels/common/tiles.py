"""Names, options and grid sizes that the Triton kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import triton

from shardlib.common.thresholds import Threshold
from shardlib.kernels.common.build import BuildError
from shardlib.kernels.common.flat import factors_of, fields_of

TILE = 1024  # elements of a program that computes element by element
# Products are rounded before they are added, as in the other implementations.
Loader: TypeAlias = Callable[[torch.device], str]
Step: TypeAlias = Callable[[Any], None]
EXACT: dict[str, Any] = {"enable_fp_fusion": False}


def triton_name(device: torch.device) -> str:
    """The implementation's name on ``device``.

    Raises:
        BuildError: Triton does not compile for ``device``, and does not interpret (TRITON_INTERPRET=1).
    """
    if triton.knobs.runtime.interpret:
        return f"Triton {triton.__version__}, interpreted"
    if device.type != "cuda":
        raise BuildError(f"Triton does not compile for {device.type}")
    return f"Triton {triton.__version__}"


def by(kernel: Any) -> Callable[[Any], None]:
    """A step (see `shardlib.kernels.common.flat`) by an elementwise kernel.

    The kernel takes the step's tensors in order, their number of elements, its factors, and ``TILE``.
    """

    def step_by(step: Any) -> None:
        tensors, count = [getattr(step, name) for name in fields_of(step.__class__).tensors], step[0].numel()
        kernel[(triton.cdiv(count, TILE),)](*tensors, count, *factors_of(step), TILE=TILE, **EXACT)

    return step_by


_SUMS = Threshold(64)


def rows_each(count: int, tile: int, programs: Threshold = _SUMS) -> int:
    """The number of rows that a program sums, a multiple of ``tile``, so that at most ``programs`` programs have rows."""
    return max(1, triton.cdiv(count, programs() * tile)) * tile
