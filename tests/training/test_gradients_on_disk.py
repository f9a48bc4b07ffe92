"""Offload: gradients on disk train to the last bit as gradients in memory, and a few buckets at most are in memory."""

import os
import re

import pytest
import torch
from helpers.faults import BROKEN, FULL, Faults
from helpers.models import mlp, regression_batch
from helpers.offloaded import OVERFLOWING, assert_alike, stepped, trained, tx
from helpers.trees import assert_same

import shardlib as sl
from shardlib.errors import IllegalComposition, NonFiniteError, RankFailure, StorageError
from shardlib.execute.counting import LiveBytes
from shardlib.plan.program import messages
from shardlib.sharded.gradients_on_disk import DiskGradientOffload, _Copies

FOLDER = "gradients"

PLANS = {
    "one device": ([sl.zero(0)], {"data": 1}),
    "stage 0, bf16": ([sl.zero(0), sl.precision("bf16")], {"data": 2}),
    "stage 0, bf16 sums": ([sl.zero(0), sl.precision("bf16", reduce_dtype="bf16")], {"data": 1}),
    "stage 1": ([sl.zero(1)], {"data": 2}),
    "stage 1, fp16": ([sl.zero(1), OVERFLOWING], {"data": 2}),
    "stage 2, bf16": ([sl.zero(2), sl.precision("bf16")], {"data": 2}),
    "stage 3": ([sl.zero(3)], {"data": 2}),
    "int8": ([sl.zero(3), sl.quantize("int8", "int8")], {"data": 2}),
    "frozen": ([sl.zero(2), sl.freeze(["*mlp*"])], {"data": 2}),
    "accumulated": ([sl.zero(3), sl.accumulate(3)], {"data": 2}),
    "accumulated on one device": ([sl.zero(0), sl.precision("bf16"), sl.accumulate(4)], {"data": 1}),
    "accumulated on the device": ([sl.zero(1), sl.accumulate(2)], {"data": 2}),
    "recomputed": ([sl.zero(3), sl.remat("full")], {"data": 1}),
    "tiles": ([sl.zero(3), sl.tile(["*mlp/up/weight"], 2)], {"data": 2}),
    "reproducible": ([sl.zero(2), sl.reproducible(4)], {"data": 2}),
    "pipeline": ([sl.pipeline("1f1b", microbatches=4), sl.zero(2)], {"pipe": 2, "data": 2}),
    "frozen stage": ([sl.pipeline("1f1b", microbatches=4), sl.freeze(["0/*", "1/*"])], {"pipe": 2, "data": 1}),
}  # fmt: skip


def on_disk(folder, params="disk", **options):
    return sl.offload("disk", params=params, gradients="disk", folder=folder, **options)


@pytest.mark.parametrize("plan", PLANS)
def test_training_is_the_same_to_the_last_bit(plan, tmp_path):
    wanted = trained(*PLANS[plan], 5)
    for number, more in enumerate([{}, {"fraction": 0.5, "params": None}]):
        folder = [tmp_path / f"{number}/{name}" for name in "ab"]
        assert_alike(trained(*PLANS[plan], 5, on_disk(folder, **more)), wanted)


def test_stages_with_states_on_disk_and_without_update_alike(tmp_path):
    """Some of the last stage's states are on disk, and none of the first one's."""
    plan = [sl.pipeline("1f1b", microbatches=4), sl.zero(2)], {"pipe": 2, "data": 1}
    assert_alike(trained(*plan, 3, on_disk(tmp_path, None, fraction=0.3)), trained(*plan, 3))


LOSS, PARAMS = mlp([5, 7, 6, 3], torch.float32)
BATCHES = [regression_batch(12, 5, 3, torch.float32, seed=seed) for seed in range(5)]


def start(mesh, *transforms, **options):
    return sl.make_train_step(LOSS, sl.shard(PARAMS, mesh, sl.chain(*transforms)), tx(), **options)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("params", ["disk", None])
def test_bytes_are_the_plans(tmp_path, monkeypatch, microbatches, params):
    """Files of one copy, and what is written and read: micro-batch by micro-batch, and by the update."""
    moved = {"preadv": [], "pwritev": []}  # by many threads

    def counted(call):
        real = getattr(os, call)

        def counting(fd, views, offset):
            done = real(fd, views, offset)
            moved[call] += [done] if f"/{FOLDER}/" in os.readlink(f"/proc/self/fd/{fd}") else []
            return done

        monkeypatch.setattr(os, call, counting)

    mesh = sl.make_mesh()
    more = [sl.precision("bf16"), *([sl.accumulate(microbatches)] if microbatches > 1 else [])]
    transform = sl.chain(sl.zero(0), *more, on_disk(tmp_path, params))
    plan = sl.make_plan(PARAMS, mesh, transform, optimizer=tx(), loss_fn=LOSS, batch=BATCHES[0])
    state, step = start(mesh, *more, on_disk(tmp_path, params))
    (file,) = (tmp_path / FOLDER).glob("*.data")
    assert file.stat().st_size == plan.bytes("grad", "disk") == 3 * 4096 == plan.bytes("grad", "host")
    state = stepped(state, step, BATCHES[:1])
    counted("preadv")
    counted("pwritev")
    state = stepped(state, step, BATCHES[1:2])
    monkeypatch.undo()
    for way, call in (("read", "preadv"), ("written", "pwritev")):
        planned = sum(sent.bytes for sent in messages(plan, moves=True) if (sent.what, sent.axis) == ("gradients", way))
        assert sum(moved[call]) == planned == microbatches * 3 * 4096
    assert re.search(r"gradients +written +whole blocks +each micro-batch", str(plan))
    assert re.search(r"gradients +read +whole blocks +before the update", str(plan))


@pytest.mark.parametrize("accumulated", [[], [sl.accumulate(2)]], ids=["one", "several"])
def test_never_are_all_gradients_in_memory(tmp_path, accumulated):
    layers, width = 24, 64
    layer = 4 * width**2

    def loss_fn(params, x):
        for each in params["layers"]:
            x = torch.tanh(x @ each["w"])
        return x.square().mean()

    params = {"layers": [{"w": torch.randn(width, width) / width**0.5} for _ in range(layers)]}
    transform = sl.chain(sl.zero(0), *accumulated, on_disk(tmp_path))
    state, step = sl.make_train_step(loss_fn, sl.shard(lambda: params, sl.make_mesh(), transform), tx())
    x = torch.ones(2, width)
    state, _ = step(state, x)
    with LiveBytes() as live:
        state, _ = step(state, x)
    assert live.peak < 8 * layer  # pools have their memory by now
    plan = sl.make_plan(params, sl.make_mesh(), transform)
    assert plan.bytes("grad", "host") == 4 * layer and plan.bytes("grad", "disk") == layers * layer


def test_gradients_are_not_read_for_the_norm(tmp_path, monkeypatch):
    """A skipped step reads none of them."""
    mesh = sl.make_mesh()
    state, step = start(mesh, on_disk(tmp_path), nonfinite="skip")
    state = stepped(state, step, BATCHES[:1])
    x, y = BATCHES[1]
    with monkeypatch.context() as patch:
        Faults(patch).fails("preadv", BROKEN, f"/{FOLDER}/")
        state, metrics = step(state, (x * float("inf"), y))
    assert not metrics["finite"] and state.step == 2
    with pytest.raises(NonFiniteError, match=r"the gradient of layers/0/bias is not finite"):
        other, raises = start(mesh, on_disk(tmp_path / "other"))
        raises(other, (x * float("inf"), y))


def test_only_gradients_that_are_not_finite_are_read_to_name_one(tmp_path, monkeypatch):
    mesh, read, kept = sl.make_mesh(), [], _Copies.__getitem__
    multiply = sl.block(lambda p, x: x @ p["w"])

    def loss_fn(params, x):  # summands of their own: one layer's infinite gradient reaches no other
        return sum(scale * multiply(p, x).sum() for p, scale in zip(params, (1.0, float("inf"), 1.0), strict=True))

    params = sl.shard([{"w": torch.ones(4, 4)} for _ in range(3)], mesh, sl.chain(sl.zero(0), on_disk(tmp_path, None)))
    state, step = sl.make_train_step(loss_fn, params, sl.optim.sgd(0.1, momentum=0.9))
    monkeypatch.setattr(_Copies, "__getitem__", lambda grads, name: read.append(name) or kept(grads, name))
    with pytest.raises(NonFiniteError, match="the gradient of 1/w is not finite"):
        step(state, torch.ones(2, 4))
    (name,) = read
    assert params.plan.bucket_of[name].paths == ("1/w",)


OTHERS = {
    "lamb": lambda: sl.optim.chain(sl.optim.clip_by_global_norm(0.1), sl.optim.lamb(1e-2)),
    "muon": lambda: sl.optim.partition(
        {"muon": sl.optim.muon(1e-2), "rest": sl.optim.adamw8bit(1e-2)}, {"*weight": "muon", "*": "rest"}
    ),
    "momentum": lambda: sl.optim.sgd(1e-2, momentum=0.9),  # whose first state is the gradient itself
}


@pytest.mark.parametrize("fails", [False, True], ids=["trains", "fails"])
@pytest.mark.parametrize("optimizer", OTHERS)
def test_other_optimizers(tmp_path, monkeypatch, optimizer, fails):
    """Those whose updates exchange end them together, also where one rank cannot read a gradient."""

    def run(mesh, fails, *offload):
        transform = sl.chain(sl.zero(3), sl.precision("bf16"), *offload)
        state, step = sl.make_train_step(LOSS, sl.shard(PARAMS, mesh, transform), OTHERS[optimizer]())
        state = stepped(state, step, BATCHES[:2])
        if fails:
            with monkeypatch.context() as patch:
                if mesh.rank:
                    Faults(patch).fails("preadv", BROKEN, f"/{FOLDER}/rank-1", after=1)
                with pytest.raises(StorageError if mesh.rank else RankFailure):
                    stepped(state, step, BATCHES[2:3])
        return sl.unshard(stepped(state, step, BATCHES[2:]).params)

    wanted = sl.simulate(run, False, mesh={"data": 2})
    assert_same(sl.simulate(run, fails, on_disk(tmp_path), mesh={"data": 2}), wanted)


FAULTS = {
    "disk full": lambda faults: faults.fails("pwritev", FULL, f"/{FOLDER}/rank-1", after=1, times=2),
    "cannot be read": lambda faults: faults.fails("preadv", BROKEN, f"/{FOLDER}/rank-1", after=1, times=1),
    "short read": lambda faults: faults.short("preadv", 100, f"/{FOLDER}/rank-1", after=2, times=2),
}  # fmt: skip


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_fails_on_a_rank_is_none_on_all(tmp_path, monkeypatch, fault, microbatches):
    """In backward, where other ranks wait in their exchanges, and in the update; both go on from the state before it."""

    def run(mesh, fails, *offload):
        state, step = start(mesh, sl.zero(3), sl.precision("bf16"), sl.accumulate(microbatches), *offload)
        state = stepped(state, step, BATCHES[:2])
        if fails:
            with monkeypatch.context() as patch:
                if mesh.rank:
                    FAULTS[fault](Faults(patch))
                with pytest.raises(StorageError if mesh.rank else RankFailure) as refused:
                    stepped(state, step, BATCHES[2:3])
            assert FOLDER in str(refused.value)
            assert "as it was" in refused.value.__notes__[0]
        return sl.unshard(stepped(state, step, BATCHES[2:]).params)

    wanted = sl.simulate(run, False, mesh={"data": 2})
    assert_same(sl.simulate(run, True, on_disk(tmp_path / "files"), mesh={"data": 2}), wanted)


def test_a_step_that_is_left_in_backward_gives_its_memory_back(tmp_path):
    """The next one lands in the same files."""
    mesh, fails = sl.make_mesh(), []

    def loss_fn(params, batch):
        loss = LOSS(params, batch)
        if fails:
            params["layers"][0]["weight"].register_hook(lambda grad: 1 / 0)
        return loss

    def run(*offload):
        state, step = sl.make_train_step(loss_fn, sl.shard(PARAMS, mesh, sl.chain(sl.zero(0), *offload)), tx())
        for batch in BATCHES[:3]:
            if offload:
                fails.append(True)
                with pytest.raises(ZeroDivisionError):
                    step(state, batch)
                fails.clear()
            state, _ = step(state, batch)
        return sl.unshard(state.params)

    assert_same(run(on_disk(tmp_path, None)), run())


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_that_names_what_is_not_finite_cannot_be_read(tmp_path, monkeypatch, stage):
    """All ranks raise the error of the disk, and go on from the state before."""

    def run(mesh, fails, *offload):
        state, step = start(mesh, sl.zero(stage), *offload)
        state = stepped(state, step, BATCHES[:1])
        if fails:
            with monkeypatch.context() as patch:
                if mesh.rank:
                    Faults(patch).fails("preadv", BROKEN, f"/{FOLDER}/rank-1")
                x, y = BATCHES[1]
                with pytest.raises(StorageError if mesh.rank else RankFailure) as refused:
                    stepped(state, step, [(x * float("inf"), y)])
            assert "as it was" in refused.value.__notes__[0]
        return sl.unshard(stepped(state, step, BATCHES[1:3]).params)

    wanted = sl.simulate(run, False, mesh={"data": 2})
    assert_same(sl.simulate(run, True, on_disk(tmp_path, None), mesh={"data": 2}), wanted)


def test_gradients_that_ranks_compare_cannot_be_read(tmp_path, monkeypatch):
    """Where layers are sliced, in the first step."""
    rules = {"up": "column", "down": "row"}
    draw = torch.Generator().manual_seed(0)
    params = {
        "up": {"weight": torch.randn(8, 4, generator=draw)},
        "down": {"weight": torch.randn(4, 8, generator=draw)},
        "scale": torch.ones(4),
    }

    def loss_fn(params, x):
        up = torch.tanh(torch.nn.functional.linear(x * params["scale"], params["up"]["weight"]))
        return torch.nn.functional.linear(up, params["down"]["weight"]).square().mean()

    def run(mesh, fails, *offload):
        sliced = sl.chain(sl.tensor_slicing(rules, axis="model"), *offload)
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, sliced), tx())
        if fails:
            with monkeypatch.context() as patch:
                if mesh.rank:
                    Faults(patch).fails("preadv", BROKEN, f"/{FOLDER}/rank-1")
                with pytest.raises(StorageError if mesh.rank else RankFailure):
                    step(state, torch.ones(2, 4))
        return sl.unshard(step(state, torch.ones(2, 4))[0].params)

    wanted = sl.simulate(run, False, mesh={"model": 2})
    assert_same(sl.simulate(run, True, on_disk(tmp_path, None), mesh={"model": 2}), wanted)


def test_a_sum_that_fails_gives_its_memory_back(tmp_path, monkeypatch):
    """As often as it fails, there is memory for the next step."""
    mesh = sl.make_mesh()
    state, step = start(mesh, sl.accumulate(2), on_disk(tmp_path, None))
    real = DiskGradientOffload._squares_of

    def full(self, bucket, grad):
        if bucket.name in self._squares:  # of a sum
            raise torch.OutOfMemoryError("no memory for squares")
        return real(self, bucket, grad)

    for _ in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(DiskGradientOffload, "_squares_of", full)
            with pytest.raises(torch.OutOfMemoryError):
                stepped(state, step, BATCHES[:1])
    stepped(state, step, BATCHES[:1])


def test_a_step_that_cannot_be_made_leaves_no_files_open(tmp_path, monkeypatch):
    """While its error is held, the next attempt opens the same folders."""
    mesh, disk = sl.make_mesh(), on_disk(tmp_path, None)
    params = sl.shard(PARAMS, mesh, disk)
    with pytest.raises(IllegalComposition, match="donate=False") as keeping:
        sl.make_train_step(LOSS, params, tx(), donate=False)
    with monkeypatch.context() as patch:
        Faults(patch).fails("posix_fallocate", FULL, f"/{FOLDER}/")
        with pytest.raises(StorageError) as full:
            sl.make_train_step(LOSS, params, tx())
    state, step = sl.make_train_step(LOSS, params, tx())
    stepped(state, step, BATCHES[:1])
    assert keeping.tb is not None and full.tb is not None


def test_gradients_without_a_step_are_in_memory(tmp_path):
    def run(*transforms):
        params = sl.shard(PARAMS, sl.make_mesh(), sl.chain(sl.zero(0), *transforms))
        return sl.unshard(sl.value_and_grad(LOSS)(params, BATCHES[0])[1])

    assert_same(run(on_disk(tmp_path)), run())
    assert not (tmp_path / FOLDER).exists()


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(IllegalComposition, match=r"use offload\('disk', gradients='disk', folder=\.\.\.\)"):
        sl.offload(gradients="disk")
    with pytest.raises(IllegalComposition, match=r"offload\('host', speculate=True\)"):
        sl.offload("disk", gradients="disk", folder=tmp_path, speculate=True)
    state, _ = start(sl.make_mesh(), on_disk(tmp_path / "used", None))
    with pytest.raises(StorageError, match="is in use"):
        start(sl.make_mesh(), on_disk(tmp_path / "used", None))
    del state
