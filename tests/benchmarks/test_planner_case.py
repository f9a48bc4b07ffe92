"""The case that compares searches with brute force: what it draws, and what it makes of what was measured."""

import pytest
import torch

from benchmarks.harness.case import Setting
from benchmarks.network import planner
from shardlib.search.space import choices, meshes

SMALL = Setting("cpu", torch.device("cpu"), rounds=1, small=True)


@pytest.mark.parametrize("ranks", [2, 4])
def test_choices_are_of_all_meshes_and_stages(ranks):
    found = planner.picked(ranks, blocks=6)
    cuts = meshes(planner._SPACE, ranks, blocks=6, slices=True, experts=0)
    everything = choices(planner._SPACE, cuts, 8, frozenset())
    assert len(set(found)) == len(found) == 12 and 3 * len(found) >= 30  # on three networks
    assert {choice.sizes for choice in found} == {choice.sizes for choice in everything}
    assert {choice.stage for choice in found} == {0, 1, 2, 3}
    again = [choice for choice in found if choice.recompute]
    assert len(again) == 2 and all(planner.replace(choice, recompute=None) in found for choice in again)


def test_regret_is_of_the_quickest_that_fits():
    """Of two searches: one that picks the quickest of all, and one that picks what takes twice as long as what fits."""
    times = {"a": [1.0, 1.0, 9.0], "b": [2.0, 2.0, 2.0], "c": [4.0, 4.0, 4.0]}
    predicted, held = {"a": 1.1, "b": 1.0, "c": 4.6}, {"a": 30, "b": 20, "c": 10}
    tried = planner._Tried(times, predicted, held, {100: "a", 20: "c", 10: "b"})
    found = planner._result("Searched for", {"no limit": tried}, SMALL)
    assert "| no limit | 3 | a | 1 | 1.10 | 0.0% |" in found.text
    assert "| no limit | 2 | c | 4 | 1.15 | 100.0% |" in found.text
    assert "| no limit | 1 | b | 2 | 0.50 | -50.0% | over the budget |" in found.text
    assert "Of 3 predictions 2 are within 15 %" in found.text and "| c | 4, 1.15 |" in found.text
    assert len(found.samples) == 9 + 3 and all(len(row) == len(found.header) for row in found.samples)
