"""A GPT of about 1.1 billion parameters trained in bf16 on one GPU: shardlib against plain PyTorch and fully_shard."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardlib as sl
from benchmarks.harness import rates, tables
from benchmarks.harness.case import CUDA, Case, Result, Setting
from benchmarks.harness.timing import Times, medians
from benchmarks.peers import fsdp
from benchmarks.peers.gpt import GPT, SMALL, Config, make_loss, params_of
from benchmarks.peers.shardlib import echo_mesh

Step = Callable[[], torch.Tensor]

_LARGE = Config(vocab=50304, layers=24, width=1792, heads=14, sequence=1024, batch=16)
_ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-4}


def measure(setting: Setting) -> Result:
    """Seconds, tokens/s and MFU of a step of each provider, and the final loss of each from the same start.

    The providers come one after the other, since a GPU does not hold all of them at once.

    MFU counts 6 floating-point operations for each parameter and token, and 6·layers·width·sequence for each token's
    causal attention, against the rate of a bf16 product of 8192 × 8192 matrices measured here.
    """
    config, device = SMALL if setting.small else _LARGE, setting.device
    batch = tuple(torch.randint(config.vocab, (config.batch, config.sequence), device=device) for _ in range(2))
    losses: dict[str, torch.Tensor] = {}
    times: Times = {}

    def measured(name: str, step: Step) -> None:
        times.update(setting.time({name: lambda _: losses.__setitem__(name, step())}, warm=rates.GPU_WARM))

    with _alone(device):
        backend = "eager" if setting.small else "inductor"
        for name, make in _PROVIDERS.items():
            measured(name, make(config, batch, device, backend))
    taken = medians(times)
    tokens, numbers = config.batch * config.sequence, sum(p.numel() for p in _start(config).parameters())
    work = tokens * (6 * numbers + 6 * config.layers * config.width * config.sequence)
    ceiling, base = rates.product_rate(setting), taken[next(iter(_PROVIDERS))]
    cells = [
        [
            name,
            f"{seconds * 1e3:.2f}",
            f"{tokens / seconds:,.0f}",
            f"{work / seconds / ceiling:.1%}",
            f"{seconds / base:.3f}",
            f"{float(losses[name]):.3f}",
        ]
        for name, seconds in taken.items()
    ]
    columns = ["provider", "ms per step", "tokens/s", "MFU", "ratio", "last loss"]
    about = (
        f"{config.layers} layers of width {config.width}, {config.batch} rows of {config.sequence} in bf16, "
        f"{setting.rounds} rounds. MFU is against a product of bf16 matrices, measured here."
    )
    return tables.listed("A step of a GPT of 1.1 billion parameters", about, columns, cells, times)


def _plain(config: Config, batch: Any, device: torch.device, backend: str) -> Step:
    """fp32 parameters under autocast, every block compiled, torch's fused AdamW."""
    model = copy.deepcopy(_start(config)).to(device)
    for unit in fsdp.units(model):
        unit.compile(backend=backend)

    def forward() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return model(*batch)

    return _loop(model, forward)


def _fully_sharded(config: Config, batch: Any, device: torch.device, backend: str) -> Step:
    """bf16 parameters gathered from fp32 ones, gradients reduced in fp32, every block compiled."""
    model = copy.deepcopy(_start(config)).to(device)
    for unit in fsdp.units(model):
        unit.compile(backend=backend)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fsdp.shard(model, device.type, mp_policy=policy)
    return _loop(model, lambda: model(*batch))


def _loop(model: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **_ADAMW)  # type: ignore[arg-type]

    def step() -> torch.Tensor:
        loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _shardlib(config: Config, batch: Any, device: torch.device, backend: str | None) -> Step:
    """``precision("bf16")`` with fp32 masters, adamw; every block compiled, unless there is no backend."""
    params = params_of(copy.deepcopy(_start(config)).to(device))
    loss_fn = make_loss(config) if backend is None else make_loss(config, partial(torch.compile, backend=backend))
    sharded = sl.shard(params, echo_mesh(1, device), sl.chain(sl.zero(0), sl.precision("bf16")))
    state, train_step = sl.make_train_step(loss_fn, sharded, sl.optim.adamw(1e-4, weight_decay=1e-4))
    held = [state]

    def step() -> torch.Tensor:
        held[0], metrics = train_step(held[0], batch)
        return metrics["loss"]

    return step


_PROVIDERS: dict[str, Callable[..., Step]] = {
    "plain PyTorch, compiled": _plain,
    "fully_shard, one rank, compiled": _fully_sharded,
    "shardlib, compiled": _shardlib,
    "shardlib": lambda config, batch, device, _: _shardlib(config, batch, device, None),
}


@contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """A process group of one rank, for fully_shard."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@functools.cache
def _start(config: Config) -> GPT:
    """The initial parameters of all providers, on the CPU, as a generator draws on one device only."""
    return GPT(config)


CASE = Case(
    "large_gpt",
    "a GPT of 1.1 billion parameters against plain PyTorch and fully_shard",
    {CUDA: rates.GPU_ROUNDS},
    measure,
)
