"""The Triton kernels of a dense layer's pieces, compiled for sm_90 without a GPU: nothing spills."""

import importlib

import pytest
from helpers import kernels

pytest.importorskip("triton")

DRAWN = {"scale": "fp32", "threshold": "i32", "seed_low": "i64", "seed_high": "i64", "start": "i64"}
ROWS = {"rows": "i64", "columns": "i32"}


def compiles(operation, kernel, types, constants, folder, dtype="bf16", exact=True):
    """``types``: of the arguments, "x" standing for a pointer to ``dtype``; an argument without any is None."""
    module = importlib.import_module(f"shardlib.kernels.{operation}.triton")
    kernel = getattr(module, kernel)
    constants = dict(getattr(module, "TILE", {})) | constants
    warps = constants.pop("num_warps", 4)
    signature = {name: f"*{dtype}" if kind == "x" else kind for name, kind in types.items()}
    constants |= {name: None for name in kernel.arg_names if name not in signature and name not in constants}
    usage = kernels.triton_usage(kernel, signature, constants, folder, warps, exact)
    assert "STACK:0" in usage and "LOCAL:0" in usage, usage


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("tanh", [False, True])
def test_gelu(tanh, dtype, tmp_path):
    constants = {"BIAS": True, "TANH": tanh}
    types = dict.fromkeys(("x", "bias", "y"), "x") | ROWS
    compiles("gelu", "_forward", types, constants, tmp_path, dtype, exact=False)
    types = dict.fromkeys(("x", "bias", "dy", "dx"), "x") | ROWS | {"partial": "*fp32", "each": "i32"}
    compiles("gelu", "_backward", types, constants, tmp_path, dtype, exact=False)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("columns", [100, 4096, 16384])
@pytest.mark.parametrize("centred", [False, True])
def test_norm(centred, columns, dtype, tmp_path):
    from shardlib.kernels.norm.triton import CHUNK, _shape

    constants = {"CENTRED": centred, "SUM": True}
    types = dict.fromkeys(("x", "residual", "weight", "bias", "y", "total"), "x") | {"columns": "i32", "eps": "fp32"}
    compiles("norm", "_forward", types, constants | _shape(columns) | {"BIAS": True}, tmp_path, dtype)
    types = dict.fromkeys(("total", "weight", "dy", "dtotal", "ds"), "x") | ROWS
    types |= {"dweight": "*fp32", "dbias": "*fp32", "each": "i32", "eps": "fp32"}
    kernel = "_backward" if columns <= CHUNK else "_backward_wide"
    compiles("norm", kernel, types, constants | _shape(min(columns, CHUNK)), tmp_path, dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_swiglu(dtype, tmp_path):
    types = {"gate": "x", "gate_stride": "i64", "up": "x", "up_stride": "i64"} | ROWS
    compiles("swiglu", "_forward", types | {"y": "x"}, {}, tmp_path, dtype, exact=False)
    types |= dict.fromkeys(("dy", "dgate", "dup"), "x")
    compiles("swiglu", "_backward", types, {}, tmp_path, dtype, exact=False)


@pytest.mark.parametrize("starts", [False, True])
def test_dropout(starts, tmp_path):
    drawn = DRAWN | ({"starts": "*i64"} if starts else {})
    types = dict.fromkeys(("x", "residual", "bias", "y"), "x") | ROWS | drawn
    compiles("dropout", "_forward", types, {"BIAS": True, "RESIDUAL": True, "STARTS": starts}, tmp_path)
    types = {"dy": "x", "dx": "x", "partial": "*fp32", "each": "i32"} | ROWS | drawn
    compiles("dropout", "_backward", types, {"BIAS": True, "STARTS": starts}, tmp_path)


@pytest.mark.parametrize("keys", [128, 4096, 16384])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_softmax(dtype, keys, tmp_path):
    from shardlib.kernels.softmax.triton import _shape

    sizes = {"queries": "i32", "keys": "i32", "scale": "fp32"}
    types = {"x": "x", "y": "x", "lengths": "*i64", "per_sequence": "i32"} | sizes
    compiles("softmax", "_forward", types, {"CAUSAL": True, "LENGTHS": True, **_shape(keys)}, tmp_path, dtype, False)
    types = {"y": "x", "dy": "x", "dx": "x"} | sizes
    compiles("softmax", "_backward", types, {"CAUSAL": True, **_shape(keys)}, tmp_path, dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rest", [0, 64])
def test_rotary(rest, interleaved, tmp_path):
    types = {"x": "x", "both": "*fp32", "y": "x", "rows": "i64", "size": "i32", "positions": "i32", "half": "i32"}
    constants = {"INTERLEAVED": interleaved, "BACK": True, "PAIRS": 64, "REST": rest}
    compiles("rotary", "_turn", types, constants, tmp_path)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_linear_cross_entropy(dtype, tmp_path):
    types = {"logits": "x", "targets": "*i64", "losses": "*fp32", "words": "i32", "ignored": "i64", "smoothing": "fp32"}
    constants = {"GRADIENTS": True, "BLOCK": 4096, "num_warps": 8}
    compiles("linear_cross_entropy", "_losses", types, constants, tmp_path, dtype, exact=False)
