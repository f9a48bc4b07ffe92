"""The search for the cheapest change that fits, over plans that are numbers."""

from dataclasses import dataclass
from typing import Any

import pytest

from shardlib.plan import limits


@dataclass(frozen=True)
class Numbers:
    """What the search asks of a plan."""

    excess: float
    seconds: float
    traces: Any = None
    claims: Any = None


class Limits:
    def excess(self, plan):
        return plan.excess

    def uses(self, plan):
        return []


@pytest.fixture
def searched(monkeypatch):
    """``searched(alone, together)``: the refusal, and the names that were planned in full. Changes are names with their
    (seconds at least, seconds, excess); those that are made together with another one are given by its name."""
    monkeypatch.setattr(limits, "nominal_seconds", lambda plan: plan.seconds)

    def search(alone, **together):
        planned = []
        candidates = {**alone, **{name: change for after in together.values() for name, change in after.items()}}

        def exact(name):
            planned.append(name)
            _, seconds, excess = candidates[name]
            return Numbers(excess, seconds)

        planner = limits.Planner(
            Limits(),
            lambda before, full: alone if before == "start" else together.get(before, ()),
            lambda before, after, plan: after,
            lambda name: Numbers(0.0, candidates[name][0]),
            exact,
            lambda plan: True,
        )
        return str(planner.refusal("start", Numbers(1.0, 1.0))), planned

    return search


def test_what_fits_first_is_not_the_cheapest(searched):
    refusal, planned = searched({"slow": (2.5, 2.5, 0.0), "later": (2.0, 2.0, 0.0), "first": (1.0, 3.0, 0.0)})
    assert "The cheapest change that fits: later. A step takes about 2.00 times" in refusal
    assert planned == ["first", "later"]  # to plan the slow one changes nothing


def test_what_does_not_fit_ends_no_search(searched):
    refusal, planned = searched({"tight": (1.0, 1.0, 0.5), "roomy": (4.0, 4.0, 0.0)})
    assert "that fits: roomy." in refusal and planned == ["tight", "roomy"]


def test_where_none_fits_the_least_is_told(searched):
    refusal, planned = searched({"tight": (1.0, 1.0, 0.5), "tighter": (4.0, 4.0, 0.7)})
    assert "the least is held with tight." in refusal and planned == ["tight", "tighter"]


def test_of_changes_together_the_cheapest_is_told(searched):
    further = {"slow": (2.5, 2.5, 0.0), "later": (2.0, 2.0, 0.0), "first": (1.0, 3.0, 0.0), "tight": (0.5, 0.5, 0.1)}
    refusal, planned = searched({"half": (1.0, 1.0, 0.5)}, half={"less": (1.0, 1.0, 0.3)}, less=further)
    assert "but together these do: later. A step takes about 2.00 times" in refusal
    assert planned == ["half", "less", "tight", "first", "later"]


def test_two_quick_changes_are_told_in_place_of_more_after_the_one_that_holds_least(searched):
    refusal, planned = searched(
        {"quick": (1.1, 1.1, 0.5), "least": (8.0, 8.0, 0.1)},
        least={"more": (8.03, 8.03, 0.0)},
        quick={"both": (1.4, 1.4, 0.0), "longer": (9.0, 9.0, 0.0)},
    )
    assert "but together these do: both. A step takes about 1.40 times" in refusal
    assert planned == ["quick", "least", "more", "both"]
