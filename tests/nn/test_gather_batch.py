"""Losses that compare every row with those of all ranks train as on one device, or are refused."""

import pytest
import torch
import torch.nn.functional as F
from helpers.trees import assert_close

import shardlib as sl
from shardlib.errors import LossError

torch.manual_seed(0)
PARAMS = {
    "image": {"up": torch.randn(8, 6).double() / 2, "down": torch.randn(4, 8).double() / 2},
    "text": torch.randn(4, 6).double() / 2,
    "scale": torch.zeros(()).double(),
}
IMAGES, TEXTS, IDS = torch.randn(8, 6).double(), torch.randn(8, 6).double(), torch.arange(8)
SLICED = sl.tensor_slicing({"image/up": "column", "image/down": "row"})


def encoded(params, batch, tiles=1):
    images, texts, _ = batch
    up, down = params["image"]["up"], params["image"]["down"]
    images = sl.nn.tiled(lambda rows: F.linear(torch.tanh(F.linear(rows, up)), down), images, tiles, dim=0)
    return F.normalize(images, dim=-1), F.normalize(F.linear(texts, params["text"]), dim=-1)


def clip(params, batch, tiles=1):
    """Every rank computes the whole loss."""
    images, texts = (sl.nn.gather_batch(rows) for rows in encoded(params, batch, tiles))
    scores, own = images @ texts.t() * params["scale"].exp(), torch.arange(len(images))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.t(), own)) / 2


def own_rows(params, batch):
    """Every rank compares its own images with all texts."""
    images, texts = encoded(params, batch)
    own = (sl.nn.gather_batch(batch[2]) == batch[2][:, None]).int().argmax(1)
    scores = images @ sl.nn.gather_batch(texts).t() * params["scale"].exp()
    return sl.Mean(F.cross_entropy(scores, own, reduction="sum"), len(own))


def barlow(params, batch):
    one, other = (sl.nn.gather_batch(rows.t(), dim=-1) for rows in encoded(params, batch))
    one, other = ((x - x.mean(1, True)) / (x.std(1, keepdim=True) + 1) for x in (one, other))
    return (one @ other.t() / one.shape[1] - params["scale"].cos() * torch.eye(4)).square().sum()


def gathered_by_hand(params, batch):
    images, texts = (sl.collectives.all_gather(rows, "data", dst="invariant") for rows in encoded(params, batch))
    return F.cross_entropy(images @ texts.t() * params["scale"].exp(), torch.arange(len(images)))


def trained(mesh, transform, loss=clip, bounds=(0, 2, 4, 6, 8)):
    """The parameters after two steps; each rank of a batch of 8 has the rows between two bounds."""
    params = sl.shard(PARAMS, mesh, transform)
    state, step = sl.make_train_step(loss, params, sl.optim.sgd(0.5))
    shares, index = 1, 0
    for axis in params.plan.batch_axes:
        shares, index = shares * mesh.shape[axis], index * mesh.shape[axis] + mesh.coords[axis]
    start, stop = bounds[4 * index // shares], bounds[4 * (index + 1) // shares]
    for _ in range(2):
        state, metrics = step(state, (IMAGES[start:stop], TEXTS[start:stop], IDS[start:stop]))
    return {"params": sl.unshard(state.params), "loss": metrics["loss"]}


def one_device(loss=clip):
    return trained(sl.make_mesh(), sl.zero(0), loss)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("loss", [clip, own_rows, barlow])
def test_every_stage(stage, loss):
    due = one_device(loss)
    for shape, transform, bounds in (
        ({"data": 4}, sl.zero(stage), (0, 2, 4, 6, 8)),
        ({"data": 4}, sl.zero(stage), (0, 1, 4, 6, 8)),  # ranks with different numbers of rows
        ({"other": 2, "data": 2}, sl.zero(stage, replicate="other"), (0, 2, 4, 6, 8)),
        ({"data": 2, "model": 2}, sl.chain(sl.zero(stage), SLICED), (0, 2, 4, 6, 8)),
    ):
        for result in sl.simulate(trained, transform, loss, bounds, mesh=shape):
            assert_close(result, due, 1e-10)


def test_an_evaluation_gathers_in_the_order_of_the_batch():
    def gathered(mesh):
        params = sl.shard(PARAMS, mesh, sl.zero(3, replicate="other"))
        rank = 2 * mesh.coords["other"] + mesh.coords["data"]
        evaluate = sl.make_eval_step(lambda params, ids: sl.nn.gather_batch(ids), params)
        return evaluate(params, IDS[2 * rank : 2 * rank + 2]).tolist()

    assert sl.simulate(gathered, mesh={"other": 2, "data": 2}) == [IDS.tolist()] * 4


@pytest.mark.parametrize(
    "transform", [sl.chain(sl.zero(2), sl.accumulate(2)), sl.chain(sl.zero(1), sl.reproducible(4))], ids=str
)
def test_micro_batches_are_refused(transform):
    """Each would be compared with its own rows alone; tiles of rows take as little memory."""
    with pytest.raises(LossError, match=r"gather_batch needs one micro-batch, and the plan has \d.*sl.nn.tiled"):
        sl.simulate(trained, transform, mesh={"data": 2})
    tiled = sl.simulate(trained, sl.zero(3), lambda params, batch: clip(params, batch, 2), mesh={"data": 2})
    assert_close(tiled[0], one_device(), 1e-10)


def test_a_loss_that_ranks_do_not_share():
    """The pairs of one common loss are wrong by the number of ranks in a step, which takes the mean of the ranks' losses."""
    with pytest.raises(LossError, match=r'all_gather\(dst="invariant"\) over axis .data.*sl.nn.gather_batch'):
        sl.simulate(trained, sl.zero(2), gathered_by_hand, mesh={"data": 2})
    for pair in (sl.collectives.copy, sl.collectives.split):
        with pytest.raises(LossError, match=f"{pair.__name__} over axis 'data'"):
            sl.simulate(
                trained,
                sl.zero(0),
                lambda p, b, pair=pair: pair(p["text"], "data").sum() * b[0].sum(),
                mesh={"data": 2},
            )
    with pytest.raises(LossError, match=r'all_reduce\(dst="invariant"\) over axis .data.'):
        sl.simulate(
            trained,
            sl.zero(1),
            lambda p, b: sl.collectives.all_reduce(clip(p, b), "data", dst="invariant"),
            mesh={"data": 2},
        )
    counts = sl.simulate(
        trained,
        sl.zero(1),
        lambda p, b: clip(p, b) / sl.collectives.all_reduce(torch.ones(()), "data", dst="invariant"),
        mesh={"data": 2},
    )  # what has no gradient is summed as before
    assert float(counts[0]["loss"]) < float(one_device()["loss"])


def test_plans_are_not_compared_by_micro_batches():
    """The debugger's one device computes one micro-batch after the other."""
    with pytest.raises(LossError, match="gather_batch: plans are compared"):
        sl.debug.check(({"data": 2}, sl.zero(1)), clip, (IMAGES, TEXTS, IDS), params=PARAMS)
