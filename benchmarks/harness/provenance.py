"""The provenance of a table: the command, the commit, torch, the machine and the day."""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

_ROOT = Path(__file__).parents[2]


def provenance(arguments: Sequence[str], device: torch.device) -> dict[str, str]:
    """The provenance of a measurement; taken before it, as writing a table changes the working tree."""
    return {
        "command": f"`{shlex.join(['python', '-m', 'benchmarks', *arguments])}`",
        "commit": commit(),
        "torch": f"{torch.__version__}, Python {platform.python_version()}",
        "machine": machine(device),
        "date": datetime.date.today().isoformat(),
    }


def commit() -> str:
    """The checked-out commit, "with changes" if files differ from it."""
    try:
        name, changes = (_git(*words) for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain")))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name} with changes" if changes else name


def machine(device: torch.device) -> str:
    """Processor, cores and memory, and the GPU if it is the device."""
    processors = _values("/proc/cpuinfo", "model name")
    model = processors[0] if processors else platform.processor() or platform.machine()
    facts = [model, f"{len(processors) or '?'} cores"]
    if memory := _values("/proc/meminfo", "MemTotal"):
        facts.append(f"{int(memory[0].split()[0]) / 2**20:.0f} GiB of memory")
    if device.type == "cuda":
        held = torch.cuda.get_device_properties(device).total_memory / 2**30
        facts.append(f"{torch.cuda.get_device_name(device)} with {held:.0f} GiB")
    return ", ".join(facts)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=_ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _values(file: str, field: str) -> list[str]:
    """Every value of a field in one of the kernel's lists."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return []
    return [line.split(":", 1)[1].strip() for line in lines if line.startswith(field)]
