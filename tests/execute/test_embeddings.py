"""Every option of torch's embeddings works at every stage as on one device, or is refused by name."""

import pytest
import torch
import torch.nn.functional as F
from helpers import training
from helpers.models import share
from helpers.trees import assert_close
from oracle import one_device
from torch import nn

import shardlib as sl
from shardlib.errors import HandleError, TreeError

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
GENERATOR = torch.Generator().manual_seed(0)
PARAMS = {
    "embed": {"table": 3 * torch.randn(12, 4, generator=GENERATOR, dtype=torch.float64)},
    "head": {"w": torch.randn(3, 4, generator=GENERATOR, dtype=torch.float64)},
}
IDS = [torch.randint(12, (8, 3), generator=GENERATOR) for _ in range(3)]


def looked_up(**options):
    def loss_fn(params, ids):
        x = F.embedding(ids, params["embed"]["table"], **options).sum(1)
        return F.linear(x, params["head"]["w"]).square().mean()

    return loss_fn


def in_bags(flat=False, **options):
    def loss_fn(params, ids):
        bags = (
            (ids.reshape(-1), params["embed"]["table"], torch.arange(len(ids)) * 3)
            if flat
            else (ids, params["embed"]["table"])
        )
        return F.linear(F.embedding_bag(*bags, **options), params["head"]["w"]).square().mean()

    return loss_fn


LOSSES = {
    "plain": (looked_up, {}),
    "sparse": (looked_up, {"sparse": True}),
    "padding": (looked_up, {"padding_idx": 2}),
    "padding from the end": (looked_up, {"padding_idx": -1}),
    "by frequency": (looked_up, {"scale_grad_by_freq": True}),
    "sparse, padding": (looked_up, {"sparse": True, "padding_idx": 2}),
    "bags": (in_bags, {}),
    "bags, sparse": (in_bags, {"sparse": True, "mode": "sum"}),
    "bags, padding": (in_bags, {"padding_idx": 2}),
    "bags, max": (in_bags, {"mode": "max"}),
    "bags by offset": (in_bags, {"flat": True, "mode": "sum", "scale_grad_by_freq": True}),
}
EVERY = pytest.mark.parametrize("name", LOSSES)


def trains_like_one_device(name, mesh, transform, ranks, rtol=1e-10):
    make, options = LOSSES[name]
    got = training.simulate(mesh, make(**options), PARAMS, IDS, transform, training.optimizer())
    one = make(**{option: value for option, value in options.items() if option != "sparse"})

    def mean_of_shares(params, ids):
        return sum(one(params, share(ids, rank, ranks)) for rank in range(ranks)) / ranks

    wanted = one_device.train(mean_of_shares, PARAMS, IDS)
    assert got[0] == pytest.approx(wanted[0], rel=rtol)
    assert_close(got[2], wanted[2], rtol)


@EVERY
@STAGES
@pytest.mark.parametrize("ranks", [1, 2])
def test_options_mean_what_they_mean_on_one_device(name, stage, ranks):
    trains_like_one_device(name, {"data": ranks}, sl.zero(stage), ranks)


@pytest.mark.parametrize("name", ["sparse", "bags, sparse"])
@STAGES
def test_sparse_gradients_of_leaves_in_one_unit_and_of_micro_batches(name, stage):
    transform = sl.chain(sl.zero(stage), sl.accumulate(2))
    trains_like_one_device(name, {"data": 2}, transform, 4)


@pytest.mark.parametrize("name", ["plain", "sparse", "padding", "padding from the end", "sparse, padding"])
@STAGES
def test_a_sliced_vocabulary(name, stage):
    transform = sl.chain(sl.zero(stage), sl.tensor_slicing({"*/table": "vocab"}))
    trains_like_one_device(name, {"data": 2, "model": 2}, transform, 2)


@STAGES
@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("by frequency", r"embed/table: scale_grad_by_freq needs the whole embedding; do not slice it"),
        (
            "bags",
            r"embedding_bag uses embed/table, of which this rank holds a slice .* F.embedding,.*'embed': 'replicated' first",
        ),
    ],
)
def test_options_that_need_the_whole_vocabulary(stage, name, match):
    def run(mesh):
        sharded = sl.shard(PARAMS, mesh, sl.chain(sl.zero(stage), sl.tensor_slicing({"*/table": "vocab"})))
        make, options = LOSSES[name]
        with pytest.raises(HandleError, match=match):
            sl.value_and_grad(make(**options))(sharded, IDS[0])

    sl.simulate(run, mesh={"data": 1, "model": 2})


# --- max_norm ------------------------------------------------------------------------------------------------------


@STAGES
@pytest.mark.parametrize("make", [looked_up, in_bags])
@pytest.mark.parametrize("ranks", [1, 2])
def test_max_norm_is_refused_by_name(stage, make, ranks):
    def run(mesh):
        sharded = sl.shard(PARAMS, mesh, stage=stage)
        loss_fn = make(max_norm=1.0, sparse=make is looked_up)
        for act in (
            lambda: sl.value_and_grad(loss_fn)(sharded, IDS[0]),
            lambda: sl.make_eval_step(loss_fn, sharded)(sharded, IDS[0]),
        ):
            with pytest.raises(HandleError, match=r"writes .*to (a )?parameter.*embed/table.* Instead of .*max_norm"):
                act()

    sl.simulate(run, mesh={"data": ranks})


def test_max_norm_on_a_slice_is_refused_by_name():
    def run(mesh):
        sharded = sl.shard(PARAMS, mesh, sl.chain(sl.zero(1), sl.tensor_slicing({"*/table": "vocab"})))
        with pytest.raises(HandleError, match=r"max_norm= writes to parameter embed/table .*Instead of"):
            sl.value_and_grad(looked_up(max_norm=1.0))(sharded, IDS[0])

    sl.simulate(run, mesh={"data": 1, "model": 2})


def scaled(params, ids, max_norm=1.0):
    """The remedy that the refusal recommends."""
    rows = F.embedding(ids, params["embed"]["table"])
    rows = rows * (max_norm / rows.norm(dim=-1, keepdim=True).clamp(min=max_norm)).detach()
    return F.linear(rows.sum(1), params["head"]["w"]).square().mean()


@pytest.mark.parametrize("transform", [*map(sl.zero, range(4)), sl.tensor_slicing({"*/table": "vocab"})], ids=str)
def test_the_remedy_looks_up_the_same_rows(transform):
    """The loss is that of torch's max_norm, which adds 1e-7 to norms, on any plan."""
    table = PARAMS["embed"]["table"].clone()
    rows = F.embedding(IDS[0], table, max_norm=1.0)
    wanted = F.linear(rows.sum(1), PARAMS["head"]["w"]).square().mean()
    mesh = {"data": 2} if not isinstance(transform, type(sl.tensor_slicing({}))) else {"data": 1, "model": 2}

    def run(mesh):
        sharded = sl.shard(PARAMS, mesh, transform)
        return sl.value_and_grad(scaled)(sharded, IDS[0])[0].item()

    assert sl.simulate(run, mesh=mesh) == [pytest.approx(wanted.item(), rel=1e-7)] * 2


def test_modules_with_max_norm():
    module = nn.Sequential(nn.Embedding(12, 4, max_norm=1.0, sparse=True), nn.Linear(4, 3)).double()
    with pytest.raises(TreeError, match=r"(?s)max_norm write to their parameters.*- 0\n.*register_forward_hook"):
        sl.from_module(module)
    wanted = module(IDS[0])

    module[0].max_norm = max_norm = None
    max_norm = 1.0
    module[0].register_forward_hook(
        lambda module, inputs, rows: rows * (max_norm / rows.norm(dim=-1, keepdim=True).clamp(min=max_norm)).detach()
    )
    apply, params = sl.from_module(module)
    torch.testing.assert_close(apply(params, IDS[0]), wanted)


# --- writes of other kinds -----------------------------------------------------------------------------------------


@STAGES
@pytest.mark.parametrize("write", ["through a view", "of itself"])
def test_writes_to_a_parameter_are_noticed_at_every_stage(stage, write):
    """Autograd allows such writes under no_grad; below stage 3 ranks would continue with different parameters."""

    def loss_fn(params, ids):
        loss = looked_up()(params, ids)
        with torch.no_grad():
            table = params["embed"]["table"]
            (table.view(-1) if write == "through a view" else table).clamp_(-1, 1)
        return loss

    def run(mesh):
        sharded = sl.shard(PARAMS, mesh, stage=stage)
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(0.1))
        with pytest.raises(HandleError, match=r"writes .*to (a )?parameter.*embed/table.*work on a copy"):
            step(state, IDS[0])
        with pytest.raises(HandleError, match=r"writes .*to (a )?parameter.*embed/table.*work on a copy"):
            sl.make_eval_step(loss_fn, sharded)(sharded, IDS[0])

    sl.simulate(run, mesh={"data": 2})
