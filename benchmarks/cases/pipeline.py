"""Pipeline stages against torch.distributed.pipelining: the same blocks and cuts, with 1F1B in the same two processes."""

from __future__ import annotations

from dataclasses import replace

import shardlib as sl
from benchmarks.cases.ranks import AGREE, WARM, Side, versus
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.peers import torch_pipeline
from benchmarks.peers.gpt import GPT, SMALL, Config, blocks_of, make_blocks, params_of
from benchmarks.peers.provider import Step
from benchmarks.peers.shardlib import step_of

_MICROBATCHES = 8
_WIDTHS = (512, 64)


def _staged(config: Config, mesh: sl.Mesh) -> Step:
    cut = sl.pipeline("1f1b", microbatches=_MICROBATCHES, partition="count")
    return step_of(sl.sequential(make_blocks(config)), sl.shard(blocks_of(params_of(GPT(config))), mesh, cut))


_OURS = Side("shardlib pipeline 1F1B", "defaults", _staged)
_THEIRS = Side("Schedule1F1B", "defaults", torch_pipeline.make)


def measure(setting: Setting) -> Result:
    """Two ranks, one stage each."""
    config = SMALL if setting.small else Config()
    widths = (config.width,) if setting.small else _WIDTHS
    targets = {replace(config, width=width, batch=_MICROBATCHES): 1.0 for width in widths}
    rows, times = versus(_OURS, _THEIRS, "pipe", targets, setting.rounds)
    about = (
        f"One training step of a GPT ({config.layers} layers, vocabulary {config.vocab}, sequence {config.sequence}) in two "
        f"stages on two gloo ranks of one thread, {_MICROBATCHES} micro-batches of one row, 1F1B, fp32, fused AdamW. The "
        "same cut for both: embedding and the first half of the blocks, the other half and the head. "
        f"{setting.rounds} rounds, interleaved; in the first {WARM} steps, not timed, the losses agreed within {AGREE:g}."
    )
    return tables.compared(
        "Pipeline stages", about, rows, times, {side.name: side.setting for side in (_OURS, _THEIRS)}
    )


CASE = Case("pipeline", "1F1B against torch.distributed.pipelining", {CPU: 20}, measure)
