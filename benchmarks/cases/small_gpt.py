"""A small GPT's step in bf16 on one GPU against a hand-written loop; checked in every mode of sharding."""

from __future__ import annotations

from collections.abc import Callable

import optree
import torch

import shardlib as sl
from benchmarks.harness import rates, tables
from benchmarks.harness.case import CPU, CUDA, Case, Checks, Result, Setting
from benchmarks.harness.timing import medians
from benchmarks.peers.shardlib import echo_mesh
from shardlib.mesh.mesh import Mesh
from shardlib.models import gpt

_BY_HAND = "hand-written loop"


def check(device: torch.device) -> Checks:
    """Checks a few steps in every mode of sharding against a plain loop in float64 on the CPU."""
    modes: dict[str, sl.claims.Transform] = {f"zero({stage})": sl.zero(stage) for stage in range(4)}
    modes["zero(3) + accumulate(2)"] = sl.chain(sl.zero(3), sl.accumulate(2))
    modes["zero(3) + remat()"] = sl.chain(sl.zero(3), sl.remat())
    modes["zero(3) + remat('dots')"] = sl.chain(sl.zero(3), sl.remat("dots"))
    wanted = _trained(torch.device(CPU), sl.zero(0), 1)
    checks = []
    for name, transform in modes.items():
        for what, ranks in (("alone", 1), ("handles, one echo", 2)):
            error = max(
                (a.cpu() - b).norm().item() / b.norm().item()
                for a, b in zip(_trained(device, transform, ranks), wanted, strict=True)
            )
            checks.append((f"{name}, {what}", rates.outcome(error < 1e-8, f"{error:.1e}")))
    return checks


def _trained(device: torch.device, transform: sl.claims.Transform, ranks: int) -> list[torch.Tensor]:
    """Four steps of a small model in float64.

    An echo repeats this rank's shard, so it is exact only if both halves of a leaf are equal: here the quarters of all
    weights are, and stay so.
    """
    mesh = echo_mesh(ranks, device)
    generator = torch.Generator().manual_seed(0)

    def weight(rows: int) -> dict[str, torch.Tensor]:
        quarter = torch.randn((rows // 2, 8), generator=generator, dtype=torch.float64) * 0.2
        return {"w": quarter.tile(2, 2).to(device)}

    params = {"blocks": [weight(16) for _ in range(3)], "out": weight(2)}
    block = sl.block(lambda p, x: torch.tanh(torch.nn.functional.linear(x, p["w"])))

    def loss_fn(params, batch):
        x = batch
        for p in params["blocks"]:
            x = block(p, x)
        return torch.nn.functional.linear(x, params["out"]["w"]).square().mean()

    state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), sl.optim.adamw(1e-3))
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
    for _ in range(4):
        state, _ = step(state, batch)
    return optree.tree_leaves(sl.unshard(state.params))


def measure(setting: Setting) -> Result:
    """A GPT in bf16 with fp32 masters."""
    device, rows = setting.device, 2 if setting.small else 16
    config = gpt.GPTConfig(vocab=32768, layers=24, width=1024, heads=16, sequence=1024)
    if setting.small:
        config = gpt.GPTConfig(vocab=512, layers=2, width=64, heads=4, sequence=64)
    batch = {
        name: torch.randint(0, config.vocab, (rows, config.sequence), device=device) for name in ("tokens", "targets")
    }
    alone, echo = (echo_mesh(ranks, device) for ranks in (1, 2))
    providers = {
        _BY_HAND: _by_hand(config, batch, device),
        "shardlib, mesh of one": _by_shardlib(config, batch, alone, sl.zero(0)),
        "shardlib, stage 3, one echo (gathers are copies)": _by_shardlib(config, batch, echo, sl.zero(3)),
    }
    times = setting.time({name: lambda _, step=step: step() for name, step in providers.items()}, warm=rates.GPU_WARM)
    taken, tokens = medians(times), rows * config.sequence
    cells = [
        [name, f"{seconds * 1e3:.2f}", f"{tokens / seconds:,.0f}", f"{seconds / taken[_BY_HAND]:.3f}"]
        for name, seconds in taken.items()
    ]
    about = (
        f"{config.layers} layers of width {config.width}, {rows} rows of {config.sequence}, {setting.rounds} rounds."
    )
    return tables.listed("A step of a small GPT", about, ["provider", "ms per step", "tokens/s", "ratio"], cells, times)


def _by_shardlib(
    config: gpt.GPTConfig, batch: dict[str, torch.Tensor], mesh: Mesh, transform: sl.claims.Transform
) -> Callable[[], None]:
    params = sl.shard(gpt.init(config, device=mesh.device), mesh, sl.chain(transform, sl.precision("bf16")))
    state, step = sl.make_train_step(gpt.make_loss(config), params, sl.optim.adamw(1e-4))
    held = [state]

    def run() -> None:
        held[0], _ = step(held[0], batch)

    return run


def _by_hand(config: gpt.GPTConfig, batch: dict[str, torch.Tensor], device: torch.device) -> Callable[[], None]:
    """A hand-written step for one GPU: bf16 copies of fp32 masters, torch's fused AdamW."""
    masters = optree.tree_map(lambda leaf: leaf.requires_grad_(), gpt.init(config, device=device))
    leaves = optree.tree_leaves(masters)
    optimizer = torch.optim.AdamW(leaves, lr=1e-4, weight_decay=1e-4, fused=True)
    loss_fn = gpt.make_loss(config)

    def run() -> None:
        loss_fn(optree.tree_map(lambda leaf: leaf.bfloat16(), masters), batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


CASE = Case(
    "small_gpt",
    "a GPT of 24 layers against a hand-written loop; every mode of sharding is checked",
    {CUDA: rates.GPU_ROUNDS},
    measure,
    check,
)
