"""Cases for compiling Triton kernels for sm_90 without a GPU: each kernel with the types of its arguments.

`CASES` holds every Triton kernel of these operations; more shapes of them, too many for every commit, are in `MORE`.
"""

from typing import Any

import torch
import triton.language as tl

from helpers import gpu_cases_layer
from helpers.gpu_compile import Case
from shardlib.kernels.adamw import triton as adamw
from shardlib.kernels.adamw8 import BLOCK
from shardlib.kernels.adamw8 import triton as adamw8
from shardlib.kernels.common import tiles
from shardlib.kernels.counter import triton as counter
from shardlib.kernels.frozen_adam import triton as frozen_adam
from shardlib.kernels.global_norm import triton as global_norm
from shardlib.kernels.lion import triton as lion
from shardlib.kernels.onebit import triton as onebit
from shardlib.kernels.quantize import Blockwise
from shardlib.kernels.quantize import triton as quantize
from shardlib.kernels.sparse_attention import triton as shapes
from shardlib.kernels.sparse_attention import triton_kernels


def _onebit() -> dict[str, Case]:
    types = {"x": "*fp32", "residual": "*fp32", "bits": "*u8", "scales": "*fp32", "ranks": "i32"}
    types |= {"offsets": "*i64", "first": "*i64", "count": "i64", "elements": "i64", "length": "i64"}
    types |= {"out_bits": "*u8", "out_scales": "*fp32", "out": "*fp32", "partial": "*fp64"}
    made = {}
    for mean in (False, True):
        for name, block in (("_signs", 0), ("_residuals", 0), ("_blocks", 128), ("_average", 0), ("_scales", 0)):
            constants = {"TILE": onebit.TILE, "STEP": 1024, "BLOCK": block, "MEAN": mean}
            if not mean:
                constants["ranks"] = 1  # the value 1 is compiled in
            made[f"onebit{name}, mean={mean}"] = Case(getattr(onebit, name), types, constants)
    return made


def _quantize() -> dict[str, Case]:
    types = {"x": "*fp32", "sent_values": "*i8", "sent_scales": "*fp32", "ranks": "i32", "sent_size": "i64"}
    types |= {"values": "*i8", "scales": "*fp32", "size": "i64", "count": "i64", "elements": "i64"}
    types |= {"residual": "*fp32", "out": "*bf16"}
    made = {}
    for bits in (4, 8):
        shape = quantize._shape(Blockwise(bits))
        warps = shape.pop("num_warps")
        made[f"dequantize {bits}"] = Case(quantize._dequantize_sum, types, shape | {"BITS": bits}, warps)
        for block in (128, 4096):
            shape = quantize._shape(Blockwise(bits, block))
            warps = shape.pop("num_warps")
            for sent in (0, 4, 8):
                for feedback in ({"FEEDBACK": True}, {"FEEDBACK": False, "residual": None}):
                    constants = shape | {"BITS": bits, "SENT_BITS": sent} | feedback
                    name = f"quantize {bits} by {block}, sent {sent}, feedback={feedback['FEEDBACK']}"
                    made[name] = Case(quantize._quantize_blocks, types, constants, warps)
    return made


def _optimizers() -> dict[str, Case]:
    made = {}
    for read, narrow in (("bf16", "bf16"), ("fp32", None), ("fp16", "fp16")):
        types = dict.fromkeys(("param", "mu", "nu"), "*fp32") | {"grad": f"*{read}", "scale": "*fp64", "count": "i64"}
        types |= dict.fromkeys(("b1", "rest1", "b2", "rest2", "decay", "size", "root", "eps"), "fp32")
        constants: dict[str, Any] = {"TILE": tiles.TILE} | ({} if narrow else {"copy": None})
        made[f"adamw, {read} gradient"] = Case(adamw._adamw, types | {"copy": f"*{narrow}"}, constants)
        types |= dict.fromkeys(("mu", "nu"), "*u8") | {"copy": f"*{narrow}"}
        types |= dict.fromkeys(("mu_scales", "nu_scales", "signed_lines", "unsigned_lines"), "*fp32")
        constants |= {"BLOCKS": adamw8.BLOCKS, "BLOCK": BLOCK}
        made[f"adamw in 8 bits, {read} gradient"] = Case(adamw8._adamw8, types, constants)
    types = dict.fromkeys(("param", "grad", "mu", "nu"), "*fp32") | {"scale": "*fp64", "count": "i64"}
    types |= dict.fromkeys(("b1", "rest1", "b2", "rest2", "weight_decay", "size", "root", "eps"), "fp32")
    made["Adam's direction"] = Case(adamw._direction, types, {"TILE": tiles.TILE})
    types = {"param": "*fp32", "grad": "*bf16", "mu": "*fp32", "copy": "*bf16", "scale": "*fp64", "count": "i64"}
    types |= dict.fromkeys(("b1", "rest1", "b2", "rest2", "decay", "size"), "fp32")
    made["lion"] = Case(lion._lion, types, {"TILE": tiles.TILE})
    types = dict.fromkeys(("param", "grad", "mu", "nu", "moved", "before", "fresh"), "*fp32")
    types |= {"copy": "*bf16", "scale": "*fp64", "spread": "*fp64", "count": "i64"}
    types |= dict.fromkeys(("size", "eps", "weight_decay", "b1", "rest1", "b2", "rest2"), "fp32")
    for name in ("_local_momentum", "_frozen_step", "_local_step", "_fresh_step"):
        kernel = getattr(frozen_adam, name)
        made[f"frozen Adam{name}"] = Case(kernel, types, {"TILE": tiles.TILE})
    for dtype in ("fp32", "bf16"):
        types = {"x": f"*{dtype}", "count": "i64", "partial": "*fp64"}
        made[f"global norm, {dtype}"] = Case(global_norm._tiles, types, {"TILE": global_norm.TILE})
    types = {"partial": "*fp64", "count": "i32", "out": "*fp64"}
    made["global norm of tiles"] = Case(global_norm._total, types, {"STEP": 1024})
    return made


def _counter() -> dict[str, Case]:
    types = {"index": "*i64", "out": "*i64", "count": "i64", "seed_low": "i64", "seed_high": "i64"}
    return {"random bits": Case(counter._random_bits, types, {"TILE": counter.TILE})}


_TYPES = {
    torch.float32: ("fp32", tl.float32),
    torch.float16: ("fp16", tl.float16),
    torch.bfloat16: ("bf16", tl.bfloat16),
}
_SPARSE = {
    "forward": triton_kernels.attend,
    "query": triton_kernels.by_query,
    "key": triton_kernels.by_key,
    "diagonal": triton_kernels.by_diagonal,
    "merge": triton_kernels.merge,
    "add": triton_kernels.add,
    "inner": triton_kernels.inner,
}


def _sparse(name: str, shape: shapes.TileShape, size: int, dtype: torch.dtype, rich: bool = False) -> dict[str, Case]:
    """One case: causal, with a key mask, and with all else that makes it larger if ``rich``."""
    short, of_products = _TYPES[dtype]
    kinds = (
        (f"*{short}", "q k v dout out dq dk dv result"),
        ("*fp32", "lse partial partial_lse partial_k partial_v delta sums bias"),
        ("*i32", "members blocks bits items merges"),
        ("*u8", "key_mask"),
        ("i32", "count slots heads group size bias_stride cells rows seed_low seed_high least"),
        ("i64", "counter"),
        ("fp32", "scale kept_scale"),
    )
    types = {name: kind for kind, names in kinds for name in names.split()}
    constants = {
        "D": size, "HEAD": shapes.head_of(size), "CHUNK": shape.chunk, "CELL": shape.cell, "TILE": 64,
        "ROWS": shape.rows // shape.cell, "WIDTH": shape.step // shape.cell, "TYPE": of_products,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
        "SHARED": True, "WHOLE": False, "CAUSAL": True, "DROPOUT": rich,
    }  # fmt: skip
    if not rich and name != "diagonal":
        constants["bias"] = None
    case = Case(_SPARSE[name], types, constants, shape.warps, shape.stages, exact=False)
    more = ", rich" if rich else ""
    return {f"sparse {name} of {size} {short}, {shape.rows} × {shape.step} by {shape.cell}{more}": case}


def _choices(
    name: str, size: int, dtype: torch.dtype, rich: bool = False, block: int = 16, lone: bool = True
) -> dict[str, Case]:
    made = {}
    for choice in shapes.choices(name, block, size, dtype.itemsize, rich):
        for shape in choice if lone else choice[:1]:
            made |= _sparse(name, shape, size, dtype, rich)
    return made


_BOTH = (False, True)
CASES = _onebit() | _quantize() | _optimizers() | _counter() | gpu_cases_layer.cases()
for _name in ("forward", "query", "key"):
    for _rich in _BOTH:
        CASES |= _choices(_name, 64, torch.bfloat16, _rich) | _choices(_name, 128, torch.bfloat16, _rich, lone=False)
    CASES |= _choices(_name, 256, torch.bfloat16) | _choices(_name, 80, torch.float16, lone=False)
    CASES |= _choices(_name, 64, torch.float32, True) | _choices(_name, 256, torch.float32)
for _name in ("merge", "add", "inner"):
    for _size, _dtype in ((64, torch.bfloat16), (256, torch.bfloat16), (256, torch.float32)):
        CASES |= _sparse(_name, shapes.choices("forward", 16, _size, _dtype.itemsize, False)[0].whole, _size, _dtype)
for _block in (16, 32):
    CASES |= _sparse("add", shapes.TileShape(1, 64, 1, 0, 4, 1), 2 * _block, torch.float32)  # of a bias
# The others take a minute to compile.
CASES |= _sparse("diagonal", shapes.diagonal_choice(16, 128, 2).whole, 128, torch.bfloat16, True)

MORE: dict[str, Case] = {}
for _dtype in _TYPES:
    for _size in (32, 64, 96, 128, 256):
        for _block in (16, 32):
            MORE |= _sparse(
                "diagonal", shapes.diagonal_choice(_block, _size, _dtype.itemsize).whole, _size, _dtype, True
            )
            for _name in ("forward", "query", "key"):
                for _rich in _BOTH:
                    MORE |= _choices(_name, _size, _dtype, _rich, _block)
MORE = {name: case for name, case in MORE.items() if name not in CASES}
