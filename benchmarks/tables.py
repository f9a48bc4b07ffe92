"""The tables: which cases are written together, and to which file of ``results/``."""

from __future__ import annotations

import torch

from benchmarks.cases import (
    budget,
    checkpoints,
    claims,
    communication,
    compiled,
    data,
    disk,
    drops,
    experts,
    generating,
    host_time,
    large_gpt,
    layer_kernels,
    long_sequences,
    offload,
    offload_values,
    optimizer_kernels,
    overlap,
    pipeline,
    planned_experts,
    planned_gpt,
    planning,
    profile,
    reproducible,
    slicing,
    small_blocks,
    small_gpt,
    small_tensors,
    sparse_attention,
    step,
    trainer,
)
from benchmarks.harness import plots
from benchmarks.harness.case import CPU, Table
from benchmarks.learning import compressed as learning
from benchmarks.learning import curricula, expert_report, large_batch, less, rates
from benchmarks.learning import experts as learning_experts
from benchmarks.network import compressed as slow_network
from benchmarks.network import link, planner, report, tokens

_OF_THE_CPU = (
    Table(
        "cpu",
        "Steps and kernels on two cores",
        (step.CASE, small_tensors.CASE, small_blocks.CASE, communication.CASE, slicing.CASE, pipeline.CASE, link.CASE),
        plots.ratios,
    ),
    Table(
        "kernels_cpu",
        "Kernels of optimizers and of a dense layer on one core",
        (optimizer_kernels.CASE, layer_kernels.CASE),
        plots.ratios,
    ),
    Table("host_time", "Kernels on small tensors on one core", (host_time.CASE,)),
    Table("checkpoints", "Checkpoints on one disk", checkpoints.CASES),
    Table("disk", "Buffers on one disk", (disk.CASE,)),
    Table("budget", "Memory beyond the device", (budget.CASE,)),
    Table("profile", "Steps with clocks", (profile.CASE,)),
    Table("overlap", "Offload beside the computation", (overlap.CASE,)),
    Table("long_sequences", "Long sequences on one device", (long_sequences.CASE,)),
    Table("offload_values", "Offload against DeepSpeed's", (offload_values.CASE,)),
    Table("trainer", "Fine-tuning by a Trainer", (trainer.CASE,)),
    Table("data", "Reading data", data.CASES),
    Table("largest_gpt", "The largest GPT that a plan fits into a budget", (planned_gpt.CASE,)),
    Table("planning", "Planning large models", planning.CASES),
    Table("claims", "Published claims, planned", (claims.CASE,)),
    Table("planned_experts", "Plans of models with experts", (planned_experts.CASE,)),
    Table("generating", "Generating on one core", generating.CASES),
    Table("reproducible", "The same bits on every mesh", reproducible.CASES),
    Table("sparse_cpu", "Sparse attention on one core", (sparse_attention.CASE,)),
    Table("compiled", "Steps as one graph on one core", (compiled.CASE,), plots.ratios),
    Table("drops", "Steps that leave out layers or tokens", (drops.CASE,), plots.ratios),
    Table("learning_less", "Learning with less", (less.CASE,)),
    Table("experts", "A layer of experts on one core", (experts.CASE,), plots.ratios),
    Table("planner", "The search for a plan against brute force", planner.CASES),
    Table("slow_network", "Slow networks", slow_network.CASES, report.plot),
    Table("tokens", "Tokens on their way to experts over slow links", tokens.CASES),
    Table("learning", "Learning", (learning.CASE,)),
    Table("learning_rates", "Learning at several rates", (rates.CASE,)),
    Table("large_batch", "Large batches", (large_batch.CASE,)),
    Table("learning_curricula", "Learning with curricula", (curricula.CASE,)),
    Table("learning_experts", "Learning with experts", (learning_experts.CASE,), expert_report.plot),
)
_OF_A_GPU = (
    small_gpt.CASE,
    large_gpt.CASE,
    offload.CASE,
    communication.CASE,
    optimizer_kernels.CASE,
    layer_kernels.CASE,
    host_time.CASE,
    sparse_attention.CASE,
)


def tables(kind: str) -> tuple[Table, ...]:
    """The tables of a kind of device; those of a GPU have the GPU's name."""
    if kind == CPU:
        return _OF_THE_CPU
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "a GPU"
    return (Table(name.lower().replace(" ", "-"), name, _OF_A_GPU),)
