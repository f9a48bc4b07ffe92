"""What the Triton kernels share."""

from __future__ import annotations

from typing import Any

import torch
import triton

from shardlib.kernels.common.build import BuildError
from shardlib.kernels.common.thresholds import Threshold

# A product is rounded before it is added, as everywhere.
EXACT: dict[str, Any] = {"enable_fp_fusion": False}


def triton_name(device: torch.device) -> str:
    """The implementation's name on ``device``.

    Raises:
        BuildError: Triton does not compile for it, and is not interpreting (TRITON_INTERPRET=1).
    """
    if triton.knobs.runtime.interpret:
        return f"Triton {triton.__version__}, interpreted"
    if device.type != "cuda":
        raise BuildError(f"Triton does not compile for {device.type}")
    return f"Triton {triton.__version__}"


_SUMS = Threshold(64)


def rows_each(count: int, tile: int, programs: Threshold = _SUMS) -> int:
    """How many rows, a multiple of ``tile``, a program sums, so that at most ``programs`` sums are left to add."""
    return max(1, triton.cdiv(count, programs() * tile)) * tile
