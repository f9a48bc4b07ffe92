"""The longest sequence that trains within a budget of device memory, by what runs in tiles and where blocks' inputs are.

The device is the tests' own, as in `benchmarks.cases.budget`. The model mixes tokens by running means instead of attention,
which on that device would hold the scores of all pairs of tokens.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import shardlib as sl
from benchmarks.cases.budget import depths
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.rig import on_rig

_LAYERS, _WIDTH, _WORDS = 4, 64, 1024
_TILE = 128  # tokens of a tile, and by which lengths differ
_MB = 1_000_000
_HEADER = ("section", "what", "round", "value")
_TITLE = "The longest sequence on a device with a budget"

Params = dict[str, Any]


class _Way(NamedTuple):
    """A way to train: what runs in tiles of tokens, and how blocks are recomputed."""

    name: str
    mlps: bool = False
    loss: bool = False
    remat: tuple[Any, ...] = ()


_BELOW = sl.remat(store="host")
_WAYS = (
    _Way("nothing"),
    _Way("the loss in tiles", loss=True),
    _Way("MLPs in tiles", mlps=True),
    _Way("blocks recomputed", remat=(sl.remat(),)),
    _Way("blocks recomputed, their inputs in host memory", remat=(_BELOW,)),
    _Way("the loss and MLPs in tiles", mlps=True, loss=True),
    _Way("the loss in tiles, blocks recomputed", loss=True, remat=(sl.remat(),)),
    _Way("all of it", mlps=True, loss=True, remat=(_BELOW,)),
)


def measure(setting: Setting) -> Result:
    budget, ways = (16 * _MB, _WAYS[:2]) if setting.small else (32 * _MB, _WAYS)
    (found,) = on_rig(_all, budget, ways)
    return _table(budget, dict(zip(ways, found, strict=True)))


def _all(mesh: sl.Mesh, budget: int, ways: Sequence[_Way]) -> list[tuple[int, int, int]]:
    torch.set_num_threads(1)
    return [_longest(mesh, budget, way) for way in ways]


def _longest(mesh: sl.Mesh, budget: int, way: _Way) -> tuple[int, int, int]:
    """The most tokens that train, and the most bytes that the device and the host's pinned memory held then."""
    few, more = (_planned(mesh, way, tiles) for tiles in (2, 10))
    runs, limits = dict[int, tuple[int, int]](), dict[int, bool]()
    for tiles in depths(2 + int((budget - few) * 8 / (more - few)), runs, limits):
        try:
            runs[tiles] = _run(mesh, budget, way, tiles)
        except torch.OutOfMemoryError:
            limits[tiles] = True
    tiles = max(runs)
    return tiles * _TILE, *runs[tiles]


def _planned(mesh: sl.Mesh, way: _Way, tiles: int) -> int:
    """Bytes of the device at the peak, as planned."""
    options = {"loss_fn": _make_loss(way), "optimizer": sl.optim.adamw(1e-3), "batch": _tokens(mesh, tiles)}
    plan = sl.make_plan(_init(), mesh, sl.chain(sl.zero(0), *way.remat), **options)
    return plan.peak_bytes


def _run(mesh: sl.Mesh, budget: int, way: _Way, tiles: int) -> tuple[int, int]:
    """Train two steps within the budget.

    Raises:
        torch.OutOfMemoryError: it is exceeded.
    """
    from helpers import rig

    gc.collect()  # what earlier runs left is not counted
    rig.reset()
    before = rig.counts()
    with rig.limits(budget=before.live + budget):
        sharded = sl.shard(_init(), mesh, sl.chain(sl.zero(0), *way.remat))
        state, step = sl.make_train_step(_make_loss(way), sharded, sl.optim.adamw(1e-3))
        del sharded
        for _ in range(2):
            state, _ = step(state, _tokens(mesh, tiles))
        torch.accelerator.synchronize()
        after = rig.counts()
    return after.peak - before.live, after.pinned_peak - before.pinned


def _tokens(mesh: sl.Mesh, tiles: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(_WORDS, (1, tiles * _TILE + 1), generator=draw).to(mesh.device)


def _init() -> Params:
    draw = torch.Generator().manual_seed(0)

    def weight(out: int, into: int) -> torch.Tensor:
        return torch.randn(out, into, generator=draw) * into**-0.5

    def block() -> Params:
        mix = {"value": weight(_WIDTH, _WIDTH), "out": weight(_WIDTH, _WIDTH)}
        return {"mix": mix, "mlp": {"up": weight(4 * _WIDTH, _WIDTH), "down": weight(_WIDTH, 4 * _WIDTH)}}

    ends = {"tokens": weight(_WORDS, _WIDTH), "words": weight(_WORDS, _WIDTH)}
    return {"ends": ends, "blocks": [block() for _ in range(_LAYERS)]}


def _make_loss(way: _Way) -> Callable[[Params, torch.Tensor], torch.Tensor]:
    """The mean cross entropy of the next token."""

    def in_tiles(tiled: bool, fn: Callable[..., torch.Tensor], *x: torch.Tensor) -> torch.Tensor:
        return sl.nn.tiled(fn, x, x[0].shape[1] // _TILE) if tiled else fn(*x)

    @sl.block
    def block(params: Params, x: torch.Tensor) -> torch.Tensor:
        values = F.linear(F.layer_norm(x, [_WIDTH]), params["mix"]["value"])
        places = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        x = x + F.linear(values.cumsum(1) / places, params["mix"]["out"])

        def mlp(x: torch.Tensor) -> torch.Tensor:
            inner = F.gelu(F.linear(F.layer_norm(x, [_WIDTH]), params["mlp"]["up"]))
            return F.linear(inner, params["mlp"]["down"])

        return x + in_tiles(way.mlps, mlp, x)

    def loss_fn(params: Params, tokens: torch.Tensor) -> torch.Tensor:
        x = F.embedding(tokens[:, :-1], params["ends"]["tokens"])
        for each in params["blocks"]:
            x = block(each, x)

        def total(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            scores = F.linear(x, params["ends"]["words"]).flatten(0, 1)
            return F.cross_entropy(scores, targets.flatten(), reduction="sum")

        return in_tiles(way.loss, total, x, tokens[:, 1:]) / x.shape[1]

    return loss_fn


def _table(budget: int, found: dict[_Way, tuple[int, int, int]]) -> Result:
    cells, samples = [], []
    shortest = next(iter(found.values()))[0]
    for way, (tokens, device, host) in found.items():
        cells.append([way.name, f"{tokens:,}", f"{tokens / shortest:.1f}", f"{device / _MB:.1f}", f"{host / _MB:.1f}"])
        numbers = (("tokens", tokens), ("device peak", device), ("pinned peak", host))
        samples += [(_TITLE, f"{way.name}, {name}", 0, value) for name, value in numbers]
    about = (
        f"A device with {budget // _MB} MB: the tests' own, with a memory that raises out-of-memory errors past a budget. "
        f"{_LAYERS} layers of width {_WIDTH} with MLPs four times as wide, {_WORDS:,} words, fp32, AdamW, one sequence. "
        f"Tokens are mixed by running means, since attention has no fused kernel there. The longest sequence, "
        f"in steps of {_TILE} tokens, that trains two steps; tiles have as many tokens."
    )
    columns = ["", "tokens", "× nothing", "device peak, MB", "pinned host memory, MB"]
    return Result(tables.section(_TITLE, about, tables.grid(columns, cells)), _HEADER, samples)


CASE = Case("long_sequences", "the longest sequence that trains on a device with a budget of memory", {CPU: 1}, measure)
