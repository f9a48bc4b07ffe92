"""Metrics as sums and weights: they add up over ranks, micro-batches and batches."""

import pytest
import torch
import torch.nn.functional as F
from helpers.models import TINY, mlp, regression_batch, share, tiny_gpt, token_batches

import shardlib as sl
from shardlib.errors import BatchError, LossError, RankMismatch
from shardlib.models import gpt

FIT, PARAMS = mlp([6, 9, 4])
STAGES = pytest.mark.parametrize("stage", [0, 3])


def scores(params, batch):
    """Rows of which some count, and whether they are near: two metrics with weights of their own."""
    x, y = batch
    first, last = params["layers"]
    x = F.linear(torch.tanh(F.linear(x, first["weight"], first["bias"])), last["weight"], last["bias"])
    rows, counts = (x - y).square().mean(1), y[:, 0] > 0
    return {"loss": sl.Mean((rows * counts).sum(), counts.sum()), "near": sl.Mean((rows < 1).sum(), len(y))}


def by_hand(batches, params=PARAMS):
    """The same on one device, from plain sums over every row of every batch."""
    x, y = (torch.cat(parts) for parts in zip(*batches))
    found = scores(params, (x, y))
    return {name: (total / weight).item() for name, (total, weight) in found.items()}


def as_numbers(metrics):
    return {name: value.item() for name, value in metrics.items()}


@STAGES
def test_over_batches_and_ranks(stage):
    batches = [regression_batch(8, 6, 4, seed=seed) for seed in range(3)]

    def run(mesh):
        sharded = sl.shard(PARAMS, mesh, stage=stage)
        evaluate = sl.make_eval_step(scores, sharded)
        mine = [tuple(t[:3] if mesh.rank == 0 else t[3:] for t in batch) for batch in batches]
        return as_numbers(evaluate.over(sharded, mine)), as_numbers(evaluate(sharded, mine[0]))

    for whole, first in sl.simulate(run, mesh={"data": 2}):
        assert whole == pytest.approx(by_hand(batches), rel=1e-12)
        assert first == pytest.approx(by_hand(batches[:1]), rel=1e-12)
    # The mean of the batches' means is another number: weights matter.
    assert sum(by_hand([batch])["loss"] for batch in batches) / 3 != pytest.approx(by_hand(batches)["loss"], rel=1e-3)


def test_batches_are_cast_as_in_training():
    def forward(params, x, number):
        return torch.nn.functional.linear(x, params["w"]), number

    def run(mesh):
        sharded = sl.shard({"w": torch.ones(3, 4)}, mesh, sl.precision("bf16"))
        y, number = sl.make_eval_step(forward, sharded)(sharded, torch.ones(2, 4), torch.arange(3))
        assert y.dtype == torch.bfloat16 and number.dtype == torch.int64

    sl.simulate(run, mesh={"data": 1})


def test_where_nothing_is_gathered_ranks_may_take_unequally_many():
    batches = [regression_batch(8, 6, 4, seed=seed) for seed in range(3)]

    def run(mesh):
        sharded = sl.shard(PARAMS, mesh, stage=1)
        return as_numbers(sl.make_eval_step(scores, sharded).over(sharded, batches[:1] if mesh.rank else batches[1:]))

    for metrics in sl.simulate(run, mesh={"data": 2}):
        assert metrics == pytest.approx(by_hand(batches), rel=1e-12)


def test_over_batches_through_a_pipeline():
    _, params = tiny_gpt()
    loss_fn = gpt.make_sequential(TINY)
    *first, head = loss_fn.blocks

    def last(p, x, batch):
        count = (batch["targets"] > 3).sum()
        return {"loss": sl.Mean(head(p, x, batch) * count, count)}

    blocks = sl.sequential([*first, last])
    batches = token_batches(3)

    def run(mesh):
        sharded = sl.shard(gpt.to_blocks(params), mesh, sl.chain(sl.zero(3), sl.pipeline("1f1b", 2)))
        mine = [share(batch, mesh.coords["data"], 2) for batch in batches]
        return as_numbers(sl.make_eval_step(blocks, sharded).over(sharded, mine))

    parts = [blocks(gpt.to_blocks(params), share(batch, rank, 2))["loss"] for batch in batches for rank in range(2)]
    wanted = sum(part.total for part in parts) / sum(part.weight for part in parts)
    for metrics in sl.simulate(run, mesh={"data": 2, "pipe": 2}):
        assert metrics == {"loss": pytest.approx(wanted.item(), rel=1e-6)}


@STAGES
def test_means_in_aux_add_up_over_micro_batches(stage):
    batch = regression_batch(8, 6, 4)

    def loss_fn(params, part):
        return FIT(params, part), scores(params, part) | {"rows": len(part[0])}

    def run(mesh):
        sharded = sl.shard(PARAMS, mesh, sl.chain(sl.zero(stage), sl.accumulate(2)))
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(0.1))
        _, metrics = step(state, share(batch, mesh.rank, 2))
        assert not metrics["aux"]["loss"].requires_grad
        return metrics["aux"]

    for aux in sl.simulate(run, mesh={"data": 2}):
        assert aux.pop("rows") == 2  # the last micro-batch's
        assert as_numbers(aux) == pytest.approx(by_hand([batch]), rel=1e-12)


@pytest.mark.parametrize(
    ("fn", "batches", "message"),
    [
        (scores, 0, "over no batches has no mean"),
        (FIT, 2, r"result: Tensor"),
        (lambda p, b: {"all": scores(p, b), "rows": len(b[0])}, 2, r"rows: int\nReturn means alone"),
        (lambda p, b: {}, 2, r"nothing"),
    ],
)
def test_values_that_do_not_add_up_are_refused(fn, batches, message):
    with pytest.raises(LossError, match=message):
        sl.make_eval_step(fn, PARAMS).over(PARAMS, [regression_batch(8, 6, 4)] * batches)


SLICED, RULES = mlp([6, 8, 4])[1], {"layers/0/*": "column", "layers/1/weight": "row"}


def refused(run, shape, pool, kind):
    """The message that all ranks raise, simulated and real, without waiting for each other."""

    def caught(mesh):
        with pytest.raises(kind) as error:
            run(mesh)
        return str(error.value)

    result = set(sl.simulate(caught, mesh=shape)) | set(pool.run(caught, mesh=shape))
    assert len(result) == 1
    return result.pop()


@pytest.mark.parametrize("counts", [(1, 3), (2, 1)])
def test_where_parameters_are_gathered_unequally_many_batches_are_refused(counts, pool):
    batches = [regression_batch(8, 6, 4, seed=seed) for seed in range(3)]

    def run(mesh):
        sharded = sl.shard(PARAMS, mesh, stage=3)
        sl.make_eval_step(scores, sharded).over(sharded, iter(batches[: counts[mesh.rank]]))

    few, more = (0, 1) if counts[0] < counts[1] else (1, 0)
    result = refused(run, {"data": 2}, pool, BatchError)
    assert result.startswith(f"after {min(counts)} batches rank {few} has no other to evaluate and rank {more} has")
    assert "ranks along axis 'data' take each batch together" in result


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_rank_needs_a_batch(stage, pool):
    def run(mesh):
        sharded = sl.shard(PARAMS, mesh, stage=stage)
        sl.make_eval_step(scores, sharded).over(sharded, [regression_batch(8, 6, 4)] * mesh.rank)

    assert "rank 0: evaluation over no batches has no mean; give each rank at least one, as rank 1 has" in refused(
        run, {"data": 2}, pool, LossError
    )


@pytest.mark.parametrize("shape", [{"model": 2}, {"data": 2, "model": 2}])
def test_ranks_that_share_batches_take_the_same(shape, pool):
    """Other rows, or more batches, on one of two ranks that compute one model."""
    batches = [regression_batch(8, 6, 4, seed=seed) for seed in range(20)]

    def run(mesh, wrong):
        transform = sl.chain(sl.tensor_slicing(RULES), *([sl.zero(1)] if "data" in mesh.shape else []))
        sharded = sl.shard(SLICED, mesh, transform)
        evaluate = sl.make_eval_step(scores, sharded)
        mine = list(batches)
        if mesh.rank == 1 and wrong == "more":
            mine.append(batches[0])
        if mesh.rank == 1 and wrong == "other":
            mine[3:] = [(x.flip(0), y.flip(0)) for x, y in mine[3:]]
        if wrong == "one by one":
            evaluate(sharded, batches[0])
            evaluate(sharded, (batches[0][0][: 8 - mesh.coords["model"]], batches[0][1]))
        return evaluate.over(sharded, mine)

    if "data" not in shape:  # else the other group is not concerned, and waits for this one
        result = refused(lambda mesh: run(mesh, "more"), shape, pool, BatchError)
        assert "after 20 batches rank 0 has no other to evaluate and rank 1 has" in result
        result = refused(lambda mesh: run(mesh, "other"), shape, pool, RankMismatch)
        assert "0: rank 0: checksum" in result and "axis 'model' work on one batch" in result
        result = refused(lambda mesh: run(mesh, "one by one"), shape, pool, RankMismatch)
        assert "0/0: rank 0: float64 [8, 6]; rank 1: float64 [7, 6]" in result
    found = [as_numbers(value) for value in sl.simulate(run, None, mesh=shape)]
    assert found == [pytest.approx(by_hand(batches, SLICED))] * len(found)
