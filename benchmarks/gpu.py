"""Check everything on one GPU, then measure everything, in under eight minutes.

    python -m benchmarks.gpu [--out benchmarks/results]

Checks compare against the CPU in float64 or against plain torch on the GPU. Measurements interleave a hand-written
loop and shardlib round by round, with device events, and report medians. ``--tiny`` is a smoke test of the script
itself that also runs on a CPU; its timings mean nothing and are not written.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import optree
import torch

import shardlib as sl
from benchmarks import gpu_dense, gpu_kernels, gpu_optimizer_kernels, gpu_sparse, gpu_train
from benchmarks.gpu_timing import Rows, Timing
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport import EchoGroup
from shardlib.models import gpt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not args.tiny:
        raise SystemExit("no CUDA device: nothing to measure (--tiny tries the script on the CPU)")
    timing = Timing(device, args.tiny)
    tables = {
        "Checks": lambda: [row for check in CHECKS for row in check(device)],
        "A step of a small GPT": lambda: measurements(timing),
        "A step of a GPT of 1.1 billion parameters": lambda: gpu_train.measurements(timing, alone(device)),
        "Kernels of communication": lambda: gpu_kernels.measurements(timing),
        "Kernels of optimizers": lambda: gpu_optimizer_kernels.measurements(timing),
        "Pieces of a transformer's layer": lambda: gpu_dense.measurements(timing),
        "Sparse attention": lambda: gpu_sparse.measurements(timing),
    }
    lines = [f"`python -m benchmarks.gpu`, torch {torch.__version__}"]
    for title, make in tables.items():
        print(text := _table(title, make()), flush=True)
        lines.append(text)
    if not args.tiny:
        name = torch.cuda.get_device_name(device)
        stem = args.out / name.lower().replace(" ", "-")
        args.out.mkdir(parents=True, exist_ok=True)
        stem.with_suffix(".md").write_text("\n".join([f"# {name}", "", *lines]))
        timing.write(stem.with_suffix(".csv"))


def checks(device: torch.device) -> Rows:
    """Train a few steps in every mode; the result of each against one plain loop in float64 on the CPU."""
    modes: dict[str, sl.claims.Transform] = {f"zero({stage})": sl.zero(stage) for stage in range(4)}
    modes["zero(3) + accumulate(2)"] = sl.chain(sl.zero(3), sl.accumulate(2))
    modes["zero(3) + remat()"] = sl.chain(sl.zero(3), sl.remat())
    modes["zero(3) + remat('dots')"] = sl.chain(sl.zero(3), sl.remat("dots"))
    wanted = train(torch.device("cpu"), sl.zero(0), alone(torch.device("cpu")))
    rows = []
    for name, transform in modes.items():
        for what, mesh in (("alone", alone(device)), ("handles, one echo", echo(device))):
            error = max(
                (a.cpu() - b).norm().item() / b.norm().item()
                for a, b in zip(train(device, transform, mesh), wanted, strict=True)
            )
            rows.append({"check": f"{name}, {what}", "result": f"{'ok' if error < 1e-8 else 'WRONG'} ({error:.1e})"})
    return rows


def alone(device: torch.device) -> Mesh:
    return Mesh({"data": 1}, 0, {"data": EchoGroup(1)}, device)


def echo(device: torch.device) -> Mesh:
    """Two ranks of which one exists and the other holds the same: handles and gathers run, nothing is sent.

    The echo repeats this rank's shard, so it is exact only where both halves are equal; `train` makes them so.
    """
    return Mesh({"data": 2}, 0, {"data": EchoGroup(2)}, device)


def train(device: torch.device, transform: sl.claims.Transform, mesh: Mesh) -> list[torch.Tensor]:
    """Four steps of a small model in float64 whose weights' quarters are equal, and stay so: an echo is then exact."""
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


def measurements(timing: Timing) -> Rows:
    """A GPT in bf16 with fp32 masters: a hand-written loop against shardlib."""
    device, tiny = timing.device, timing.tiny
    config = gpt.GPTConfig(vocab=512, layers=2, width=64, heads=4, sequence=64)
    if not tiny:
        config = gpt.GPTConfig(vocab=32768, layers=24, width=1024, heads=16, sequence=1024)
    rows, batch = (2 if tiny else 16), {}
    for name in ("tokens", "targets"):
        batch[name] = torch.randint(0, config.vocab, (rows, config.sequence), device=device)
    providers: dict[str, Callable[[], None]] = {
        "hand-written loop": by_hand(config, batch, device),
        "shardlib, mesh of one": by_shardlib(config, batch, alone(device), sl.zero(0)),
        "shardlib, stage 3, one echo (gathers are copies)": by_shardlib(config, batch, echo(device), sl.zero(3)),
    }
    medians = timing.medians("a small GPT", providers)
    tokens, base = rows * config.sequence, medians["hand-written loop"]
    return [
        {
            "provider": name,
            "ms per step": f"{taken * 1e3:.2f}",
            "tokens/s": f"{tokens / taken:,.0f}",
            "ratio": f"{taken / base:.3f}",
        }
        for name, taken in medians.items()
    ]


def by_shardlib(
    config: gpt.GPTConfig, batch: dict[str, torch.Tensor], mesh: Mesh, transform: sl.claims.Transform
) -> Callable[[], None]:
    params = sl.shard(gpt.init(config, device=mesh.device), mesh, sl.chain(transform, sl.precision("bf16")))
    state, step = sl.make_train_step(gpt.make_loss(config), params, sl.optim.adamw(1e-4))
    held = [state]

    def run() -> None:
        held[0], _ = step(held[0], batch)

    return run


def by_hand(config: gpt.GPTConfig, batch: dict[str, torch.Tensor], device: torch.device) -> Callable[[], None]:
    """bf16 copies of fp32 masters, torch's fused AdamW: what one would write for one GPU."""
    masters = optree.tree_map(lambda leaf: leaf.requires_grad_(), gpt.init(config, device=device))
    leaves = optree.tree_leaves(masters)
    optimizer = torch.optim.AdamW(leaves, lr=1e-4, weight_decay=1e-4, fused=True)
    loss_fn = gpt.make_loss(config)

    def run() -> None:
        loss_fn(optree.tree_map(lambda leaf: leaf.bfloat16(), masters), batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def _table(title: str, rows: Rows) -> str:
    header = list(rows[0])
    lines = [f"## {title}", "", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row.values())} |" for row in rows), ""])


CHECKS = (checks, gpu_kernels.checks, gpu_optimizer_kernels.checks, gpu_dense.checks, gpu_sparse.checks)

if __name__ == "__main__":
    main()
