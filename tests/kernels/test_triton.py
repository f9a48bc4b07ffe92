"""Every Triton kernel, interpreted, is held to the reference or to float64."""

from pathlib import Path

import pytest
from helpers import counter, kernels, layer_kernels, sparse_cases, step_kernels
from helpers.interpreter import interpret

HERE = Path(__file__).parent
SCRIPTS = {
    **dict.fromkeys(("adamw", "adamw8", "frozen_adam", "global_norm", "lion"), step_kernels.__file__),
    **dict.fromkeys(
        ("gelu", "layer norm", "rms norm", "swiglu", "dropout", "softmax", "rotary"), layer_kernels.__file__
    ),
    **dict.fromkeys(("onebit", "quantize"), kernels.__file__),
    **{name: str(HERE / f"test_kernels_{name}.py") for name in ("permute", "routing", "subset")},
    "counter": counter.__file__,
    "linear_cross_entropy": str(HERE / "test_linear_cross_entropy.py"),
    "sparse_attention": sparse_cases.__file__,
}


@pytest.mark.parametrize("operation", SCRIPTS)
def test_interpreted(operation):
    interpret(operation, SCRIPTS[operation])
