"""The time of steps that leave out layers or tokens, against what the time of a layer lets expect."""

from __future__ import annotations

import statistics
from typing import Any

import torch

import shardlib as sl
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.timing import interleave
from shardlib.models import gpt

_CONFIG = gpt.GPTConfig(vocab=256, layers=12, width=192, heads=6, sequence=128)
_SMALL = gpt.GPTConfig(vocab=32, layers=4, width=8, heads=2, sequence=8)
_ROWS, _SEED = 4, 0
WHOLE, HALF, LAYERS, TOKENS, BOTH = "all layers", "half as many layers", "layers left out", "half of the tokens", "both"


def measure(setting: Setting) -> Result:
    """Steps on one device, in turns; the time of a layer is from the model with half as many."""
    config = _SMALL if setting.small else _CONFIG
    torch.set_num_threads(1)
    drop, ltd = sl.progressive_layer_drop(0.5, 1000.0), sl.random_ltd(sl.data.constant_pace(config.sequence // 2))
    fewer = gpt.GPTConfig(**{**config.__dict__, "layers": config.layers // 2})
    plain = sl.zero(0)
    chains = {
        WHOLE: (config, plain),
        HALF: (fewer, plain),
        LAYERS: (config, sl.chain(plain, drop)),
        TOKENS: (config, sl.chain(plain, ltd)),
        BOTH: (config, sl.chain(plain, drop, ltd)),
    }
    made = {name: list(_made(*each)) for name, each in chains.items()}
    drawn = torch.randint(config.vocab, (_ROWS, config.sequence + 1), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous()}
    seen: dict[str, list[int]] = {name: [] for name in made}

    def step(name: str) -> None:
        state, train_step = made[name]
        made[name][0], metrics = train_step(state, batch)
        seen[name].append(metrics.get("layer_tokens", 0))

    times = interleave({name: lambda _, name=name: step(name) for name in made}, setting.rounds, warm=2)
    means = {name: statistics.fmean(each) for name, each in times.items()}
    layer = (means[WHOLE] - means[HALF]) / (config.layers - fewer.layers)
    everything = _ROWS * config.sequence * config.layers
    rows, cells = [], []
    for name in (LAYERS, TOKENS, BOTH):
        share = statistics.fmean(seen[name][-setting.rounds :]) / everything
        expected = 1 - (1 - share) * config.layers * layer / means[WHOLE]
        rows.append(tables.row(times, name, WHOLE))
        cells.append([name, f"{share:.3f}", f"{expected:.3f}", f"{means[name] / means[WHOLE]:.3f}"])
    about = (
        f"A GPT ({config.layers} layers, width {config.width}), {_ROWS} rows of {config.sequence} tokens, AdamW, one thread. "
        "`progressive_layer_drop(0.5)` late in training, whose expected share of layers is "
        f"{1 - 0.5 * (config.layers + 1) / (2 * config.layers):.3f}; `random_ltd` with half of the tokens in all layers "
        "but the first and the last; and both. All take turns. The layers take "
        f"{100 * config.layers * layer / means[WHOLE]:.0f} % of a step, as the model with half as many shows. What is "
        "expected is that they take this time times the share of the layer-tokens that the measured steps had. Means of "
        f"{setting.rounds} steps."
    )
    grid = tables.grid(["", "layer-tokens", "expected time", "measured time"], cells)
    timed = tables.compared("Steps that leave out layers or tokens", about, rows, times)
    return Result("\n".join([timed.text, *grid]) + "\n", timed.header, timed.samples, timed.rows)


def _made(config: gpt.GPTConfig, transform: Any) -> tuple[sl.TrainState, Any]:
    params = sl.shard(gpt.init(config), sl.make_mesh(), transform)
    return sl.make_train_step(gpt.make_loss(config), params, sl.optim.adamw(1e-3), rng=_SEED)


CASE = Case("drops", "steps that leave out layers or tokens, against what is expected", {CPU: 60}, measure)
