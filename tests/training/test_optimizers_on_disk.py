"""Every optimizer's states on disk: they train, and are saved, as states in memory, to the last bit."""

import os

import optree
import pytest
import torch
from helpers.cuts import tiny_blocks
from helpers.faults import BROKEN, Faults
from helpers.models import mlp, regression_batch
from helpers.offloaded import stepped
from helpers.trees import assert_same

import shardlib as sl
from shardlib.collectives import primitives
from shardlib.common.thresholds import Threshold
from shardlib.errors import IllegalComposition, RankFailure, StorageError
from shardlib.optim.on_disk import InPlace, OnDisk
from shardlib.optim.optimizers.adam8bit import CodedMoment
from shardlib.optim.whole import WholeLeaves
from shardlib.plan import buckets

LOSS, PARAMS = mlp(
    [64, 160, 72, 3], torch.float32
)  # the first two layers' halves are large enough for moments in 8 bits
BATCHES = [regression_batch(12, 64, 3, torch.float32, seed=seed) for seed in range(5)]
CLIP = sl.optim.clip_by_global_norm(0.1)

OPTIMIZERS = {
    "adamw8bit": lambda: sl.optim.chain(CLIP, sl.optim.adamw8bit(1e-2)),
    "a rate to change": lambda: sl.optim.inject_hyperparams(sl.optim.adamw8bit)(lr=1e-2),
    "masked": lambda: sl.optim.masked(sl.optim.adamw8bit(1e-2), "layers/0/*"),
    "slow weights": lambda: sl.optim.lookahead(sl.optim.adamw8bit(1e-2), 2, 0.5),
    "lion": lambda: sl.optim.chain(CLIP, sl.optim.lion(1e-2)),
    "lamb": lambda: sl.optim.chain(CLIP, sl.optim.lamb(1e-2)),
    "adafactor": lambda: sl.optim.chain(CLIP, sl.optim.adafactor(1e-2, 64, momentum=0.9)),
    "muon": lambda: sl.optim.partition(
        {"muon": sl.optim.muon(1e-2), "rest": sl.optim.lamb(1e-2)}, {"*weight": "muon", "*": "rest"}
    ),
    "lamb with a rate to change": lambda: sl.optim.inject_hyperparams(sl.optim.lamb)(1e-2),
    "lamb of a layer": lambda: sl.optim.masked(sl.optim.lamb(1e-2), "layers/0/*"),
}


def start(mesh, optimizer, *transforms):
    params = sl.shard(PARAMS, mesh, sl.chain(*transforms))
    return sl.make_train_step(LOSS, params, OPTIMIZERS[optimizer]())


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_the_same_to_the_last_bit(optimizer, stage, tmp_path):
    """And states that are saved from disk go on in memory, and the other way round."""

    def run(mesh, before, after):
        first, then = ([sl.offload("disk", folder=tmp_path / name)] if name else [] for name in (before, after))
        memory = [sl.zero(stage), sl.precision("bf16")]
        state = stepped(*start(mesh, optimizer, *memory, *first), BATCHES[:2])
        sl.checkpoint.save(tmp_path / "run", state, keep=1)
        state, step = start(mesh, optimizer, *memory, *then)
        state = stepped(sl.checkpoint.restore(tmp_path / "run", state), step, BATCHES[2:])
        return sl.unshard(state.params)

    wanted = sl.simulate(run, "", "", mesh={"data": 2})
    assert_same(sl.simulate(run, "a", "", mesh={"data": 2}), wanted)
    assert_same(sl.simulate(run, "", "b", mesh={"data": 2}), wanted)
    assert_same(sl.simulate(run, "c", "d", mesh={"data": 2}), wanted)


NAMED = {
    "a label": lambda: sl.optim.partition(
        {"first": sl.optim.adamw(1e-2), "second": sl.optim.sgd(1e-2, momentum=0.9)}, {"second": "second", "*": "first"}
    ),
    "a rate": lambda: sl.optim.inject_hyperparams(sl.optim.sgd, static_args="momentum")(0.1),
}


@pytest.mark.parametrize("memory", ["host", "disk"])
@pytest.mark.parametrize("name", NAMED)
def test_what_all_buckets_share_may_have_the_name_of_a_parameter(name, memory, tmp_path):
    layers = [{"weight": torch.randn(4, 4)} for _ in range(2)]  # a bucket each, beside one of the others
    params = {"first": torch.randn(4, 4), "layers": layers, "lr": torch.ones(()), "second": torch.randn(4, 2)}
    x = torch.randn(3, 4)

    def loss_fn(params, x):
        x = torch.tanh(x @ params["first"])
        for layer in params["layers"]:
            x = torch.tanh(x @ layer["weight"])
        return (x @ params["second"]).square().mean() * params["lr"]

    def run(*offload):
        sharded = sl.shard(params, sl.make_mesh(), sl.chain(sl.zero(0), *offload))
        state, step = sl.make_train_step(loss_fn, sharded, NAMED[name]())
        for rate in (0.1, 0.5, 0.2):
            if name == "a rate":
                state.opt.inner.hyperparams["lr"].fill_(rate)
            state, _ = step(state, x)
        return sl.unshard(state.params)

    wanted = run()
    assert_same(run(sl.offload(memory, **({"folder": tmp_path} if memory == "disk" else {}))), wanted)


SHARED = {
    "labels": lambda: sl.optim.partition(
        {"embed/float32": sl.optim.lamb(1e-2), "head": sl.optim.adafactor(1e-2, 2)},
        {"embed/*": "embed/float32", "head": "head"},
    ),
    "by parameter": lambda: sl.optim.adafactor(1e-2, 2),
}


@pytest.mark.parametrize("memory", ["host", "disk"])
@pytest.mark.parametrize("name", SHARED)
def test_parameters_may_have_names_that_buckets_would_have(name, memory, tmp_path, monkeypatch):
    """A large leaf has a bucket of its own; one is named as a dtype, in a unit whose leaves share a bucket."""
    monkeypatch.setattr(buckets, "_ALONE", Threshold(32))
    params = {"embed": {"float32": torch.randn(4, 4), "small": torch.randn(4, 3)}, "head": torch.randn(4, 16)}

    def loss_fn(params, x):
        x = torch.tanh(x @ params["embed"]["float32"])
        return (x @ params["head"]).square().mean() + (x @ params["embed"]["small"]).square().mean()

    def run(mesh, *offload):
        sharded = sl.shard(params, mesh, sl.chain(sl.zero(1), *offload))
        assert not {bucket.name for bucket in sharded.plan.buckets} & {*sharded.plan.shape.paths}
        state, step = sl.make_train_step(loss_fn, sharded, SHARED[name]())
        for seed in range(3):
            state, _ = step(state, torch.randn(3, 4, generator=torch.Generator().manual_seed(mesh.rank + 2 * seed)))
        return sl.unshard(state.params)

    folder = {"folder": tmp_path} if memory == "disk" else {}
    moved = sl.simulate(run, sl.offload(memory, **folder), mesh={"data": 2})
    assert_same(moved, sl.simulate(run, mesh={"data": 2}))


@pytest.mark.parametrize("call, after", [("preadv", 0), ("preadv", 2), ("pwritev", 0)])
@pytest.mark.parametrize("optimizer", ["lamb", "adafactor", "muon", "lamb with a rate to change"])
def test_a_rank_that_fails_does_not_keep_others_waiting(optimizer, call, after, tmp_path, monkeypatch):
    """It makes the exchanges of the buckets that are left; all ranks raise, and the state is as it was."""

    def run(mesh, fails):
        disk = sl.offload("disk", folder=tmp_path / str(fails))
        state, step = start(mesh, optimizer, sl.zero(2), sl.precision("bf16"), disk)
        state = stepped(state, step, BATCHES[:1])
        if fails:
            primitives.all_gather_object(
                mesh,
                ["data"],
                mesh.rank == 0 and Faults(monkeypatch).fails(call, BROKEN, "rank-1-", after=after, times=1),
            )
            with pytest.raises(StorageError if mesh.rank else RankFailure) as refused:
                stepped(state, step, BATCHES[1:2])
            assert "The state that the step was given is as it was" in refused.value.__notes__[0]
        return sl.unshard(stepped(state, step, BATCHES[1:3]).params)

    assert_same(sl.simulate(run, True, mesh={"data": 2}), sl.simulate(run, False, mesh={"data": 2}))


def failed(optimizer, folder, fail, error):
    """Train a step, let ``fail()`` spoil the next on rank 0, and see it raise on all."""

    def run(mesh):
        disk = sl.offload("disk", folder=folder)
        state, step = start(mesh, optimizer, sl.zero(2), sl.precision("bf16"), disk)
        state = stepped(state, step, BATCHES[:1])
        primitives.all_gather_object(mesh, ["data"], mesh.rank == 0 and fail())
        with pytest.raises(RankFailure if mesh.rank else error):
            stepped(state, step, BATCHES[1:2])

    sl.simulate(run, mesh={"data": 2})


def test_files_cut_between_steps_keep_nobody_waiting(tmp_path):
    """The step fails on a rank before it has begun its update."""

    def cut():
        (file,) = tmp_path.glob("rank-0-*.data")
        os.truncate(file, 4096)

    failed("lamb", tmp_path, cut, StorageError)


def test_a_rank_without_memory_for_a_whole_parameter_keeps_nobody_waiting(tmp_path, monkeypatch):
    """It fails between the two exchanges of a bucket, and would again."""
    real = WholeLeaves._assembled

    def full(self, *args):
        if self._mesh.rank == 0:
            raise torch.OutOfMemoryError("no memory for a whole parameter")
        return real(self, *args)

    failed("muon", tmp_path, lambda: monkeypatch.setattr(WholeLeaves, "_assembled", full), torch.OutOfMemoryError)


def test_each_parameter_is_made_whole_while_its_bucket_is_in_memory(tmp_path):
    """The plan counts what is then sent: the longest message of each bucket."""
    kinds = [[], *([sl.offload("disk", folder=tmp_path / str(share), fraction=share)] for share in (1, 0.5))]

    def sent(mesh, *transforms):
        state, step = start(mesh, "muon", sl.zero(2), *transforms)
        mesh.traffic.reset()
        stepped(state, step, BATCHES[:1])
        return dict(mesh.traffic.payload)

    mesh, tx = sl.abstract_mesh(data=2), OPTIMIZERS["muon"]()
    plans = [sl.make_plan(PARAMS, mesh, sl.chain(sl.zero(2), *more), optimizer=tx) for more in kinds]
    found = [sl.simulate(sent, *more, mesh={"data": 2})[0] for more in kinds]
    assert found == [plan.payload() for plan in plans]
    assert len({sent["data"] for sent in found}) > 1


def test_what_cannot_go_bucket_by_bucket_is_refused(tmp_path):
    mesh, disk = sl.make_mesh(), sl.offload("disk", folder=tmp_path)
    within = sl.optim.masked(sl.optim.chain(CLIP, sl.optim.lamb(1e-3)), "layers/0/*")
    state, step = sl.make_train_step(LOSS, sl.shard(PARAMS, mesh, disk), within)
    with pytest.raises(IllegalComposition, match=r"put clips first in the outermost chain, or use offload\('host'\)"):
        stepped(state, step, BATCHES[:1])
    loss_fn, params = tiny_blocks()

    def staged(mesh):
        transform = sl.chain(sl.pipeline("1f1b", microbatches=2), sl.offload("disk", folder=tmp_path / "stages"))
        with pytest.raises(IllegalComposition, match="the stages of a pipeline have different buckets"):
            sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), sl.optim.lamb(1e-3))

    sl.simulate(staged, mesh={"pipe": 2})


def coded(state):
    return [
        m
        for m in optree.tree_leaves(state.opt, is_leaf=lambda n: isinstance(n, CodedMoment))
        if isinstance(m, CodedMoment)
    ]


def test_moments_in_8_bits_are_what_the_plan_counts_and_moves(tmp_path, monkeypatch):
    """Codes and scales lie on disk, and nothing else is read or written in a step."""
    mesh, transform = sl.make_mesh(), sl.chain(sl.precision("bf16"), sl.offload("disk", folder=tmp_path))
    state, step = start(mesh, "adamw8bit", transform)
    plan = sl.make_plan(PARAMS, mesh, transform, optimizer=OPTIMIZERS["adamw8bit"]())
    moments = coded(state)
    assert len(moments) == 4 and all(isinstance(part, OnDisk) for m in moments for part in (m.codes, m.scales))
    (file,) = tmp_path.glob("*.data")
    assert file.stat().st_size == plan.bytes("optimizer", "disk")
    moved: dict[str, list[int]] = {"preadv": [], "pwritev": []}

    def counted(call):
        real = getattr(os, call)

        def counting(fd, views, offset):
            moved[call].append(done := real(fd, views, offset))  # by eight threads
            return done

        monkeypatch.setattr(os, call, counting)

    counted("preadv")
    counted("pwritev")
    stepped(state, step, BATCHES[:1])
    transfers = plan.transfers()
    # A master, codes and scales of two layers; a master and two moments of the last.
    assert transfers["read"] == 4096 * (11 + 2 * 3 + 2 * 1 + 12 + 2 * 3 + 2 * 1 + 3)
    assert {way: sum(sizes) for way, sizes in moved.items()} == {
        "preadv": transfers["read"],
        "pwritev": transfers["written"],
    }


def test_moments_in_8_bits_move_and_come_back(tmp_path):
    mesh, disk = sl.make_mesh(), sl.offload("disk", folder=tmp_path / "states")
    wanted = stepped(*start(mesh, "adamw8bit"), BATCHES)
    state, step = start(mesh, "adamw8bit", disk)
    state = stepped(state, step, BATCHES[:2])
    before = [moment.unpacked() for moment in coded(state)]
    state = sl.to_device(sl.to_disk(sl.to_host(state), tmp_path / "parked"))
    assert all(map(torch.equal, before, [moment.unpacked() for moment in coded(state)]))
    assert_same(sl.unshard(stepped(state, step, BATCHES[2:]).params), sl.unshard(wanted.params))


def test_moments_in_8_bits_are_taken_back_where_a_write_fails(tmp_path):
    """What was decoded, changed and coded in place is what it was."""
    state, _ = start(sl.make_mesh(), "adamw8bit", sl.offload("disk", folder=tmp_path))
    moment = coded(state)[0]
    moment.pack(torch.linspace(-1, 1, moment.like.numel()))
    before = moment.unpacked()
    writes = InPlace([moment])
    writes.begin()
    moment.pack(before.flip(0))
    assert not torch.equal(moment.unpacked(), before)
    writes.take_back()
    assert torch.equal(moment.unpacked(), before)
