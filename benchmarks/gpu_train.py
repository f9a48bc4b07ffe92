"""A GPT of about 1.1 billion parameters trained in bf16 on one GPU: shardlib against plain PyTorch and fully_shard."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import shardlib as sl
from benchmarks.gpu_timing import Rows, Timing
from benchmarks.model import GPT, Config, make_loss, params_of
from shardlib.mesh.mesh import Mesh

Step = Callable[[], torch.Tensor]

LARGE = Config(vocab=50304, layers=24, width=1792, heads=14, sequence=1024, batch=16)
TINY = Config(vocab=64, layers=2, width=32, heads=2, sequence=16, batch=2)
_ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-4}


def measurements(timing: Timing, mesh: Mesh) -> Rows:
    """Seconds, tokens/s and MFU of a step, providers taking turns; and the loss that each ends at, from the same start.

    MFU counts 6 floating-point operations for each parameter and token, and 6·layers·width·sequence for each token's
    causal attention, against the rate of a bf16 product of 8192 × 8192 matrices measured here.
    """
    config, device = TINY if timing.tiny else LARGE, timing.device
    batch = tuple(torch.randint(config.vocab, (config.batch, config.sequence), device=device) for _ in range(2))
    losses: dict[str, torch.Tensor] = {}

    def keeping(name: str, step: Step) -> Callable[[], None]:
        return lambda: losses.__setitem__(name, step())

    with _alone(device):
        backend = "eager" if timing.tiny else "inductor"
        steps = {name: keeping(name, make(config, batch, device, mesh, backend)) for name, make in PROVIDERS.items()}
        medians = timing.medians("training", steps)
    tokens, numbers = config.batch * config.sequence, sum(p.numel() for p in _start(config).parameters())
    work = tokens * (6 * numbers + 6 * config.layers * config.width * config.sequence)
    ceiling, base = timing.product_rate(), medians[next(iter(PROVIDERS))]
    return [
        {
            "provider": name,
            "ms per step": f"{taken * 1e3:.2f}",
            "tokens/s": f"{tokens / taken:,.0f}",
            "MFU": f"{work / taken / ceiling:.1%}",
            "ratio": f"{taken / base:.3f}",
            "last loss": f"{float(losses[name]):.3f}",
        }
        for name, taken in medians.items()
    ]


def _plain(config: Config, batch: Any, device: torch.device, mesh: Mesh, backend: str) -> Step:
    """fp32 parameters under autocast, the model compiled, torch's fused AdamW."""
    model = copy.deepcopy(_start(config)).to(device)
    forward = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **_ADAMW)  # type: ignore[arg-type]

    def step() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss = forward(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _fully_sharded(config: Config, batch: Any, device: torch.device, mesh: Mesh, backend: str) -> Step:
    """bf16 parameters gathered from fp32 ones, gradients reduced in fp32, every block compiled."""
    model = copy.deepcopy(_start(config)).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    one = init_device_mesh(device.type, (1,))
    for unit in (model.embed, *model.blocks, model.head):
        unit.compile(backend=backend)
    for unit in (model.embed, *model.blocks, model.head, model):
        fully_shard(unit, mesh=one, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **_ADAMW)  # type: ignore[arg-type]

    def step() -> torch.Tensor:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _shardlib(config: Config, batch: Any, device: torch.device, mesh: Mesh, backend: str | None) -> Step:
    """``precision("bf16")`` with fp32 masters, adamw; the loss compiled, unless there is no backend."""
    params = params_of(copy.deepcopy(_start(config)).to(device))
    loss_fn = make_loss(config)
    if backend is not None:
        loss_fn = torch.compile(loss_fn, backend=backend)
    sharded = sl.shard(params, mesh, sl.chain(sl.zero(0), sl.precision("bf16")))
    state, train_step = sl.make_train_step(loss_fn, sharded, sl.optim.adamw(1e-4, weight_decay=1e-4))
    held = [state]

    def step() -> torch.Tensor:
        held[0], metrics = train_step(held[0], batch)
        return metrics["loss"]

    return step


PROVIDERS: dict[str, Callable[..., Step]] = {
    "plain PyTorch, compiled": _plain,
    "fully_shard, one rank, compiled": _fully_sharded,
    "shardlib, compiled": _shardlib,
    "shardlib": lambda config, batch, device, mesh, backend: _shardlib(config, batch, device, mesh, None),
}


@contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """A process group of one, for fully_shard."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@functools.cache
def _start(config: Config) -> GPT:
    """What all train from, on the CPU: a generator of one device fills no memory of another."""
    return GPT(config)
