"""Benchmarks on the test device: what is searched is found, and cases run to their end at tiny sizes."""

import pytest
import torch

from benchmarks.cases import budget, offload_values
from benchmarks.harness.case import Setting
from benchmarks.peers import deepspeed

SMALL = Setting("cpu", torch.device("cpu"), rounds=1, small=True)


@pytest.mark.parametrize("largest", [1, 7, 100, 431])
@pytest.mark.parametrize("first", [0, 1, 90, 100, 101, 1000])
def test_the_largest_depth_is_found_from_any_guess(first, largest):
    runs, limits, tried = {}, {}, []
    for layers in budget.depths(first, runs, limits):
        tried.append(layers)
        (runs if layers <= largest else limits)[layers] = "seen"
    assert max(runs) == largest and min(limits) == largest + 1
    assert len(tried) == len(set(tried)) <= 25


def test_a_good_guess_costs_two_runs():
    runs, limits = {}, {}
    for layers in budget.depths(100, runs, limits):
        (runs if layers <= 100 else limits)[layers] = "seen"
    assert runs.keys() | limits.keys() == {100, 101}


def test_losses_of_offloaded_training_are_compared():
    result = offload_values.measure(SMALL)
    assert "zero(2), offload()" in result.text
    assert bool(result.missing) != deepspeed.installed()


@pytest.mark.nightly
def test_the_largest_model_of_a_budget_is_found():
    result = budget.measure(SMALL)
    assert "missed" not in result.text and result.text.count("met |") == 1
