"""The names of dtypes."""

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in torch: "float32"."""
    return str(dtype).removeprefix("torch.")
