"""The program of a plan is what ranks do: over every axis they make its exchanges, in its order, with its bytes."""

import pytest
import torch
from helpers.measure import CountingGroup
from helpers.models import mlp, regression_batch, share, tiny_gpt, token_batches

import shardlib as sl
from shardlib.models import gpt
from shardlib.plan.ops import Send

ADAM = sl.optim.adamw(1e-3)
CONFIG = gpt.GPTConfig(vocab=16, layers=4, width=16, heads=2, sequence=8)


class InOrder(CountingGroup):
    """Notes the bytes of each exchange."""

    def __init__(self, group, noted):
        self._noted, self._total = noted, 0
        super().__init__(group)

    @property
    def sent(self):
        return self._total

    @sent.setter
    def sent(self, total):
        if total > self._total:
            self._noted.append(total - self._total)
        self._total = total


def in_order(program):
    """Axis -> the bytes of the program's exchanges, in order."""
    passes = [op for one in program.actions.values() for op in (*program.ops(one), *program.handed(one))]
    found = {}
    for op in (*passes, *program.ending, *program.updating):
        if isinstance(op, Send) and op.bytes and not op.moves:
            found.setdefault(op.link, []).append(op.bytes)
    return found


def model(name):
    if name == "mlp":
        loss_fn, params = mlp([8, 256, 256, 64, 8], torch.float32)
        return loss_fn, params, regression_batch(16, 8, 8, torch.float32)
    if name == "gpt":
        return *tiny_gpt(), token_batches(1, rows=16)[0]
    tokens = torch.randint(16, (16, 9))
    return (
        gpt.make_sequential(CONFIG),
        gpt.to_blocks(gpt.init(CONFIG)),
        {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]},
    )


@pytest.mark.parametrize(
    ("name", "mesh", "chain"),
    [
        *(("mlp", {"data": 4}, sl.zero(stage)) for stage in range(4)),
        *(("gpt", {"data": 2}, sl.chain(sl.zero(stage), sl.accumulate(2))) for stage in range(4)),
        ("gpt", {"data": 2}, sl.chain(sl.zero(3), sl.accumulate(2, sync="last"))),
        ("gpt", {"data": 2}, sl.chain(sl.zero(3), sl.remat())),
        ("mlp", {"data": 4}, sl.zero(3, keep="forward")),
        ("mlp", {"data": 4}, sl.zero(3, prefetch=False)),
        ("mlp", {"data": 2}, sl.chain(sl.zero(3), sl.quantize(weights="int8"))),
        ("mlp", {"node": 2, "local": 2}, sl.zero(3, axis="local", replicate="node")),
        ("mlp", {"node": 2, "local": 2}, sl.zero(2, axis="local", replicate="node")),
        *(
            ("blocks", {"data": 2, "pipe": 2}, sl.chain(sl.zero(stage), sl.pipeline(schedule, microbatches=4)))
            for stage, schedule in ((1, "1f1b"), (3, "1f1b"), (2, "zb-h1"), (0, "interleaved-1f1b"))
        ),
    ],
)
def test_ranks_make_the_exchanges_of_the_program(name, mesh, chain):
    loss_fn, params, batch = model(name)

    def run(mesh):
        ranks = mesh.shape.get("data", mesh.size)
        mine = share(batch, mesh.coords.get("data", mesh.rank), ranks)
        plan = sl.make_plan(params, mesh, chain, loss_fn=loss_fn, batch=mine, optimizer=ADAM)
        noted = {axis: [] for axis, size in mesh.shape.items() if size > 1}
        for axis, exchanges in noted.items():
            mesh._groups[axis] = InOrder(mesh.group(axis), exchanges)
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, chain), ADAM)
        for _ in range(3):  # the first ones find out which units are used
            for exchanges in noted.values():
                exchanges.clear()
            state, _ = step(state, mine)
        return noted, in_order(plan.at(mesh.coords).program())

    for noted, said in sl.simulate(run, mesh=mesh):
        assert {axis: exchanges for axis, exchanges in noted.items() if exchanges} == said


def test_sums_over_a_second_axis_run_under_backward():
    """Each starts once the next unit's sum over the first axis has."""
    loss_fn, params, batch = model("mlp")

    def run(mesh):
        chain, noted = sl.zero(2, axis="local", replicate="node"), []
        for axis in mesh.shape:
            exchanges = InOrder(mesh.group(axis), Noted(noted, axis))
            mesh._groups[axis] = exchanges
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, chain), ADAM)
        for _ in range(2):
            noted.clear()
            state, _ = step(state, share(batch, mesh.rank, mesh.size))
        return noted

    for noted in sl.simulate(run, mesh={"node": 2, "local": 2}):
        units = noted.count("node")
        assert units > 2
        summed = ["local", *["local", "node"] * (units - 1), "node"]
        assert noted[: 2 * units] == summed


class Noted(list):
    """Notes an axis in place of what is appended."""

    def __init__(self, noted, axis):
        super().__init__()
        self._noted, self._axis = noted, axis

    def append(self, _):
        self._noted.append(self._axis)


def test_a_program_prints_itself():
    params = [{"w": torch.empty(4096, device="meta")} for _ in range(2)]
    plan = sl.make_plan(params, sl.abstract_mesh(data=2), sl.chain(sl.zero(3), sl.accumulate(2)))
    text = str(plan.at({"data": 0}).program())
    forward, *_ = text.split("backward")
    lines = [line.strip() for line in forward.splitlines()]
    assert lines[0] == "forward, 2 times:"
    assert [line.split(":")[0] for line in lines[1:5]] == [
        "send parameters of 0",
        "send parameters of 1",
        "compute 0",
        "compute 1",
    ]
    assert "backward of the last micro-batch:" in text and "send gradients of 0: data, 8.192 kB, float32" in text
