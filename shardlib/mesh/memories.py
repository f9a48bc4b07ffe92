"""The memories that a buffer of the training state may lie in. A further one is a class and an entry of `MEMORIES`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from shardlib.common.devices import pins


class Memory(Protocol):
    """A memory of a rank."""

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat buffer of zeros in this memory, for a rank that computes on ``device``."""
        ...

    def device(self, device: torch.device) -> torch.device:
        """The device by which torch calls this memory of a rank that computes on ``device``."""
        ...


class DeviceMemory:
    """The memory of the device that a rank computes on."""

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def device(self, device: torch.device) -> torch.device:
        return device


class HostMemory:
    """The host's memory, pinned where the device has a memory of its own. Elsewhere both are one memory."""

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device(device), pin_memory=pins(device))

    def device(self, device: torch.device) -> torch.device:
        return torch.device("cpu") if pins(device) else device


MEMORIES: Mapping[str, Memory] = {"device": DeviceMemory(), "host": HostMemory()}
