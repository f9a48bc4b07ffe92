"""Cases run to their end at tiny sizes, those for a GPU without one; and what they compare computes the same."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardlib as sl
from benchmarks.cases import (
    claims,
    compiled,
    data,
    disk,
    drops,
    experts,
    generating,
    host_time,
    layer_kernels,
    optimizer_kernels,
    planned_experts,
    planning,
    small_blocks,
    sparse_attention,
    trainer,
)
from benchmarks.cases.layer_operations import layer, operations
from benchmarks.harness.case import Setting
from benchmarks.peers import deepspeed
from benchmarks.peers.experts import IMPLEMENTATIONS, mixtral, of_mixtral

SMALL = Setting("cpu", torch.device("cpu"), rounds=1, small=True)


@pytest.mark.parametrize(
    "case",
    [
        *data.CASES,
        disk.CASE,
        *generating.CASES,
        optimizer_kernels.CASE,
        host_time.CASE,
        *(pytest.param(case, marks=pytest.mark.nightly) for case in planning.CASES),
        pytest.param(compiled.CASE, marks=pytest.mark.nightly),
        small_blocks.CASE,
        drops.CASE,
    ],
    ids=lambda case: case.name,
)
def test_a_case_runs_to_its_end(case):
    result = case.measure(SMALL)
    assert result.text.startswith("## ") and not result.missing
    assert all(len(row) == len(result.header) for row in result.samples)


@pytest.mark.nightly
def test_trainers_train_alike():
    result = trainer.measure(SMALL)
    assert bool(result.missing) != deepspeed.installed() and len(result.samples) == 3 + deepspeed.installed()


def test_plans_of_experts_are_what_formulas_say():
    samples = planned_experts.measure(SMALL).samples
    assert len(samples) == 14
    assert [sample[3] for sample in samples] == [sample[4] for sample in samples]


@pytest.mark.nightly
def test_claims_are_planned():
    result = claims.measure(SMALL)
    assert len(result.samples) == len(claims.CLAIMS) and all(number > 0 for _, _, number, _ in result.samples)
    assert result.text.count("| data ") + result.text.count("| pipe ") == len(claims.jobs()) == len(claims.small_jobs())


def test_a_layer_of_experts():
    result = experts.CASE.measure(SMALL)
    assert result.text.startswith("## ") and all(len(row) == len(result.header) for row in result.samples)
    assert deepspeed.installed() or len(result.missing) == 2


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_the_layer_of_experts_is_that_of_transformers(how):
    block, x = mixtral(how, 32, 48, 4, 2), torch.randn(5, 32)
    router, matrices = of_mixtral(block)
    found = sl.nn.moe({"router": {"weight": router}, "experts": matrices}, x, experts.MIXTRAL)[0]
    torch.testing.assert_close(found, block(x[None])[0])


def test_kernels_and_plain_torch_of_a_layer_agree():
    assert layer_kernels.SMALL.dropout == 0  # masks would not be equal
    every = {
        **operations(layer_kernels.SMALL, torch.float32, torch.device("cpu")),
        "layer": layer(layer_kernels.SMALL, torch.float32),
    }
    assert len(every) == 12
    for name, operation in every.items():
        with torch.no_grad():
            kernels, plain = operation.kernel(*operation.inputs), operation.plain(*operation.inputs)
        torch.testing.assert_close(kernels, plain, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kept", [sparse_attention._KEPT, 4 << 20], ids=["all heads at once", "Fixed a head at a time"])
def test_every_row_of_sparse_attention_is_measured(kept, monkeypatch):
    monkeypatch.setattr(sparse_attention, "_KEPT", kept)
    shapes = set()
    gradient = torch.autograd.grad

    def noted(out, *rest):
        shapes.add(out.shape[1])
        return gradient(out, *rest)

    monkeypatch.setattr(torch.autograd, "grad", noted)
    lines = sparse_attention.measure(SMALL).text.splitlines()
    rows = [line for line in lines if line.startswith("| 512 |")]
    assert len(rows) == len(sparse_attention._DTYPES) * len(sparse_attention._LAYOUTS) * len(sparse_attention._PASSES)
    assert all(line.count("|") == 13 and "| |" not in line for line in rows)
    assert shapes == ({2} if kept == 8 << 30 else {1, 2})


def test_the_cases_of_a_gpu_run_to_their_end():
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "benchmarks", "run", "--device", "cuda", "--small"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WRONG" not in done.stdout
    assert "is not written" in done.stdout
    for title in (
        "Checks",
        "A step of a small GPT",
        "A step of a GPT of 1.1 billion parameters",
        "Kernels of compressed communication",
        "Kernels of optimizers",
        "Kernels of a dense layer",
        "Sparse attention",
    ):
        assert f"## {title}" in done.stdout
