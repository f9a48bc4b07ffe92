"""Pipelines: every schedule, mesh and ZeRO stage trains like one device."""

import functools
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import training
from helpers.measure import count_payload, stored_bytes
from helpers.models import ROWS, TINY, share, tiny_gpt, token_batches
from helpers.profile import NIGHTLY
from helpers.trees import assert_close, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import one_device

import shardlib as sl
from shardlib import schedules
from shardlib.errors import BatchError, IllegalComposition, LossError, RankMismatch, ScheduleError, TreeError
from shardlib.execute.executor import Executor
from shardlib.models import gpt
from shardlib.tree import leaves_of, tree_map

STEPS, MAX_NORM = 3 if NIGHTLY else 2, 0.3
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
CSV = "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1I2,1F3,1B3,1W2\n"  # one backward split, the others whole
STUCK = "0F0,0B0,0F1,0B1\n1F1,1F0,1B1,1B0"


def blocks(dtype=torch.float64, layers=6, **changes):
    """``(loss_fn, params)``: a GPT as a list of blocks."""
    _, params = tiny_gpt(dtype, layers=layers, **changes)
    return gpt.make_sequential(replace(TINY, dtype=dtype, layers=layers, **changes)), gpt.to_blocks(params)


@functools.cache
def expected(dtype, steps, max_norm=MAX_NORM, **changes):
    return one_device.train(*blocks(dtype, **changes), token_batches(steps), max_norm=max_norm)


def check(mesh, *transforms, dtype=torch.float64, steps=STEPS, tolerance=None, **changes):
    got = training.simulate(
        mesh, *blocks(dtype, **changes), token_batches(steps), sl.chain(*transforms), training.optimizer(MAX_NORM)
    )
    compare(got, expected(dtype, steps, **changes), tolerance or TOLERANCE[dtype])


def compare(got, wanted, tolerance):
    assert got[0] == pytest.approx(wanted[0], rel=tolerance, abs=0)
    assert got[1] == pytest.approx(wanted[1], rel=tolerance * 10, abs=0)
    assert_close(got[2], wanted[2], tolerance)


# --- schedules, meshes, stages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", schedules.NAMES)
def test_every_schedule_and_stage(schedule, stage):
    check({"data": 2, "pipe": 3}, sl.zero(stage), sl.pipeline(schedule, 4))


@pytest.mark.parametrize(
    ("schedule", "microbatches"), [("1f1b", 2), ("gpipe", 1), ("zb-h1", 3), ("zb-v", 8), ("DualPipeV", 8)]
)
@pytest.mark.parametrize("stage", [0, 3])
def test_four_stages_with_fewer_micro_batches_and_with_more(schedule, microbatches, stage):
    check({"data": 1, "pipe": 4}, sl.zero(stage), sl.pipeline(schedule, microbatches))


@settings(max_examples=25)
@given(st.data())
def test_any_legal_chain(data):
    """Meshes, schedules and what goes with them, drawn together and in any order."""
    pipe = data.draw(st.sampled_from([1, 2, 3, 4]))
    mesh = dict(data.draw(st.permutations([("pipe", pipe), ("data", data.draw(st.sampled_from([1, 2])))])))
    stage = data.draw(st.integers(0, 3))
    schedule = data.draw(st.sampled_from(schedules.NAMES))
    microbatches = data.draw(st.sampled_from([1, 2, 3, 4, 6]))
    sync = data.draw(st.sampled_from([None, "last"] + ["each"] * (stage >= 2)))
    partition = data.draw(st.sampled_from(["count", "parameters"]))
    transforms = [
        sl.zero(stage, prefetch=data.draw(st.booleans())),
        sl.pipeline(schedule, microbatches, partition=partition, sync=sync),
    ]
    if data.draw(st.booleans()):
        transforms.append(sl.remat(data.draw(st.sampled_from(["full", "dots"]))))
    check(mesh, *data.draw(st.permutations(transforms)), steps=2, tie=data.draw(st.booleans()))


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_twenty_steps(schedule, stage):
    dtype = torch.float32
    check({"data": 2, "pipe": 2}, sl.zero(stage), sl.pipeline(schedule, 4), dtype=dtype, steps=20, layers=2)


def test_a_users_table_with_both_kinds_of_backward():
    for stage in (1, 3):
        check({"data": 2, "pipe": 2}, sl.zero(stage), sl.pipeline(CSV, 4))


def test_a_single_rank_and_a_users_lists():
    check({"data": 1, "pipe": 1}, sl.zero(3), sl.pipeline("interleaved-1f1b", 4, chunks=3))
    check({"data": 1, "pipe": 3}, sl.zero(1), sl.pipeline(schedules.gpipe(3, 2).orders, 2))


@pytest.mark.parametrize("sync", [None, "each", "last"])
@pytest.mark.parametrize("stage", [2, 3])
def test_reduced_at_each_micro_batch_or_at_the_last(stage, sync):
    check({"data": 2, "pipe": 2}, sl.zero(stage), sl.pipeline("1f1b", 4, sync=sync))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_hybrid(stage):
    zero = sl.zero(stage, axis="local", replicate="node")
    check({"node": 2, "pipe": 2, "local": 2}, zero, sl.pipeline("1f1b", 2))


@pytest.mark.parametrize("partition", ["parameters", "count", [5, 1, 1, 1, 1, 1, 1, 9], re.compile("QKV", re.I)])
def test_partitions(partition):
    check({"data": 1, "pipe": 3}, sl.zero(1), sl.pipeline("1f1b", 4, partition=partition))


@pytest.mark.pairwise
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_with_tensor_slicing(schedule, stage, tie):
    changes = {"width": 8, "vocab": 30, "tie": tie, "layers": 4}
    rules = gpt.slicing_rules(replace(TINY, **changes), blocks=True)
    if tie:
        del rules["5/weight"]  # the rule of "0/tokens" speaks for it
    check(
        {"data": 2, "pipe": 2, "model": 2},
        sl.zero(stage), sl.tensor_slicing(rules), sl.pipeline(schedule, 2),
        **changes,
    )  # fmt: skip


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-zb", "zb-v"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_tied_embedding_stays_one_on_all_its_stages(schedule, stage):
    check({"data": 2, "pipe": 2}, sl.zero(stage), sl.pipeline(schedule, 4), tie=True)


def test_copies_of_a_tied_leaf_are_equal_to_the_last_bit():
    loss_fn, params = blocks(torch.float32, tie=True)

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.pipeline("1f1b", 4))
        state, step = sl.make_train_step(loss_fn, sharded, training.optimizer())
        for batch in token_batches(3):
            state, _ = step(state, batch)
        return state.params[0 if mesh.rank == 0 else 7]["tokens" if mesh.rank == 0 else "weight"]

    first, *_, last = sl.simulate(run, mesh={"pipe": 4})
    assert_same(first, last)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("schedule", "policy"), [("1f1b", "full"), ("1f1b", "dots"), ("zb-h1", "full"), ("zb-v", "dots")]
)
def test_remat(schedule, policy, stage):
    check({"data": 2, "pipe": 2}, sl.zero(stage), sl.remat(policy), sl.pipeline(schedule, 4))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("frozen", ["first", "last", "middle"])
def test_a_whole_frozen_stage(frozen, stage):
    loss_fn, params = blocks(layers=4)  # six blocks in three stages
    number = {"first": 0, "middle": 1, "last": 2}[frozen]
    globs = [f"{block}/*" for block in range(2 * number, 2 * number + 2)]
    transform = sl.chain(sl.zero(stage), sl.freeze(globs), sl.pipeline("1f1b", 4, partition="count"))
    got = training.simulate(
        {"pipe": 3, "data": 2}, loss_fn, params, token_batches(3), transform, training.optimizer(MAX_NORM)
    )
    paths = sl.make_plan(params, sl.abstract_mesh(data=1)).shape.paths
    left_out = {tuple(int(k) if k.isdigit() else k for k in p.split("/")) for p in paths if int(p[0]) // 2 == number}
    compare(got, one_device.train(loss_fn, params, token_batches(3), max_norm=MAX_NORM, frozen=left_out), 1e-10)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_precision_is_that_of_accumulation(compute, stage):
    """16-bit training is compared with the same micro-batches without a pipeline: the same roundings."""
    loss_fn, params = blocks(torch.float32)
    mixed = sl.chain(sl.zero(stage), sl.precision(compute))
    runs = [
        training.simulate(mesh, loss_fn, params, token_batches(3), sl.chain(mixed, how), training.optimizer(MAX_NORM))
        for mesh, how in (
            ({"data": 2}, sl.accumulate(4)),
            ({"data": 2, "pipe": 2}, sl.pipeline("1f1b", 4)),
        )
    ]
    compare(runs[1], runs[0], 1e-6)


# --- batches, losses, randomness ----------------------------------------------------------------------------------


def weighted(loss_fn, aux=False):
    """The same loss as a `Mean` over tokens, and what else a loss may hand out."""
    *first, head = loss_fn.blocks

    def last(params, x, batch):
        loss, count = head(params, x, batch), batch["targets"].numel()
        mean = sl.Mean(loss * count, count)
        return (mean, {"mean": mean, "rows": x.shape[0], "x": x.detach()}) if aux else mean

    return sl.sequential([*first, last])


@pytest.mark.parametrize("microbatches", [5, 7])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_uneven_micro_batches_of_a_mean(schedule, microbatches):
    loss_fn, params = blocks()
    transform = sl.chain(sl.zero(2), sl.pipeline(schedule, microbatches))
    got = training.simulate(
        {"data": 2, "pipe": 2}, weighted(loss_fn), params, token_batches(3), transform, training.optimizer(MAX_NORM)
    )
    compare(got, expected(torch.float64, 3), 1e-10)


def test_metrics_and_aux_are_the_same_on_every_rank():
    loss_fn, params = blocks(layers=2)
    loss_fn = weighted(loss_fn, aux=True)

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.chain(sl.zero(1), sl.pipeline("1f1b", 2)))
        state, step = sl.make_train_step(loss_fn, sharded, training.optimizer(), donate=False)
        index = mesh.coords["data"]
        _, metrics = step(state, share(token_batches(1)[0], index, 2))
        (_, aux), _ = sl.value_and_grad(loss_fn)(sharded, share(token_batches(1)[0], index, 2))
        assert_same(aux, metrics["aux"])
        return metrics

    result = sl.simulate(run, mesh={"data": 2, "pipe": 2})
    for metrics in result:
        assert metrics["finite"] and metrics["loss"] == result[0]["loss"] and metrics["aux"]["rows"] == ROWS // 4
        assert torch.equal(metrics["aux"]["mean"], result[0]["aux"]["mean"])
        torch.testing.assert_close(metrics["aux"]["mean"], metrics["loss"])  # that of all micro-batches
    assert_same(result[0]["aux"], result[1]["aux"])  # two stages that see one batch


@pytest.mark.parametrize("microbatches", [4, 5])
@pytest.mark.parametrize("extra", [[], [sl.remat()]])
def test_dropout_draws_what_one_device_draws(microbatches, extra):
    loss_fn, params = blocks(dropout=0.3, layers=2)
    key = sl.Key(7)
    step = iter(range(3))

    def on_one_device(params, batch):
        mean = weighted(loss_fn)(params, batch, key.fold_in(next(step)))
        return mean.total / mean.weight

    wanted = one_device.train(on_one_device, params, token_batches(3), max_norm=MAX_NORM)
    got = training.simulate(
        {"data": 2, "pipe": 2}, weighted(loss_fn), params, token_batches(3),
        sl.chain(sl.zero(3), sl.pipeline("1f1b", microbatches), *extra), training.optimizer(MAX_NORM), rng=key,
    )  # fmt: skip
    compare(got, wanted, 1e-10)


def rich_blocks(stages=4):
    """A skip from the first block to the last, an auxiliary loss, integers, a scalar, a string; and shapes that change."""
    generator = torch.Generator().manual_seed(0)
    params = [{"w": torch.randn(5, 5, generator=generator, dtype=torch.float64)} for _ in range(stages)]

    def first(p, _, batch):
        short = batch["x"][:, : int(batch["length"].max())]
        x = short @ p["w"]
        return {"x": x, "skip": x, "aux": x.square().mean(), "ids": batch["ids"], "text": "first", "n": 0, "none": None}

    def middle(p, carry, batch):
        x = torch.tanh(carry["x"] @ p["w"])
        assert (
            carry["text"] == "first" and carry["ids"].dtype == torch.int64 and torch.equal(carry["ids"], batch["ids"])
        )
        return carry | {"x": x, "aux": carry["aux"] + x.abs().mean(), "n": carry["n"] + 1}

    def last(p, carry, batch):
        assert carry["n"] == stages - 2
        y = (carry["x"] + carry["skip"]) @ p["w"]
        weight = y.new_tensor(float(y.shape[0]))
        return sl.Mean((y.square().mean() + 0.1 * carry["aux"]) * weight, weight)

    return sl.sequential([first, *[middle] * (stages - 2), last]), params


def rich_batches(steps, parts):
    """The longest row differs from part to part, and from step to step."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.randn(4 * parts, 9, 5, generator=generator, dtype=torch.float64)
        length = torch.arange(parts).repeat_interleave(4) * 2 + 1 + step % 2
        yield {"x": x, "length": length, "ids": torch.arange(4 * parts)}


@pytest.mark.parametrize("pipe", [2, 4])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_carries_of_any_shape(schedule, stage, pipe):
    loss_fn, params = rich_blocks()
    batches = list(rich_batches(3, 4))

    def by_parts(params, batch):
        parts = [loss_fn(params, share(batch, index, 4)) for index in range(4)]
        return sum(part.total for part in parts) / sum(part.weight for part in parts)

    wanted = one_device.train(by_parts, params, batches, max_norm=MAX_NORM)
    transform = sl.chain(sl.zero(stage), sl.pipeline(schedule, 4))
    got = training.simulate(
        {"data": 1, "pipe": pipe}, loss_fn, params, batches, transform, training.optimizer(MAX_NORM)
    )
    compare(got, wanted, 1e-10)


def test_a_parameter_may_travel_in_the_carry():
    """Its gradient comes back from the stage that used it."""
    params = [{"w": torch.randn(5, 5, dtype=torch.float64)} for _ in range(3)]

    def first(p, _, batch):
        return batch @ p["w"], p["w"]

    def middle(p, carry, batch):
        return torch.tanh(carry[0] @ p["w"]), carry[1]

    def last(p, carry, batch):
        return (carry[0] @ carry[1].T @ p["w"]).square().mean()

    loss_fn = sl.sequential([first, middle, last])
    batches = [torch.randn(8, 5, dtype=torch.float64) for _ in range(3)]
    wanted = one_device.train(loss_fn, params, batches, max_norm=MAX_NORM)
    for stage in (0, 3):
        transform = sl.chain(sl.zero(stage), sl.pipeline("1f1b", 2))
        got = training.simulate(
            {"data": 2, "pipe": 3}, loss_fn, params, batches, transform, training.optimizer(MAX_NORM)
        )
        compare(got, wanted, 1e-10)


def test_a_last_block_without_parameters():
    loss_fn, params = blocks(layers=2)
    *first, _ = loss_fn.blocks

    def scores(p, x, batch):
        return F.linear(F.layer_norm(x, x.shape[-1:], p["norm"]["weight"], p["norm"]["bias"]), p["weight"])

    longer = sl.sequential([*first, scores, lambda p, x, b: F.cross_entropy(x.flatten(0, 1), b["targets"].flatten())])
    got = training.simulate(
        {"pipe": 2}, longer, [*params, {}], token_batches(3), sl.pipeline("1f1b", 2), training.optimizer(MAX_NORM)
    )
    wanted = expected(torch.float64, 3, layers=2)
    compare((*got[:2], got[2][:-1]), wanted, 1e-10)


# --- state, evaluation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_evaluation_on_every_rank(schedule, stage):
    loss_fn, params = blocks(layers=4)
    (batch,) = token_batches(1)

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.chain(sl.zero(stage), sl.pipeline(schedule, 2)))
        step = sl.make_eval_step(weighted(loss_fn, aux=True), sharded)
        mine = share(batch, mesh.coords["data"], 2)
        step(sharded, mine)
        return step(sharded, mine)

    wanted = loss_fn(params, batch)
    result = sl.simulate(run, mesh={"data": 2, "pipe": 2})
    for mean, aux in result:
        torch.testing.assert_close(mean, wanted)
        torch.testing.assert_close(aux["mean"], wanted)
    assert_same(result[0], result[1])


def test_an_evaluations_mean_weighs_each_rank_by_its_own():
    """Rows count or not; of those that do one rank has more than the other."""
    loss_fn, params = blocks(layers=2)
    *first, head = loss_fn.blocks

    def counting(p, x, batch):
        rows = [head(p, x[i : i + 1], {"targets": batch["targets"][i : i + 1]}) for i in range(len(x))]
        counts = batch["targets"][:, 0] < TINY.vocab // 2
        return {"mean": sl.Mean((torch.stack(rows) * counts).sum(), counts.sum()), "rows": counts.sum()}

    (batch,) = token_batches(1)

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.chain(sl.zero(1), sl.pipeline("1f1b", 2)))
        step = sl.make_eval_step(sl.sequential([*first, counting]), sharded)
        return step(sharded, share(batch, mesh.coords["data"], 2))

    result = sl.simulate(run, mesh={"data": 2, "pipe": 2})
    assert result[0]["rows"] != result[2]["rows"]
    wanted = sl.sequential([*first, counting])(params, batch)["mean"]
    for found in result:
        torch.testing.assert_close(found["mean"], wanted.total / wanted.weight)


def test_unshard_gives_back_what_was_sharded_and_trees_hold_a_stages_leaves():
    _, params = blocks(tie=True)

    def run(mesh):
        sharded = sl.shard(lambda: params, mesh, sl.chain(sl.zero(3), sl.pipeline("zb-v", 2)))
        mapped = tree_map(lambda leaf: leaf * 2, sharded)
        here = [i for i, block in enumerate(sharded) if leaves_of(block)]
        return sl.unshard(sharded), sl.unshard(mapped), here

    result = sl.simulate(run, mesh={"data": 2, "pipe": 2})
    for whole, doubled, _ in result:
        assert_same(whole, params)
        assert whole[0]["tokens"] is whole[-1]["weight"]
        assert_same(doubled, tree_map(lambda leaf: leaf * 2, params))
    outer, inner = result[0][2], result[1][2]  # the V: the first and the last stage are on one rank
    assert {0, 7} < set(outer) and sorted(outer + inner) == list(range(8))


@pytest.mark.parametrize("tie", [False, True])
def test_a_checkpoint_is_restored_on_other_stages(tmp_path, tie):
    loss_fn, params = blocks(tie=tie)
    batches = token_batches(4)

    def start(mesh, schedule, stage):
        transform = sl.chain(sl.zero(stage), sl.pipeline(schedule, 2))
        return sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), training.optimizer(MAX_NORM))

    def go_on(mesh, state, step, batches):
        for batch in batches:
            state, _ = step(state, share(batch, mesh.coords["data"], mesh.shape["data"]))
        return state

    def first(mesh):
        state, step = start(mesh, "zb-v", 3)
        sl.checkpoint.save(tmp_path, go_on(mesh, state, step, batches[:2]))

    def second(mesh):
        state, step = start(mesh, "1f1b", 1)
        state = sl.checkpoint.restore(sl.checkpoint.latest(tmp_path), state)
        return sl.unshard(go_on(mesh, state, step, batches[2:]).params)

    sl.simulate(first, mesh={"data": 2, "pipe": 2})
    wanted = expected(torch.float64, 4, tie=tie)[2]
    for whole in sl.simulate(second, mesh={"pipe": 3, "data": 1}):
        assert_close(whole, wanted, 1e-10)


def test_a_gradient_that_is_not_finite_is_named_on_every_rank():
    loss_fn, params = blocks(layers=2)
    params[2]["mlp"]["up"]["weight"][0, 0] = float("nan")

    def run(mesh):
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, sl.pipeline("1f1b", 2)), training.optimizer())
        with pytest.raises(sl.errors.ShardlibError, match="gradient of 0/positions is not finite"):
            step(state, token_batches(1)[0])

    sl.simulate(run, mesh={"pipe": 2})


# --- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "pipe"), [("gpipe", 3), ("1f1b", 3), ("interleaved-1f1b", 2), ("zb-v", 2)])
def test_payload_on_the_pipe_axis_is_two_activations_per_boundary_and_micro_batch(schedule, pipe):
    dtype, m = torch.float32, 4
    loss_fn, params = blocks(dtype, layers=6)

    def run(mesh):
        state, step = sl.make_train_step(
            loss_fn, sl.shard(params, mesh, sl.pipeline(schedule, m)), training.optimizer()
        )
        sent = count_payload(mesh)
        mesh.traffic.reset()
        step(state, token_batches(1)[0])
        return sent()["pipe"], mesh.traffic.payload["pipe"]

    result = sl.simulate(run, mesh={"pipe": pipe})
    assert all(outside == inside for outside, inside in result)
    plan = schedules.make_schedule(schedule, pipe, m)
    boundaries = sum(a != b for a, b in zip(plan.rank_of, plan.rank_of[1:]))
    activation = ROWS // m * TINY.sequence * TINY.width * dtype.itemsize
    assert sum(outside for outside, _ in result) == boundaries * m * 2 * activation


@pytest.mark.parametrize(
    ("stage", "schedule", "tie", "sync"),
    [
        (0, "1f1b", True, None), (1, "zb-v", True, None), (1, "zb-h1", False, None), (2, "1f1b", False, "last"),
        (2, "zb-h1", True, None), (3, "1f1b", False, None), (3, "zb-h1", False, "last"), (3, "zb-v", True, None),
        (3, "dualpipe-v", True, None),
    ],
)  # fmt: skip
def test_bytes_held_and_sent_are_the_plans(stage, schedule, tie, sync):
    loss_fn, params = blocks(torch.float32, tie=tie)
    transform = sl.chain(sl.zero(stage), sl.pipeline(schedule, 4, sync=sync))
    tx = training.optimizer()
    (batch,) = token_batches(1)
    mesh = {"data": 2, "pipe": 2}
    whole = sl.make_plan(
        params, sl.abstract_mesh(**mesh), transform, optimizer=tx, loss_fn=loss_fn, batch=share(batch, 0, 2)
    )

    def run(mesh):
        mine = share(batch, mesh.coords["data"], 2)
        sharded = sl.shard(params, mesh, transform)
        _, grads = sl.value_and_grad(loss_fn)(sharded, mine)
        state, step = sl.make_train_step(loss_fn, sharded, tx)
        held = {
            "param": stored_bytes(sharded), "grad": stored_bytes(grads),
            "optimizer": stored_bytes(state.opt, counters=True),
        }  # fmt: skip
        state, _ = step(state, mine)
        sent = count_payload(mesh)
        step(state, mine)
        return held, sent()

    result = sl.simulate(run, mesh=mesh)
    for (held, sent), pipe in zip(result, [0, 1, 0, 1]):
        part = whole.at({"pipe": pipe})
        assert sent == part.payload()
        assert held["optimizer"] == part.bytes("optimizer") and held["param"] == part.bytes("param")
        if sync is None and not tie:  # else more is kept until the last micro-batch than comes out
            assert held["grad"] == part.bytes("grad")
    for role in ("param", "optimizer"):
        assert whole.bytes(role) == max(held[role] for held, _ in result)
    assert whole.payload() == {axis: max(sent[axis] for _, sent in result) for axis in ("data", "pipe")}
    assert ("pipe=1" in str(whole) and "as traced" in str(whole)) or stage < 3


@pytest.mark.parametrize("schedule", schedules.NAMES)
def test_messages_are_freed_when_they_are_known_to_have_arrived(schedule):
    """Each is freed at most once, and with 1F1B no rank keeps more than a few, for any number of micro-batches."""
    made = schedules.make_schedule(schedule, 4, 16)
    orders = schedules.lower(made)
    for rank, order in enumerate(orders):
        freed = schedules.acknowledged(made, orders, rank)
        every = [send for sends in freed.values() for send in sends]
        assert len(set(every)) == len(every)
        kept, most = set(), 0
        for action in order:
            if "SEND" in action.kind:
                kept.add(action)
                most = max(most, len(kept))
            assert kept.issuperset(freed.get(action, ())), "a message that was not yet sent"
            kept.difference_update(freed.get(action, ()))
        if schedule == "1f1b":
            assert most <= 10


@pytest.mark.parametrize("schedule", schedules.NAMES)
def test_micro_batches_under_way_are_as_many_as_the_schedule_says(schedule, monkeypatch):
    held, most = Counter(), Counter()
    opened, close = Executor.open, Executor.close

    def count_open(self, *args):
        held[self.mesh.rank] += 1
        self.under_way = True
        most[self.mesh.rank] = max(most[self.mesh.rank], held[self.mesh.rank])
        return opened(self, *args)

    def count_close(self):
        held[self.mesh.rank] -= getattr(self, "under_way", False)
        self.under_way = False
        close(self)

    monkeypatch.setattr(Executor, "open", count_open)
    monkeypatch.setattr(Executor, "close", count_close)
    check({"pipe": 3, "data": 1}, sl.zero(2), sl.pipeline(schedule, 6))
    assert tuple(most[rank] for rank in range(3)) == schedules.peak_in_flight(schedules.make_schedule(schedule, 3, 6))


# --- errors --------------------------------------------------------------------------------------------------------


def plan(transform, params=None, **mesh):
    return sl.make_plan(blocks()[1] if params is None else params, sl.abstract_mesh(**mesh or {"pipe": 2}), transform)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: plan(sl.pipeline(), tiny_gpt()[1]), IllegalComposition, r"blocks/0.*\n?.*(.|\n)*sl.sequential.*to_blocks"),
        (lambda: plan(sl.pipeline(), {0: torch.ones(2), 1: torch.ones(2)}), IllegalComposition, "are a dict.*sequential"),
        (lambda: plan(sl.pipeline(), pipe=9), ScheduleError, "8 blocks cannot make 9 stages"),
        (
            lambda: plan(sl.pipeline(partition="count"), [{"w": torch.ones(2)}, {}, {}, {"w": torch.ones(2)}]),
            ScheduleError, None,
        ),
        (
            lambda: plan(sl.pipeline(partition="count"), [{"w": torch.ones(2)}, {}, {"w": torch.ones(2)}], pipe=3),
            IllegalComposition, r"stage 1 \(blocks 1 to 1\)(.|\n)*fewer stages",
        ),
        (lambda: plan(sl.pipeline(CSV, 3)), ScheduleError, "4 micro-batches, and 3 are wanted"),
        (lambda: plan(sl.pipeline("1f2b", 3)), ScheduleError, "no schedule's name"),
        (lambda: plan(sl.pipeline("1f1b", 2, chunks=2)), ScheduleError, "1 stage per rank"),
        (lambda: plan(sl.pipeline(partition=[1, 2])), IllegalComposition, "2 costs for 8 blocks"),
        (lambda: sl.pipeline(partition="size"), IllegalComposition, "'parameters', 'count', one cost per block"),
        (lambda: sl.pipeline(microbatches=0), IllegalComposition, "at least 1"),
        (lambda: sl.pipeline(sync="never"), IllegalComposition, "'each' or 'last'"),
        (
            lambda: plan(sl.chain(sl.pipeline("1f1b", 2), sl.accumulate(4))), IllegalComposition,
            r"accumulate\(4\) and pipeline.*both claim\n.*the schedule's microbatches: 4 against 2\n",
        ),
        (lambda: plan(sl.pipeline(partition=[1] * 9)), IllegalComposition, "9 costs for 8 blocks; give one per block"),
        (lambda: plan(sl.pipeline(), []), IllegalComposition, "there are no parameters; make the loss sl.sequential"),
        (
            lambda: plan(sl.pipeline(STUCK, 2)), ScheduleError,
            "deadlock: rank 0 waits at 0B0 for 1B0, which rank 1 runs after 1F1; rank 1 waits at 1F1 for 0F1.*rank 0",
        ),
        (
            lambda: plan(sl.chain(sl.pipeline(axis="data"), sl.zero()), data=2), IllegalComposition,
            r"'data': zero\(.*\) divides the batch, and pipeline\(.*\) lays out stages\nGive each an axis of its own",
        ),
        (
            lambda: plan(sl.chain(sl.pipeline(), sl.zero(3, replicate="pipe")), pipe=2, data=2), IllegalComposition,
            r"zero\(.*\) divides the batch, and pipeline\(",
        ),
        (
            lambda: plan(sl.chain(sl.pipeline(), sl.tensor_slicing({"*/qkv": "column"}, axis="pipe"))),
            IllegalComposition, r"tensor_slicing\({'\*/qkv': 'column'}, axis='pipe'\) slices layers, and pipeline\(",
        ),
        (
            lambda: plan(sl.chain(sl.pipeline(), sl.sequence("pipe", "ring"))),
            IllegalComposition, r"sequence\('pipe', kind='ring'\) cuts sequences, and pipeline\(",
        ),
        (
            lambda: sl.make_plan(
                blocks()[1], sl.abstract_mesh(pipe=2), sl.pipeline(), loss_fn=gpt.make_loss(TINY), batch=token_batches(1)[0]
            ),
            IllegalComposition, "'loss' is one function. Use sl.sequential",
        ),
        (lambda: plan(sl.pipeline(axis="stages")), IllegalComposition, "axis 'stages', which"),
        (lambda: plan(sl.chain(sl.pipeline(), sl.pipeline(axis="b")), pipe=2, b=2), IllegalComposition, "both claim"),
        (lambda: plan(sl.chain(sl.pipeline(sync="each"), sl.zero(1)), pipe=2, data=2), IllegalComposition, "sync='each'"),
    ],
)  # fmt: skip
def test_refused_while_planning(make, error, message):
    if message is None:
        make()
        return
    with pytest.raises(error, match=message):
        make()


def train_once(loss_fn, params, batch, microbatches=4, **options):
    def run(mesh):
        sharded = sl.shard(params, mesh, sl.pipeline("1f1b", microbatches))
        state, step = sl.make_train_step(loss_fn, sharded, training.optimizer(), **options)
        step(state, batch)

    sl.simulate(run, mesh={"pipe": 2})


def test_refused_when_bound_to_a_loss():
    loss_fn, params = blocks(layers=2)
    (batch,) = token_batches(1)
    with pytest.raises(IllegalComposition, match=r"Use sl.sequential.*blocks="):
        train_once(lambda params, batch: loss_fn(params, batch), params, batch)
    with pytest.raises(TreeError, match=r"4 blocks and the parameters are 5 trees"):
        train_once(loss_fn, [*params, {}], batch)
    with pytest.raises(IllegalComposition, match="buffers="):
        train_once(loss_fn, params, batch, buffers=[torch.zeros(1)])
    with pytest.raises(TreeError, match="parameter rng and none was given"):
        sl.simulate(
            lambda mesh: sl.value_and_grad(sl.sequential([lambda p, c, b, rng: p.sum()] * 2))(
                sl.shard([torch.ones(2)] * 2, mesh, sl.pipeline()), batch
            ),
            mesh={"pipe": 2},
        )


def test_refused_carries():
    loss_fn, params = blocks(layers=2)
    first, layer, _, head = loss_fn.blocks
    strange = [first, lambda p, x, b: (x, lambda: 0), lambda p, carry, b: layer(p, carry[0], b), head]
    with pytest.raises(LossError, match="what passes between stages cannot be pickled"):
        train_once(sl.sequential(strange), params, token_batches(1)[0])


def test_refused_batches():
    loss_fn, params = blocks(layers=2)
    odd = share(token_batches(1)[0], 0, 7)
    with pytest.raises(BatchError, match=r"7 rows make 4 micro-batches of different sizes.*sl.Mean"):
        train_once(loss_fn, params, odd)
    with pytest.raises(BatchError, match="does not divide into 8"):
        train_once(loss_fn, params, odd, 8)


def step_after_an_uneven_batch(mesh):
    """The loss of a batch that divides, after one that does not was refused."""
    loss_fn, params = blocks(layers=2)
    state, step = sl.make_train_step(
        loss_fn, sl.shard(params, mesh, sl.chain(sl.zero(3), sl.pipeline("1f1b", 4))), training.optimizer()
    )
    (batch,) = token_batches(1)
    with pytest.raises(BatchError, match=r"7 rows make 4 micro-batches"):
        step(state, {name: leaf[:7] for name, leaf in batch.items()})
    return step(state, batch)[1]["loss"].item()


def test_ranks_of_every_stage_refuse_a_batch_at_once(pool):
    """Real ones, that wait for nobody; and the state is as it was."""
    loss_fn, params = blocks(layers=2)
    wanted = loss_fn(params, token_batches(1)[0]).item()
    for loss in pool.run(step_after_an_uneven_batch, mesh={"data": 2, "pipe": 2}):
        assert loss == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("position", [0, 2, 3])
def test_a_rank_that_fails_inside_its_stage_stops_the_others(position):
    loss_fn, params = blocks(layers=2)
    calls = Counter()

    def failing(*args):
        calls[position] += 1
        if calls[position] == 3:
            raise ZeroDivisionError("on purpose")
        return loss_fn.blocks[position](*args)

    broken = sl.sequential([failing if index == position else fn for index, fn in enumerate(loss_fn.blocks)])
    with pytest.raises(ZeroDivisionError):
        train_once(broken, params, token_batches(1)[0])


def test_messages_of_the_wrong_size_and_messages_that_never_come():
    def run(mesh, size):
        group = mesh.group("pipe")
        if mesh.rank == 0:
            group.send(torch.zeros(3), 1, 5).wait()
        else:
            group.recv(torch.zeros(size), 0, 5 if size else 6).wait()

    with pytest.raises(RankMismatch, match=r"recv\(4 × float32\) from rank 0 .*3 × float32 were sent"):
        sl.simulate(run, 4, mesh={"pipe": 2})
    with pytest.raises(RankMismatch, match=r"for ever: rank 1 waits in recv\(0 × float32\) from rank 0"):
        sl.simulate(run, 0, mesh={"pipe": 2})


# --- real processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "schedule", "stage", "tie"),
    [
        ({"pipe": 4}, "1f1b", None, True),
        ({"pipe": 2, "data": 2}, "interleaved-1f1b", 3, False),
        ({"data": 2, "pipe": 2}, "zb-v", 2, True),
        ({"data": 2, "pipe": 2}, "1f1b", 1, False),
    ],
)
def test_on_real_processes(pool, mesh, schedule, stage, tie):
    loss_fn, params = blocks(tie=tie)
    transform = sl.chain(*([] if stage is None else [sl.zero(stage)]), sl.pipeline(schedule, 4))
    result = pool.run(
        training.train, loss_fn, params, token_batches(3), transform, training.optimizer(MAX_NORM), mesh=mesh
    )
    for got in result:
        compare(got, expected(torch.float64, 3, tie=tie), 1e-10)


def test_messages_of_both_directions_where_a_transport_has_no_tags():
    """Each direction then has its own communicator. Runs in fresh processes: see `ProcessGroup._lane`."""

    def both_ways(mesh):
        group = mesh.group("pipe")
        group._gloo = False
        try:
            other = 1 - group.rank
            mine, theirs = torch.full((1 << 18,), float(group.rank)), [torch.empty(1 << 18) for _ in range(2)]
            sent = [group.send(mine + step, other, 0) for step in range(2)]
            came = [group.recv(out, other, 0) for out in theirs]
            for work in (*came, *sent):
                work.wait()
            return [out[0].item() for out in theirs], group._lanes[0] is not group._lanes[1]
        finally:
            group._gloo = True

    assert sl.launch(both_ways, mesh={"pipe": 2}, timeout=120) == [([1.0, 2.0], True), ([0.0, 1.0], True)]
