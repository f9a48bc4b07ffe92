"""Block-sparse attention by Triton kernels: a layout's lists packed into tiles, and the launches.

See `shardlib.kernels.sparse_attention` for the mathematics, and its `packing` for how work is divided among programs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.utils.weak import WeakTensorKeyDictionary

from shardlib.kernels.common import tiles
from shardlib.kernels.sparse_attention import ComputedBlocks, Options, SparseAttention
from shardlib.kernels.sparse_attention import triton_kernels as kernels
from shardlib.kernels.sparse_attention.packing import TilePacking, cells, pack

_WORTH = 0.75  # a smaller tile is taken if it has at most this share of the work: its products are slower (estimated)
_ROWS = 64  # of a program of `kernels.inner`
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_packed = WeakTensorKeyDictionary()  # a layout's row_offsets -> its packings

load: tiles.Loader = tiles.triton_name


def forward(given: SparseAttention) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, _, key_mask, _, _ = given
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    if key_mask is not None:
        given = given._replace(v=_tainted(v, k, key_mask))
    problem, head = _TritonProblem(given), head_of(q.shape[3])
    for run in problem.runs("row", problem.choices("forward")):
        partial = {"partial": run.scratch(head), "partial_lse": run.scratch(1)}
        run.launch(kernels.attend, out=out, lse=lse, **partial)
        run.merge(kernels.merge, out=out, lse=lse, **partial)
    return out, lse


def _tainted(v: torch.Tensor, k: torch.Tensor, key_mask: torch.Tensor) -> torch.Tensor:
    """``v`` with NaN for masked keys that are not finite, so that these make the result NaN, as in torch.

    The kernel gives a masked key the weight 0 whatever its score is, as adding −∞ to the score spills registers; the weight
    0 times NaN is NaN.
    """
    hidden = ~key_mask[:, None, :] & ~k.isfinite().all(-1)
    return v.masked_fill(hidden[..., None], float("nan"))


def backward(
    given: SparseAttention, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    q, k, v, _, _, bias, _ = given
    dq, dk, dv, delta = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse)
    size, head, rows = q.shape[3], head_of(q.shape[3]), lse.numel()
    grid = (triton.cdiv(rows, _ROWS),)
    kernels.inner[grid](dout, out, delta, rows, D=size, HEAD=head, TILE=_ROWS)
    problem = _TritonProblem(given)
    saved = {"dout": dout, "lse": lse, "delta": delta}
    for run in problem.runs("row", problem.choices("query")):
        partial = run.scratch(head)
        run.launch(kernels.by_query, dq=dq, partial=partial, **saved)
        run.merge(kernels.add, partial=partial, result=dq)
    for run in problem.runs("column", problem.choices("key")):
        partial_k, partial_v = run.scratch(head), run.scratch(head)
        run.launch(kernels.by_key, dk=dk, dv=dv, partial_k=partial_k, partial_v=partial_v, **saved)
        run.merge(kernels.add, partial=partial_k, result=dk)
        run.merge(kernels.add, partial=partial_v, result=dv)
    return dq, dk, dv, None if bias is None else _bias_gradient(problem, bias, saved)


def work(q: torch.Tensor, k: torch.Tensor, blocks: ComputedBlocks, options: Options) -> float:
    """The measured share of all pairs of positions, padded to whole blocks, that `forward` computes."""
    problem = _TritonProblem(SparseAttention(q, k, k, blocks, None, None, options))
    padded = triton.cdiv(q.shape[2], options.block) * options.block
    pairs = sum(run.pairs() for run in problem.runs("row", problem.choices("forward")))
    return pairs / (q.shape[0] * q.shape[1] * padded**2)


def _bias_gradient(problem: _TritonProblem, bias: torch.Tensor, saved: dict[str, torch.Tensor]) -> torch.Tensor:
    batch, heads, size, head = problem.q.shape
    choice = diagonal_choice(problem.options.block, head, problem.q.itemsize)
    cell = choice.whole.cell
    cells = triton.cdiv(size, problem.options.block) * (problem.options.block // cell)
    sums = bias.new_empty(batch, heads, 2 * cells - 1, 2 * cell)
    for run in problem.runs("diagonal", [choice]):
        partial = run.scratch(2)
        run.launch(kernels.by_diagonal, sums=sums, partial=partial, **saved)
        row = {"D": 2 * cell, "HEAD": 2 * cell, "CELL": 1, "size": 2 * cells - 1}
        run.merge(kernels.add, partial=partial, result=sums, **row)
    sums = sums.sum(dim=0).sum_to_size(len(bias), *sums.shape[2:])
    # The first half of a diagonal's sums and the second half of the previous diagonal's have the same distances.
    whole = F.pad(sums[..., :cell], (0, 0, 0, 1)) + F.pad(sums[..., cell:], (0, 0, 1, 0))
    first = cells * cell - size
    return whole.flatten(1)[:, first : first + 2 * size - 1].contiguous()


class _TritonProblem:
    def __init__(self, given: SparseAttention) -> None:
        q, k, v, blocks, key_mask, bias, options = given
        self.q, self.blocks, self.options = q, blocks, options
        self.group = q.shape[1] // k.shape[1]
        head = head_of(q.shape[3])
        if self.group * q.shape[2] * head >= 2**31:
            raise ValueError(
                f"{q.shape[2]} queries of {self.group} heads do not fit 32-bit indices: split the sequence"
            )
        low, high = (((options.seed >> shift & 0xFFFFFFFF) ^ 2**31) - 2**31 for shift in (0, 32))
        # Triton's interpreter does not multiply bf16.
        exact = triton.knobs.runtime.interpret and q.dtype == torch.bfloat16
        self.arguments: dict[str, Any] = {
            "q": q, "k": k, "v": v, "bias": None if bias is None else bias.contiguous(),
            "key_mask": None if key_mask is None else key_mask.contiguous().view(torch.uint8),
            "group": self.group, "size": q.shape[2], "scale": options.scale,
            "bias_stride": bias.shape[1] if bias is not None and len(bias) > 1 else 0,
            "counter": options.counter, "seed_low": low, "seed_high": high,
            "least": int(options.dropout * 2**24), "kept_scale": 1 / (1 - options.dropout),
            "D": q.shape[3], "HEAD": head, "CAUSAL": options.causal, "DROPOUT": options.dropout > 0,
            "TYPE": tl.float32 if exact else _TYPES[q.dtype],
            "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
        }  # fmt: skip

    def choices(self, kernel: str) -> list[TileShapes]:
        options = self.options
        rich = options.dropout > 0 or self.arguments["bias"] is not None
        return choices(kernel, options.block, self.q.shape[3], self.q.itemsize, rich)

    def runs(self, kind: str, choices: list[TileShapes]) -> list[_PackingRun]:
        """The runs of the packings of the layout's lists ("row", "column" or "diagonal"), in the best of the shapes."""
        if not self.q.numel():
            return []
        group = self.group if kind == "column" else 1
        held = _packed.setdefault(self.blocks.row_offsets, {})
        key = (kind, *choices, self.options.block, self.options.causal, group)
        if key not in held:
            held[key] = _best([(choice, self._packings(kind, choice)) for choice in choices])
        (whole, lone), packings = held[key]
        heads = self.q.shape[1] // group
        return [
            _PackingRun(self, whole if packing.rows * whole.cell == whole.rows else lone, packing, heads)
            for packing in packings
        ]

    def _packings(self, kind: str, choice: TileShapes) -> list[TilePacking]:
        shape = choice.whole
        cut = cells(self.blocks, self.options.block, shape.cell, self.options.causal)
        if kind == "row":
            lists = cut.by_row()
        elif kind == "column":
            lists = cut.by_column(self.group)
        else:
            lists = cut.by_diagonal()
        return pack(lists, shape.rows // shape.cell, shape.step // shape.cell, choice.lone.rows // shape.cell)


def _best(packed: list[tuple[TileShapes, list[TilePacking]]]) -> tuple[TileShapes, list[TilePacking]]:
    """The first choice, with the largest tile, unless another has at most `_WORTH` of its work."""
    work = [choice.whole.cell**2 * sum(packing.work for packing in packings) for choice, packings in packed]
    least = min(range(len(work)), key=work.__getitem__)
    return packed[least if work[least] <= _WORTH * work[0] else 0]


class _PackingRun:
    """The launches of one packing, for ``heads`` heads of every sample."""

    def __init__(self, problem: _TritonProblem, shape: TileShape, packing: TilePacking, heads: int) -> None:
        shared = packing.heads == 1
        self.packing, self.leads = packing, len(problem.q) * (heads if shared else 1)
        self.lengths = packing.rows * shape.cell
        self.arguments = problem.arguments | {
            "members": packing.members, "blocks": packing.blocks, "bits": packing.bits, "items": packing.items,
            "merges": packing.merges, "slots": packing.slots, "heads": heads, "SHARED": shared,
            "CHUNK": shape.chunk, "ROWS": packing.rows, "WIDTH": packing.blocks.shape[1], "CELL": shape.cell,
            "cells": triton.cdiv(problem.q.shape[2], problem.options.block) * (problem.options.block // shape.cell),
            "WHOLE": problem.q.shape[2] % problem.options.block == 0,
        }  # fmt: skip
        self.options = {"num_warps": shape.warps, "num_stages": shape.stages}

    def pairs(self) -> int:
        """The number of pairs of positions that are computed."""
        steps = int((self.packing.items[:, 3] - self.packing.items[:, 2]).sum())
        return steps * self.leads * self.lengths * self.packing.blocks.shape[1] * self.arguments["CELL"]

    def scratch(self, width: int) -> torch.Tensor:
        """An empty buffer for partial results of ``width`` numbers per row."""
        return torch.empty(
            self.leads * self.packing.slots * self.lengths * width,
            dtype=torch.float32,
            device=self.packing.items.device,
        )

    def launch(self, kernel: Any, **arguments: Any) -> None:
        """Runs ``kernel`` on every item."""
        self._run(kernel, len(self.packing.items), arguments)

    def merge(self, kernel: Any, **arguments: Any) -> None:
        """Runs ``kernel``, which merges partial results, if there are any."""
        if len(self.packing.merges):
            self._run(kernel, len(self.packing.merges), arguments)

    def _run(self, kernel: Any, count: int, arguments: dict[str, Any]) -> None:
        given = self.arguments | {"count": count} | arguments
        kernel[(count * self.leads,)](**{name: given[name] for name in kernel.arg_names}, **self.options)


# Sizes of tiles, for 227 KB of shared memory and 64 K registers (H100, H200). Each is the largest of those tried that
# compiles without spilling registers; none has been timed on a GPU.


class TileShape(NamedTuple):
    """The shape of a program's tile.

    Attributes:
        rows: of the tile: queries, or keys in the kernel for dK and dV; a multiple of the cell.
        step: rows gathered at a time; a multiple of the cell.
        cell: side of the cells that rows and steps consist of.
        chunk: numbers of a head that a product sums at a time.
        warps: of 32 threads.
        stages: steps that are loaded at once.
    """

    rows: int
    step: int
    cell: int
    chunk: int
    warps: int
    stages: int


def head_of(size: int) -> int:
    """The power of two that a head of ``size`` numbers is padded to."""
    return max(32, 1 << (size - 1).bit_length())


_CELL = 32  # larger ones save nothing
_Row = tuple[int, int, int, int, int]  # rows, step, chunk, warps, stages

# For 16-bit numbers, by padded head size: tiles without bias and dropout, then tiles with one of them; the largest first.
_HALF: dict[str, dict[int, tuple[tuple[_Row, ...], tuple[_Row, ...]]]] = {
    "forward": {
        32: (((128, 128, 32, 8, 3), (64, 64, 32, 4, 3)), ((128, 64, 32, 8, 3), (64, 64, 32, 4, 2))),
        64: (((128, 128, 64, 8, 3), (64, 64, 64, 4, 3)), ((128, 64, 64, 8, 3), (64, 64, 64, 4, 2))),
        128: (((128, 64, 128, 8, 3), (64, 64, 128, 4, 3)), ((64, 64, 128, 8, 2),)),
        256: (((128, 64, 256, 8, 3), (64, 32, 256, 8, 2)), ((64, 32, 256, 8, 2),)),
    },
    "query": {
        32: (((128, 64, 32, 8, 3), (64, 64, 32, 4, 3)), ((64, 32, 32, 4, 2),)),
        64: (((128, 128, 64, 8, 3), (64, 64, 64, 4, 3)), ((128, 64, 64, 8, 3), (64, 64, 64, 4, 2))),
        128: (((128, 64, 128, 8, 3), (64, 64, 128, 4, 3)), ((64, 32, 128, 8, 2),)),
        256: (((128, 32, 256, 8, 2), (64, 32, 256, 8, 2)), ((64, 32, 64, 8, 2),)),
    },
    "key": {
        32: (((128, 64, 32, 8, 2), (64, 64, 32, 4, 3)), ((64, 64, 32, 8, 2),)),
        64: (((128, 64, 64, 8, 2), (64, 64, 64, 4, 3)), ((64, 64, 64, 8, 2),)),
        128: (((128, 32, 128, 8, 2), (64, 32, 128, 8, 2)), ((64, 32, 64, 8, 2),)),
        256: (((64, 32, 64, 8, 2),), ((64, 32, 64, 8, 2),)),
    },
}
# For fp32; a product is three products of TF32.
_SINGLE: dict[str, dict[int, tuple[tuple[_Row, ...], tuple[_Row, ...]]]] = {
    "forward": {
        32: (((128, 64, 32, 8, 2),), ((64, 64, 32, 8, 2),)),
        64: (((64, 32, 64, 8, 2),), ((64, 32, 64, 8, 2),)),
        128: (((64, 32, 32, 8, 2),), ((64, 32, 32, 8, 2),)),
        256: (((64, 32, 32, 8, 1),), ((32, 32, 32, 8, 1),)),
    },
    "query": {
        32: (((64, 64, 32, 8, 2),), ((64, 32, 32, 8, 2),)),
        64: (((64, 64, 32, 8, 1),), ((64, 32, 32, 8, 2),)),
        128: (((32, 32, 32, 8, 1),), ((32, 32, 32, 8, 1),)),
        256: (((32, 32, 32, 8, 1),), ((32, 16, 32, 8, 1),)),
    },
    "key": {
        32: (((64, 32, 32, 4, 2),), ((64, 32, 32, 4, 2),)),
        64: (((64, 32, 32, 4, 1),), ((64, 32, 32, 4, 1),)),
        128: (((32, 32, 32, 8, 1),), ((32, 16, 32, 8, 1),)),
        256: (((32, 16, 32, 8, 1),), ((32, 16, 32, 8, 1),)),
    },
}


class TileShapes(NamedTuple):
    """The shape of whole tiles, and of tiles that hold a single long list, where there are few long lists."""

    whole: TileShape
    lone: TileShape


def choices(kernel: str, block: int, size: int, itemsize: int, rich: bool) -> list[TileShapes]:
    """The tiles to choose from, the largest first.

    Args:
        kernel: "forward", "query" (dQ) or "key" (dK and dV).
        block: of the layout.
        size: numbers of a head.
        itemsize: bytes of a number.
        rich: whether there is a bias or dropout.
    """
    table = _HALF if itemsize == 2 else _SINGLE
    made = []
    for rows, step, chunk, warps, stages in table[kernel][head_of(size)][rich]:
        whole = lone = TileShape(rows, step, min(block, rows, step, _CELL), chunk, warps, stages)
        if itemsize == 2 and head_of(size) <= 128:  # other small tiles spill registers
            lone = TileShape(whole.cell, step, whole.cell, min(chunk, 64), 4, 2)
        made.append(TileShapes(whole, lone))
    return made


def diagonal_choice(block: int, size: int, itemsize: int) -> TileShapes:
    """The tile of the kernel for the bias."""
    cell = min(block, _CELL if itemsize == 2 else 16)
    shape = TileShape(cell, 64, cell, min(head_of(size), 32), 4, 1)
    return TileShapes(shape, shape)
