"""Cases for compiling the Triton kernels of a transformer layer for sm_90."""

import importlib
from collections.abc import Iterator
from typing import Any

from helpers.gpu_compile import Case

_DRAWN = {"scale": "fp32", "threshold": "i32", "seed_low": "i64", "seed_high": "i64", "start": "i64"}
_ROWS = {"rows": "i64", "columns": "i32"}


def cases() -> dict[str, Case]:
    """Name -> case; the name has the operation, the kernel and the constants."""
    return {
        f"{name}, {dtype}": case
        for make in (
            _gelu,
            _norm,
            _swiglu,
            _dropout,
            _softmax,
            _rotary,
            _linear_cross_entropy,
            _routing,
            _permute,
            _subset,
        )
        for dtype in ("bf16", "fp32")
        for name, case in make(dtype)
    }


def _case(
    operation: str,
    name: str,
    types: dict[str, str],
    constants: dict[str, Any],
    dtype: str,
    exact: bool = True,
) -> tuple[str, Case]:
    """``types``: of the arguments, "x" standing for a pointer to ``dtype``; an argument without any is None.

    ``exact``: it must round every product before adding it. Device functions such as erf do not.
    """
    module = importlib.import_module(f"shardlib.kernels.{operation}.triton")
    kernel = getattr(module, name)
    given = dict(getattr(module, "TILE", {})) | constants
    warps = given.pop("num_warps", 4)
    kinds = {argument: f"*{dtype}" if kind == "x" else kind for argument, kind in types.items()}
    given |= {argument: None for argument in kernel.arg_names if argument not in kinds and argument not in given}
    settings = ", ".join(f"{key}={value}" for key, value in constants.items())
    return f"{operation}{name}({settings})", Case(kernel, kinds, given, warps, exact=exact)


def _gelu(dtype: str) -> Iterator[tuple[str, Case]]:
    for tanh in (False, True):
        constants = {"BIAS": True, "TANH": tanh}
        types = dict.fromkeys(("x", "bias", "y"), "x") | _ROWS
        yield _case("gelu", "_forward", types, constants, dtype, exact=False)
        types = dict.fromkeys(("x", "bias", "dy", "dx"), "x") | _ROWS | {"partial": "*fp32", "each": "i32"}
        yield _case("gelu", "_backward", types, constants, dtype, exact=False)


def _norm(dtype: str) -> Iterator[tuple[str, Case]]:
    from shardlib.kernels.norm.triton import CHUNK, WHOLE, _shape

    for columns in (100, 8192, 16384):
        for centred in (False, True):
            constants = {"CENTRED": centred, "SUM": True}
            types = dict.fromkeys(("x", "residual", "weight", "bias", "y", "total"), "x")
            types |= {"columns": "i32", "eps": "fp32"}
            kernel, block = ("_forward", columns) if columns <= WHOLE else ("_forward_wide", CHUNK)
            yield _case("norm", kernel, types, constants | _shape(block) | {"BIAS": True}, dtype)
            types = dict.fromkeys(("total", "weight", "dy", "dtotal", "ds"), "x") | _ROWS
            types |= {"dweight": "*fp32", "dbias": "*fp32", "each": "i32", "eps": "fp32"}
            kernel = "_backward" if columns <= CHUNK else "_backward_wide"
            yield _case("norm", kernel, types, constants | _shape(min(columns, CHUNK)), dtype)


def _swiglu(dtype: str) -> Iterator[tuple[str, Case]]:
    types = {"gate": "x", "gate_stride": "i64", "up": "x", "up_stride": "i64"} | _ROWS
    yield _case("swiglu", "_forward", types | {"y": "x"}, {}, dtype, exact=False)
    types |= dict.fromkeys(("dy", "dgate", "dup"), "x")
    yield _case("swiglu", "_backward", types, {}, dtype, exact=False)


def _dropout(dtype: str) -> Iterator[tuple[str, Case]]:
    for starts in (False, True):
        drawn = _DRAWN | ({"starts": "*i64"} if starts else {})
        types = dict.fromkeys(("x", "residual", "bias", "y"), "x") | _ROWS | drawn
        yield _case("dropout", "_forward", types, {"BIAS": True, "RESIDUAL": True, "STARTS": starts}, dtype)
        types = {"dy": "x", "dx": "x", "partial": "*fp32", "each": "i32"} | _ROWS | drawn
        yield _case("dropout", "_backward", types, {"BIAS": True, "STARTS": starts}, dtype)


def _softmax(dtype: str) -> Iterator[tuple[str, Case]]:
    from shardlib.kernels.softmax.triton import _shape

    sizes = {"queries": "i32", "keys": "i32", "scale": "fp32"}
    for keys in (128, 4096, 16384):
        types = {"x": "x", "y": "x", "lengths": "*i64", "per_sequence": "i32"} | sizes
        constants = {"CAUSAL": True, "LENGTHS": True, **_shape(keys)}
        yield _case("softmax", "_forward", types, constants, dtype, exact=False)
        types = {"y": "x", "dy": "x", "dx": "x"} | sizes
        yield _case("softmax", "_backward", types, {"CAUSAL": True, **_shape(keys)}, dtype)


def _rotary(dtype: str) -> Iterator[tuple[str, Case]]:
    types = {"x": "x", "both": "*fp32", "y": "x", "rows": "i64", "size": "i32", "positions": "i32", "half": "i32"}
    for interleaved in (False, True):
        for rest in (0, 64):
            constants = {"INTERLEAVED": interleaved, "BACK": True, "PAIRS": 64, "REST": rest}
            yield _case("rotary", "_turn", types, constants, dtype)


def _linear_cross_entropy(dtype: str) -> Iterator[tuple[str, Case]]:
    types = {"logits": "x", "targets": "*i64", "losses": "*fp32", "words": "i32", "ignored": "i64", "smoothing": "fp32"}
    constants = {"GRADIENTS": True, "BLOCK": 4096, "num_warps": 8}
    yield _case("linear_cross_entropy", "_losses", types, constants, dtype, exact=False)


def _routing(dtype: str) -> Iterator[tuple[str, Case]]:
    from shardlib.kernels.routing.triton import sort_shape_of, top_shape_of

    for count in (8, 256):
        types = {"scores": "x", "experts": "*i64", "tokens": "i64", "count": "i32", "k": "i32"}
        yield _case("routing", "_best", types, top_shape_of(count), dtype, exact=False)
        types = {"experts": "*i64", "first": "*i64", "positions": "*i64", "size": "i64"}
        types |= {"count": "i32", "programs": "i32"}
        for name in ("_count", "_place"):
            yield _case("routing", name, types, sort_shape_of(count), dtype)


def _permute(dtype: str) -> Iterator[tuple[str, Case]]:
    from shardlib.kernels.permute.triton import STEP, block_of

    sizes = {"count": "i32", "columns": "i32", "k": "i32"}
    yield _case(
        "permute", "_invert", {"positions": "*i64", "assigned": "*i64", "size": "i64"} | sizes, {"STEP": STEP}, dtype
    )
    for weighted in (False, True):
        constants = {"WEIGHTED": weighted, "BLOCK": block_of(4096)}
        types = {"x": "x", "out": "x", "assigned": "*i64"} | sizes
        types |= {"rows": "x", "weights": "*fp32", "dweights": "*fp32"} if weighted else {}
        yield _case("permute", "_spread", types, constants, dtype)
        types = {"rows": "x", "positions": "*i64", "y": "x"} | sizes | ({"weights": "*fp32"} if weighted else {})
        yield _case("permute", "_gather", types, constants, dtype)


def _subset(dtype: str) -> Iterator[tuple[str, Case]]:
    from shardlib.kernels.subset.triton import block_of

    sizes = {"taken": "i32", "length": "i32", "columns": "i32"}
    constants = {"BLOCK": block_of(4096)}
    yield _case("subset", "_take", {"x": "x", "index": "*i64", "out": "x"} | sizes, constants, dtype)
    for keeps, puts in ((True, True), (True, False), (False, True)):
        types = {"slots": "*i64", "out": "x"} | sizes | ({"x": "x"} if keeps else {}) | ({"rows": "x"} if puts else {})
        yield _case("subset", "_put", types, constants | {"KEEPS": keeps, "PUTS": puts}, dtype)
