"""Tensor slicing against torch's ``parallelize_module``: one module, trained by both in the same two processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import shardlib as sl
from benchmarks.cases.ranks import AGREE, WARM, Side, versus
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.peers import tensor_parallel
from benchmarks.peers.gpt import SMALL, Config
from benchmarks.peers.provider import Step
from benchmarks.peers.shardlib import step_of
from benchmarks.peers.tensor_parallel import GPT

_WIDTHS = {512: 1.00, 64: 0.60}
_RULES: dict[str, Any] = {
    **dict.fromkeys(("blocks/*/q", "blocks/*/k", "blocks/*/v", "blocks/*/up"), "column"),
    **dict.fromkeys(("blocks/*/out", "blocks/*/down"), "row"),
    "embed/tokens": "vocab",
    "head/scores": "vocab",
}


def _sliced(config: Config, mesh: sl.Mesh) -> Step:
    apply, params = sl.from_module(GPT(config))
    return step_of(lambda params, batch: apply(params, *batch), sl.shard(params, mesh, sl.tensor_slicing(_RULES)))


_OURS = Side("shardlib tensor_slicing", "defaults", _sliced)
_THEIRS = Side(
    "parallelize_module",
    "ColwiseParallel and RowwiseParallel, local outputs; the vocabulary's gathered",
    tensor_parallel.make,
)


def measure(setting: Setting) -> Result:
    """Two ranks at each width."""
    config = SMALL if setting.small else Config()
    widths = {config.width: 1.0} if setting.small else _WIDTHS
    targets = {replace(config, width=width): target for width, target in widths.items()}
    rows, times = versus(_OURS, _THEIRS, "model", targets, setting.rounds)
    about = (
        f"One training step of a GPT ({config.layers} layers, vocabulary {config.vocab}, sequence {config.sequence}, batch "
        f"{config.batch}), fp32, fused AdamW, sliced over two gloo ranks of one thread: attention by heads, the MLP by its "
        "inner width, embedding and output layer by words, the logits gathered. The same module for both: shardlib runs it "
        f"through from_module. {setting.rounds} rounds, interleaved; in the first {WARM} steps, not timed, the losses "
        f"agreed within {AGREE:g}."
    )
    return tables.compared("Tensor slicing", about, rows, times, {side.name: side.setting for side in (_OURS, _THEIRS)})


CASE = Case("slicing", "tensor slicing against parallelize_module", {CPU: 20}, measure)
