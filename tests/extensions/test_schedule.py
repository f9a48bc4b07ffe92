"""A user's own pipeline schedule: GPipe in windows, so that no rank holds more micro-batches than a window has."""

import pytest
import torch
from helpers.measure import count_payload
from helpers.trees import assert_close
from oracle import one_device

import shardlib as sl
from shardlib.errors import ScheduleError
from shardlib.schedules import Action, Kind


def windows(ranks, microbatches, width):
    """A list of actions for each rank: some forwards, then as many backwards, and so on."""
    starts = range(0, microbatches, width)
    order = [(kind, start + i) for start in starts for kind in (Kind.F, Kind.B) for i in range(width)]
    return [[Action(rank, kind, number) for kind, number in order] for rank in range(ranks)]


TX = sl.optim.adamw(1e-3, eps=1e-5, weight_decay=0.01)


def hidden(params, x, batch):
    return torch.tanh((batch if x is None else x) @ params["w"])


def last(params, x, batch):
    return (x @ params["w"]).square().mean()


LOSS = sl.sequential([hidden, hidden, hidden, last])


def model():
    generator = torch.Generator().manual_seed(0)
    params = [{"w": torch.randn(6, 6, generator=generator, dtype=torch.float64)} for _ in range(4)]
    return params, [torch.randn(16, 6, generator=generator, dtype=torch.float64) for _ in range(4)]


def transform(stage):
    return sl.chain(sl.pipeline(windows(2, 4, 2), microbatches=4), sl.zero(stage))


def train(mesh):
    """At every stage: losses, what the last step sent, and parameters."""
    sent, found = count_payload(mesh), []
    for stage in range(4):
        params, batches = model()
        state, step = sl.make_train_step(LOSS, sl.shard(params, mesh, transform(stage)), TX)
        losses = []
        for batch in batches:
            sent()
            state, metrics = step(state, batch.chunk(mesh.shape["data"])[mesh.coords["data"]])
            losses.append(metrics["loss"].item())
        found.append((losses, sent(), sl.unshard(state.params)))
    return found


@pytest.mark.parametrize(("run", "data"), [(sl.simulate, 2), (sl.launch, 1)])
def test_it_trains_like_one_device_and_sends_what_the_plan_says(run, data):
    (params, batches), mesh = model(), sl.abstract_mesh(data=data, pipe=2)
    expected, _, final = one_device.train(LOSS, params, batches)
    for stage, ranks in enumerate(zip(*run(train, mesh=mesh.shape))):
        about = {"loss_fn": LOSS, "optimizer": TX, "batch": batches[0].chunk(data)[0]}
        plan = sl.make_plan(params, mesh, transform(stage), **about)
        assert "pipeline('custom', microbatches=4, axis='pipe')" in str(plan)
        for losses, _, trained in ranks:
            assert losses == pytest.approx(expected, rel=1e-10)
            assert_close(trained, final, 1e-10)
        for axis in ("pipe", "data")[:data]:  # a plan tells what the rank that sends most sends
            assert max(sent[axis] for _, sent, _ in ranks) == plan.payload()[axis] > 0


def test_what_cannot_run_is_refused_by_name():
    wrong = [order[::-1] for order in windows(2, 4, 2)]
    with pytest.raises(ScheduleError, match="custom"):
        sl.make_plan(model()[0], sl.abstract_mesh(pipe=2), sl.pipeline(wrong, microbatches=4))
