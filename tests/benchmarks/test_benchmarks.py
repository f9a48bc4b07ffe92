"""Benchmarks for a GPU run to their end at tiny sizes, without one."""

import subprocess
import sys
from pathlib import Path


def test_the_cases_of_a_gpu_run_to_their_end():
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "benchmarks", "run", "--device", "cuda", "--small"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WRONG" not in done.stdout
    assert "is not written" in done.stdout
    for title in (
        "Checks",
        "A step of a small GPT",
        "A step of a GPT of 1.1 billion parameters",
        "Kernels of compressed communication",
        "Kernels of optimizers",
        "Kernels of a dense layer",
        "Sparse attention",
    ):
        assert f"## {title}" in done.stdout
