"""The README's picture shows what the plan says."""

import importlib.util
from pathlib import Path

import pytest

from shardlib.models import gpt

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def drawing():
    spec = importlib.util.spec_from_file_location("draw_memory", DOCS / "draw_memory.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_drawn_memory_is_the_plans(drawing, tmp_path):
    """Its highest point is the peak of the micro-batches, and at the step's ends nothing but the state is held."""
    config = gpt.GPTConfig(vocab=64, layers=2, width=32, heads=4, sequence=16)
    plan = drawing.planned(config, 4, {"data": 2, "pipe": 2}, 4)
    for stage, points in enumerate(drawing.held(plan, drawing.clock(plan))):
        rank = plan.at({"pipe": stage})
        assert max(sum(values) for _, values in points) == rank.bytes("total") + rank.live_bytes
        assert sum(points[-1][1]) == rank.bytes("total")
    drawing.draw(plan, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
