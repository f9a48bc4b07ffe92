"""The values of offloaded training against DeepSpeed's, which keeps states and updates on the CPU too."""

from __future__ import annotations

import statistics

import torch

import shardlib as sl
from benchmarks.cases.ranks import AGREE, on_two_ranks
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.rig import on_rig
from benchmarks.peers import deepspeed
from benchmarks.peers.gpt import GPT, SMALL, Config, make_loss, params_of, random_batch
from benchmarks.peers.provider import Step
from benchmarks.peers.shardlib import adamw, step_of

_CONFIG = Config(vocab=1024, layers=4, width=128, heads=4, sequence=64)
_CLIP = 0.5  # below the norms of all steps
_BATCHES = 2  # which take turns, so that the loss falls
_HEADER = ("section", "what", "round", "value")
_TITLE = "Losses of offloaded training"
_OURS, _WITHOUT, _PEER = "zero(2), offload()", "zero(2)", "DeepSpeed stage 2, offload_optimizer"

Losses = dict[str, list[float]]  # provider -> loss of each step


def measure(setting: Setting) -> Result:
    """Two ranks each: shardlib's on test devices, whose memory is another than the host's; DeepSpeed's on the CPU."""
    config, steps = (SMALL, 3) if setting.small else (_CONFIG, setting.rounds)
    ranks = on_rig(_ours, config, steps, ranks=2)
    missing = [] if deepspeed.installed() else [_PEER]
    theirs = [{}, {}] if missing else on_two_ranks(_theirs, config, steps, axis="data")
    found = _means([mine | peer for mine, peer in zip(ranks, theirs, strict=True)])
    if found[_OURS] != found[_WITHOUT]:
        raise AssertionError(f"offload changes losses: {found[_OURS]}, and {found[_WITHOUT]} without")
    cells, samples = [], []
    for name, losses in found.items():
        worst = max(abs(one - other) for one, other in zip(losses, found[_OURS], strict=True))
        if worst > AGREE:
            raise AssertionError(f"{name} trains differently from {_OURS}: losses differ by {worst:g}")
        cells.append([name, f"{losses[0]:.6f}", f"{losses[-1]:.6f}", "" if name == _OURS else f"{worst:.1e}"])
        samples += [(_TITLE, name, step, loss) for step, loss in enumerate(losses)]
    cells += [[name, "not measured", "", ""] for name in missing]
    about = (
        f"A GPT ({config.layers} layers, width {config.width}, vocabulary {config.vocab}, sequence {config.sequence}, batch "
        f"{config.batch} per rank) in fp32 on two ranks, AdamW behind a clip by the global norm ({_CLIP}, reached in every "
        f"step), {steps} steps. shardlib trains on the tests' device, which has a memory of its own; DeepSpeed on its CPU "
        f"accelerator with torch's fused AdamW, so that only values are compared. Losses must agree within {AGREE:g}, and "
        "with and without offload to the last bit."
    )
    columns = ["", "first loss", f"loss of step {steps}", "largest difference"]
    return Result(tables.section(_TITLE, about, tables.grid(columns, cells)), _HEADER, samples, missing=missing)


def _ours(mesh: sl.Mesh, config: Config, steps: int) -> Losses:
    ways = {_OURS: sl.chain(sl.zero(2), sl.offload()), _WITHOUT: sl.zero(2)}
    tx = sl.optim.chain(sl.optim.clip_by_global_norm(_CLIP), adamw())
    return {
        name: _trained(step_of(make_loss(config), sl.shard(params_of(GPT(config)), mesh, way), tx), config, mesh, steps)
        for name, way in ways.items()
    }


def _theirs(mesh: sl.Mesh, config: Config, steps: int) -> Losses:
    return {_PEER: _trained(deepspeed.offloaded(_CLIP).make(config), config, mesh, steps)}


def _trained(step: Step, config: Config, mesh: sl.Mesh, steps: int) -> list[float]:
    torch.set_num_threads(1)
    shares = (random_batch(config, number % _BATCHES * mesh.size + mesh.rank) for number in range(steps))
    return [step(tuple(leaf.to(mesh.device) for leaf in share)) for share in shares]


def _means(ranks: list[Losses]) -> Losses:
    """Losses as means over ranks: peers report one rank's."""
    return {
        name: [statistics.fmean(step) for step in zip(*(losses[name] for losses in ranks), strict=True)]
        for name in ranks[0]
    }


CASE = Case("offload_values", "losses of offloaded training against DeepSpeed's", {CPU: 20}, measure)
