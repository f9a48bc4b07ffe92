"""What users give as numbers, as NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def as_array(values: Any) -> np.ndarray:
    """Values as an array: tensors of any dtype and device, with gradients too, lists of such, and what NumPy takes.

    What makes no array, such as rows of different lengths, is an array without dimensions that holds it.
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        return (values.double() if values.dtype == torch.bfloat16 else values).numpy()
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError):
        if isinstance(values, (list, tuple)) and all(
            isinstance(each, torch.Tensor) and not each.dim() for each in values
        ):
            return np.asarray([each.item() for each in values])
        held = np.empty((), object)
        held[()] = values
        return held
