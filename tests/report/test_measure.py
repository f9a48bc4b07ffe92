"""Measured costs of blocks, on blocks that take a known time."""

import time

import pytest
import torch

import shardlib as sl
from shardlib.models import gpt

SHORT, LONG = 0.004, 0.04


def sleeping(seconds):
    def block(params, x, batch):
        time.sleep(seconds)
        return (batch if x is None else x) @ params["w"]

    return block


def total(params, x, batch):
    return (x @ params["w"]).sum()


def test_small_operators_take_the_same_time_together():
    """Of a chain that the measure does not have."""
    rate = sl.report.measure_launches()
    x, count = torch.ones(4), 2000
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count):
            x = x * 1.0
        seconds.append(time.perf_counter() - start)
    assert 0.05 * rate < count / min(seconds) < 50 * rate


def blocks(durations):
    loss_fn = sl.sequential([*(sleeping(seconds) for seconds in durations), total])
    return loss_fn, [{"w": torch.eye(4)} for _ in range(len(durations) + 1)]


def test_stages_are_cut_by_measured_costs():
    loss_fn, params = blocks([LONG, SHORT, SHORT, SHORT, LONG, SHORT])
    costs = sl.report.measure_blocks(loss_fn, params, torch.ones(2, 4))
    assert all(cost >= LONG for cost in (costs[0], costs[4])) and all(SHORT <= costs[i] < LONG for i in (1, 2, 3, 5))
    plan = sl.make_plan(params, sl.abstract_mesh(pipe=2), sl.pipeline(microbatches=2, partition=costs))
    assert 1 <= plan.stages.spans[0][1] <= 4  # a long one in each stage
    alone = sl.pipeline(microbatches=2, partition=sl.report.measure_blocks(*blocks([SHORT, LONG]), torch.ones(2, 4)))
    assert sl.make_plan(params[:3], sl.abstract_mesh(pipe=2), alone).stages.spans == ((0, 1), (1, 3))


def test_a_blocks_backward_counts():
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(LONG)
            return grad

    loss_fn = sl.sequential([lambda p, x, batch: Slow.apply(batch @ p["w"]), total])
    costs = sl.report.measure_blocks(loss_fn, [{"w": torch.eye(4)}] * 2, torch.ones(2, 4), rounds=1)
    assert costs[0] >= LONG > costs[1]


def test_a_model_on_the_meta_device_with_a_key():
    config = gpt.GPTConfig(layers=2, width=16, heads=4, sequence=8, vocab=32, dropout=0.1)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    costs = sl.report.measure_blocks(
        gpt.make_sequential(config),
        gpt.to_blocks(gpt.init(config, device="meta")),
        {"tokens": tokens, "targets": tokens},
        rng=sl.Key(0),
        rounds=1,
    )
    assert len(costs) == 4 and all(cost > 0 for cost in costs)


def test_all_ranks_get_the_mean():
    def run(mesh):
        loss_fn, params = blocks([LONG if mesh.rank else SHORT])
        return sl.report.measure_blocks(loss_fn, params, torch.ones(2, 4), rounds=1, mesh=mesh)

    first, second = sl.simulate(run, mesh={"data": 2})
    assert first == second and first[0] >= (LONG + SHORT) / 2


@pytest.mark.parametrize(("trees", "rounds"), [(1, 1), (2, 0)])
def test_what_does_not_fit_is_refused(trees, rounds):
    loss_fn, params = blocks([SHORT])
    with pytest.raises(ValueError, match=r"2 blocks, .* at least one round"):
        sl.report.measure_blocks(loss_fn, params[:trees], torch.ones(2, 4), rounds=rounds)
