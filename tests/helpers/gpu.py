"""The machine's GPU: hidden from the tests, which are the same on every machine, and shown to processes that are for it."""

import functools
import os
import shutil
import subprocess

_KEPT, _SEEN = "GPUS_OF_TESTS", "CUDA_VISIBLE_DEVICES"


def hide():
    """Hide GPUs from this process and those that it starts. To be called before CUDA is used."""
    os.environ.setdefault(_KEPT, os.environ.get(_SEEN, "all"))
    os.environ[_SEEN] = ""


def shown():
    """The environment of a process that sees the GPUs."""
    kept = os.environ.get(_KEPT, "all")
    hidden = {name: value for name, value in os.environ.items() if name != _SEEN}
    return hidden if kept == "all" else hidden | {_SEEN: kept}


@functools.cache
def found():
    """Whether there is a GPU, which this process does not see."""
    command = shutil.which("nvidia-smi")
    if command is None or shown().get(_SEEN) == "":
        return False
    listed = subprocess.run([command, "-L"], capture_output=True, text=True)
    return listed.returncode == 0 and "GPU" in listed.stdout
