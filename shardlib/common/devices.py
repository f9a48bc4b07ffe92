"""The device that a process computes on, and how its memory is reached."""

from __future__ import annotations

import os

import torch


def default_device() -> torch.device:
    """This process's CUDA device where there is one, else the CPU."""
    return with_index(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def with_index(device: torch.device) -> torch.device:
    """``device`` with the index that its tensors name; where it has none, that of this process on its host."""
    if _has_index(device) or device.type in ("cpu", "meta"):
        return device
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.get_device_module(device).device_count()
    return torch.device(device.type, index)


def pins(device: torch.device) -> bool:
    """Whether copies between ``device`` and the host go through pinned memory, beside other work."""
    return device.type not in ("cpu", "meta", "mps")


def default_generator(device: torch.device) -> torch.Generator:
    """Torch's own generator of a device."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    module = torch.get_device_module(device)
    return module.default_generators[device.index if _has_index(device) else module.current_device()]


def _has_index(device: torch.device) -> bool:
    return ":" in str(device)  # `device.index` is None without one, and typed as a number
