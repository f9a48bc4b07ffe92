"""A user's own pipeline schedule: GPipe in windows, so that no rank holds more micro-batches than a window has."""

import pytest
import torch
from helpers.stages import ADAMW, check_like_one_device, plan_of

import shardlib as sl
from shardlib.errors import ScheduleError
from shardlib.schedules import Action, Kind


def windows(ranks, microbatches, width):
    """A list of actions for each rank: some forwards, then as many backwards, and so on."""
    starts = range(0, microbatches, width)
    order = [(kind, start + i) for start in starts for kind in (Kind.F, Kind.B) for i in range(width)]
    return [[Action(rank, kind, number) for kind, number in order] for rank in range(ranks)]


def hidden(params, x, batch):
    return torch.tanh((batch if x is None else x) @ params["w"])


def last(params, x, batch):
    return (x @ params["w"]).square().mean()


LOSS = sl.sequential([hidden, hidden, hidden, last])


def model():
    generator = torch.Generator().manual_seed(0)
    params = [{"w": torch.randn(6, 6, generator=generator, dtype=torch.float64)} for _ in range(4)]
    return LOSS, params, [torch.randn(16, 6, generator=generator, dtype=torch.float64) for _ in range(4)]


TRANSFORM = sl.pipeline(windows(2, 4, 2), microbatches=4)
MESHES = {"data": 2, "pipe": 2}, {"data": 1, "pipe": 2}


def test_it_trains_like_one_device_and_sends_what_the_plan_says(tmp_path, pool):
    check_like_one_device(model, TRANSFORM, tmp_path, pool, meshes=MESHES)
    plan = plan_of(model, TRANSFORM, ADAMW, 2, MESHES[0])
    assert "custom over axis 'pipe'" in str(plan)


def test_what_cannot_run_is_refused_by_name():
    wrong = [order[::-1] for order in windows(2, 4, 2)]
    with pytest.raises(ScheduleError, match="custom"):
        sl.make_plan(model()[1], sl.abstract_mesh(pipe=2), sl.pipeline(wrong, microbatches=4))
