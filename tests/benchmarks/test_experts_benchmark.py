"""The benchmark of a layer of experts runs to its end, and what it compares computes the same."""

import pytest
import torch

import shardlib as sl
from benchmarks.cases import experts
from benchmarks.harness.case import Setting
from benchmarks.peers import deepspeed
from benchmarks.peers.experts import IMPLEMENTATIONS, mixtral, of_mixtral


def test_it_runs_to_its_end():
    result = experts.CASE.measure(Setting("cpu", torch.device("cpu"), rounds=1, small=True))
    assert result.text.startswith("## ") and all(len(row) == len(result.header) for row in result.samples)
    assert deepspeed.installed() or len(result.missing) == 2


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_the_layer_is_that_of_transformers(how):
    block, x = mixtral(how, 32, 48, 4, 2), torch.randn(5, 32)
    router, matrices = of_mixtral(block)
    found = sl.nn.moe({"router": {"weight": router}, "experts": matrices}, x, experts.MIXTRAL)[0]
    torch.testing.assert_close(found, block(x[None])[0])
