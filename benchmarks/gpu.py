"""Check everything on one GPU, then measure everything, in under eight minutes.

    python -m benchmarks.gpu [--out benchmarks/results]

Checks compare against the CPU in float64 or against plain torch on the GPU. Measurements interleave a hand-written
loop and shardlib round by round, with device events, and report medians. ``--tiny`` is a smoke test of the script
itself that also runs on a CPU; its timings mean nothing and are not written.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import optree
import torch

import shardlib as sl
from benchmarks import gpu_kernels
from shardlib.groups import EchoGroup
from shardlib.mesh import Mesh
from shardlib.models import gpt

Rows = list[dict[str, str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not args.tiny:
        raise SystemExit("no CUDA device: nothing to measure (--tiny tries the script on the CPU)")
    rows = checks(device) + gpu_kernels.checks(device)
    for row in rows:
        print(f"{row['check']:55s} {row['result']}")
    measured = measurements(device, args.tiny)
    kernels = gpu_kernels.measurements(device, args.tiny, seconds)
    for row in measured + kernels:
        print(row)
    if not args.tiny:
        write(args.out, device, "benchmarks.gpu", rows, {"": measured, "-kernels": kernels})


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


def measurements(device: torch.device, tiny: bool) -> Rows:
    """A GPT in bf16 with fp32 masters: a hand-written loop against shardlib."""
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
    times: dict[str, list[float]] = {name: [] for name in providers}
    for round_number in range(2 if tiny else 14):
        for name, step in providers.items():
            taken = seconds(step, device)
            if round_number >= (0 if tiny else 4):
                times[name].append(taken)
    tokens = rows * config.sequence
    base = statistics.median(times["hand-written loop"])
    return [
        {
            "provider": name,
            "ms per step": f"{statistics.median(taken) * 1e3:.2f}",
            "tokens/s": f"{tokens / statistics.median(taken):,.0f}",
            "ratio": f"{statistics.median(taken) / base:.3f}",
        }
        for name, taken in times.items()
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


def seconds(step: Callable[[], None], device: torch.device) -> float:
    if device.type == "cpu":
        begun = time.perf_counter()
        step()
        return time.perf_counter() - begun
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def write(folder: Path, device: torch.device, command: str, checked: Rows, tables: dict[str, Rows]) -> None:
    """A page of all, named after the GPU and the first table, and a file for each table."""
    name = torch.cuda.get_device_name(device)
    stem = name.lower().replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"# {name}", "", f"`python -m {command}`, torch {torch.__version__}", ""]
    for rows in (checked, *tables.values()):
        header = list(rows[0])
        lines += [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
        lines += [f"| {' | '.join(row.values())} |" for row in rows] + [""]
    (folder / f"{stem}{next(iter(tables))}.md").write_text("\n".join(lines))
    for ending, rows in tables.items():
        with (folder / f"{stem}{ending}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
