"""Cases of data, disks, optimizers and planning run to their end at tiny sizes."""

import pytest
import torch

from benchmarks.cases import (
    claims,
    compiled,
    data,
    disk,
    drops,
    generating,
    optimizer_kernels,
    planned_experts,
    planning,
    small_blocks,
    trainer,
)
from benchmarks.harness.case import Setting
from benchmarks.peers import deepspeed

SMALL = Setting("cpu", torch.device("cpu"), rounds=1, small=True)


@pytest.mark.parametrize(
    "case",
    [
        *data.CASES,
        disk.CASE,
        *generating.CASES,
        optimizer_kernels.CASE,
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
