"""Stages that are alike are traced once, and the traces are those of tracing each."""

import pytest
import torch
from helpers.merging import merging

import shardlib as sl
from shardlib.execute.stages import tracing
from shardlib.execute.stages.runs import EagerRun
from shardlib.models import gpt

CHAINS = {
    "uneven stages": (5, "1f1b", False, [sl.zero(1)]),
    "tied ends": (5, "1f1b", True, [sl.zero(3), sl.remat()]),
    "two stages a rank": (3, "zb-v", False, [sl.zero(2), sl.precision("bf16")]),
    "a block a stage": (10, "1f1b", False, [sl.zero(3), sl.offload(params="host")]),
    "inputs on the host": (4, "interleaved-1f1b", False, [sl.zero(0), sl.remat(store="host", smallest=1)]),
}


@pytest.mark.parametrize(
    ("name", "most"), [*((name, 0) for name in CHAINS), ("tied ends", 1 << 20), ("two stages a rank", 1 << 20)]
)
def test_alike_stages_have_the_traces_of_each(name, most, monkeypatch):
    """Where a stage's blocks are merged into one unit, too."""
    with merging(most):
        check(*CHAINS[name], monkeypatch)


def check(ranks, schedule, tie, transforms, monkeypatch):
    config = gpt.GPTConfig(vocab=64, layers=8, width=32, heads=4, sequence=16, tie=tie)
    rules = gpt.slicing_rules(config, blocks=True)
    tokens = torch.empty(8, 16, dtype=torch.int64, device="meta")
    opened = []
    real = EagerRun.enter
    monkeypatch.setattr(EagerRun, "enter", lambda run, carry: opened.append(1) or real(run, carry))

    def plan():
        opened.clear()
        return sl.make_plan(
            gpt.to_blocks(gpt.init(config, device="meta")),
            sl.abstract_mesh(data=2, pipe=ranks, model=2),
            sl.chain(*transforms, sl.tensor_slicing(rules), sl.pipeline(schedule, 4, partition="count")),
            loss_fn=gpt.make_sequential(config),
            batch={"tokens": tokens, "targets": tokens},
        )

    short, traced = plan(), len(opened)
    monkeypatch.setattr(tracing, "kinds_of", lambda plan, blocks: list(range(len(plan.stages.spans))))
    assert plan().traces == short.traces and traced < len(opened) == len(short.traces)


def test_functions_that_differ_are_traced_each():
    """Equal parameters do not make stages alike, nor do equal functions whose carries differ."""

    def fewer(params, carry, x):
        return (x if carry is None else carry)[:, : params["w"].shape[1]] * params["w"].sum()

    def square(params, carry, x):
        return (carry * params["w"].sum()).square()

    def last(params, carry, x):
        return (carry * params["w"].sum()).sum()

    params = [{"w": torch.ones(2, 8)} for _ in range(5)]
    loss_fn = sl.sequential([fewer, fewer, square, fewer, last])
    mesh, parallel = sl.abstract_mesh(data=1, pipe=5), sl.pipeline(microbatches=2, partition="count")
    plan = sl.make_plan(params, mesh, sl.chain(sl.zero(0), parallel), loss_fn=loss_fn, batch=torch.ones(4, 16))
    assert [trace.forward for trace in plan.traces[:-1]] == [64, 64, 64, 64]
    assert plan.traces[2].launches != plan.traces[1].launches == plan.traces[3].launches
