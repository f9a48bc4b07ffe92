"""The versions and devices that a process runs with."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import torch

_PACKAGES = ("shardlib", "torch", "optree", "numpy", "triton", "ninja", "cloudpickle", "transformers", "deepspeed")


def versions() -> list[tuple[str, str]]:
    """Package -> version, of Python and of what the library works with."""
    rows = [("python", platform.python_version())]
    for name in _PACKAGES:
        try:
            rows.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((name, "not installed"))
    return rows


def devices() -> list[tuple[str, str]]:
    """Device -> what it is."""
    capability = torch.backends.cpu.get_cpu_capability()
    rows = [("cpu", f"{os.cpu_count()} cores, {capability}, {torch.get_num_threads()} torch threads")]
    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        return [*rows, ("cuda", f"none: {built}")]
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        rows.append(
            (f"cuda:{index}", f"{facts.name}, {facts.total_memory / 1e9:.0f} GB, sm_{facts.major}{facts.minor}")
        )
    return rows
