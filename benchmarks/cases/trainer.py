"""Fine-tuning on two ranks by a Trainer: ours, and transformers' with its FSDP2, with DeepSpeed, with data parallelism."""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

import shardlib as sl
from benchmarks.cases.ranks import AGREE, on_two_ranks
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.timing import Times
from benchmarks.peers import deepspeed

_OURS, _FSDP, _DEEPSPEED, _DDP = "shardlib, zero(3)", "FSDP2", "DeepSpeed stage 3", "data parallelism"
_FASTER, _LESS = 0.8, 0.8  # seconds a step, and memory: the largest shares of the peers' that are aimed for
_ROWS = 2
_TITLE = "Fine-tuning by a Trainer"

_ZERO = {
    "zero_optimization": {"stage": 3},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


class _Sizes(NamedTuple):
    vocab: int
    width: int
    inner: int
    layers: int
    heads: int
    length: int
    steps: int


_LARGE, _TINY = _Sizes(8192, 512, 1408, 8, 8, 128, 12), _Sizes(64, 32, 64, 2, 2, 16, 6)


class _Run(NamedTuple):
    """Of rank 0: seconds of a step; most memory from before the model was read to the end, and in the steps, MiB."""

    seconds: float
    most: float
    stepping: float
    losses: list[float]


def measure(setting: Setting) -> Result:
    sizes = _TINY if setting.small else _LARGE
    missing = [] if deepspeed.installed() else [_DEEPSPEED]
    kinds = [kind for kind in (_OURS, _FSDP, _DEEPSPEED, _DDP) if kind not in missing]
    runs: dict[str, list[_Run]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        _write_model(sizes, folder)
        for number in range(setting.rounds):
            for kind in kinds[number % 2 :] + kinds[: number % 2]:
                runs[kind].append(on_two_ranks(_trained, kind, sizes, folder, axis="data")[0])
    for kind, found in runs.items():
        worst = max(abs(a - b) for run in found for a, b in zip(run.losses, runs[_OURS][0].losses, strict=True))
        if worst > AGREE:
            raise AssertionError(f"{kind} trains differently from {_OURS}: losses differ by {worst:g}")
    times: Times = {kind: [run.seconds for run in found] for kind, found in runs.items()}
    rows = [tables.row(times, _OURS, kind, None if kind == _DDP else _FASTER) for kind in (_FSDP, _DEEPSPEED, _DDP)]
    shown = tables.compared(_TITLE, _about(sizes), rows, times)
    memory = tables.section("What each needs", _MEMORY, tables.grid(_COLUMNS, _cells(runs, sizes)))
    return Result(f"{shown.text}\n{memory}", shown.header, shown.samples, rows, shown.missing)


_COLUMNS = (
    "",
    "tokens per second",
    "most memory",
    "most memory in steps",
    "ours / its, in steps",
    "target",
    "last loss",
)
_MEMORY = "Medians over rounds of rank 0: resident memory above what the process had before it read the model, MiB."


def _cells(runs: dict[str, list[_Run]], sizes: _Sizes) -> list[list[str]]:
    cells = []
    ours = statistics.median(run.stepping for run in runs[_OURS])
    for kind, found in runs.items():
        seconds, most, stepping = (statistics.median(column) for column in list(zip(*found))[:3])
        aimed = kind in (_FSDP, _DEEPSPEED)
        share = "" if kind == _OURS else f"{ours / stepping:.2f}"
        tokens = f"{2 * _ROWS * sizes.length / seconds:.0f}"
        target = f"≤ {_LESS:.2f}, {'met' if ours / stepping <= _LESS else 'missed'}" if aimed else ""
        cells.append([kind, tokens, f"{most:.0f}", f"{stepping:.0f}", share, target, f"{found[0].losses[-1]:.5f}"])
    return cells


def _about(sizes: _Sizes) -> str:
    return (
        f"A Llama ({sizes.layers} layers, width {sizes.width}, vocabulary {sizes.vocab}) in fp32 on two ranks of one thread, "
        f"{_ROWS} rows of {sizes.length} tokens each, AdamW behind a clip by the global norm. All train by transformers' "
        "loop: `shardlib.integrations.transformers.Trainer`, and transformers' own with a model that `from_pretrained` "
        "shards by its FSDP2 (`DistributedConfig`), with DeepSpeed, and with DistributedDataParallel. Each runs in processes "
        f"of its own, in turns; a round's value is the median of its steps after the third. Losses must agree within "
        f"{AGREE:g} in every step."
    )


def _write_model(sizes: _Sizes, folder: str) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=sizes.vocab, hidden_size=sizes.width, intermediate_size=sizes.inner, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.heads, max_position_embeddings=sizes.length,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(Path(folder) / "model")


def _trained(mesh: sl.Mesh, kind: str, sizes: _Sizes, folder: str) -> _Run:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import transformers
    from transformers.distributed import DistributedConfig

    from shardlib.integrations.transformers import Trainer

    transformers.logging.set_verbosity_error()
    args = transformers.TrainingArguments(
        str(Path(folder) / "out"), per_device_train_batch_size=_ROWS, max_steps=sizes.steps, learning_rate=1e-3,
        lr_scheduler_type="constant", max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=True, ddp_backend="gloo", deepspeed=_ZERO if kind == _DEEPSPEED else None,
    )  # fmt: skip
    seen: list[tuple[float, float]] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            most = _most()
            if len(seen) == 2:
                _forget_most()
            seen.append((time.perf_counter(), most))

    tokens = torch.randint(sizes.vocab, (64, sizes.length), generator=torch.Generator().manual_seed(0))
    dataset: Any = [{"input_ids": row, "labels": row} for row in tokens]
    _forget_most()
    before = _most()
    sharding = {"distributed_config": DistributedConfig(fsdp_size=mesh.size)} if kind == _FSDP else {}
    model = transformers.LlamaForCausalLM.from_pretrained(Path(folder) / "model", **sharding)
    made: Any = transformers.Trainer if kind != _OURS else Trainer
    options = {"transforms": sl.zero(3)} if kind == _OURS else {}
    trainer = made(model, args, train_dataset=dataset, callbacks=[Clock()], **options)
    trainer.train()
    times, most = zip(*seen)
    seconds = statistics.median(after - before for before, after in itertools.pairwise(times[2:]))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return _Run(seconds, max(most) - before, max(most[3:]) - before, losses)


def _most() -> float:
    """The most resident memory that this process has had, MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def _forget_most() -> None:
    Path("/proc/self/clear_refs").write_text("5")


CASE = Case("trainer", "fine-tuning by Trainer on two ranks against FSDP2 and DeepSpeed", {CPU: 5}, measure)
