"""Offload: parameters on disk train to the last bit as parameters in memory, and a few units at most are in memory."""

import os
import re
import threading

import optree
import pytest
import torch
from helpers.faults import BROKEN, FULL, Faults, damages
from helpers.models import mlp, regression_batch
from helpers.offloaded import OVERFLOWING, assert_alike, stepped, trained, tx
from helpers.trees import assert_same

import shardlib as sl
from shardlib.common._compat import FakeTensor
from shardlib.errors import DonatedStateError, IllegalComposition, RankFailure, StorageError
from shardlib.execute.counting import LiveBytes
from shardlib.plan.program import messages
from shardlib.sharded.params_on_disk import ParamsOnDisk

FOLDER = "parameters"

PLANS = {
    "one device": ([sl.zero(0)], {"data": 1}),
    "stage 0, bf16": ([sl.zero(0), sl.precision("bf16")], {"data": 2}),
    "stage 1": ([sl.zero(1)], {"data": 2}),
    "stage 1, fp16": ([sl.zero(1), OVERFLOWING], {"data": 2}),
    "stage 2, bf16": ([sl.zero(2), sl.precision("bf16")], {"data": 2}),
    "stage 3": ([sl.zero(3)], {"data": 2}),
    "stage 3, bf16": ([sl.zero(3), sl.precision("bf16")], {"data": 2}),
    "int8": ([sl.zero(3), sl.quantize("int8", "int8")], {"data": 2}),
    "frozen": ([sl.zero(2), sl.freeze(["*mlp*"])], {"data": 2}),
    "accumulated": ([sl.zero(3), sl.accumulate(2)], {"data": 2}),
    "recomputed": ([sl.zero(3), sl.remat("full")], {"data": 1}),
    "tiles": ([sl.zero(3), sl.tile(["*mlp/up/weight"], 2)], {"data": 2}),
    "reproducible": ([sl.zero(2), sl.reproducible(4)], {"data": 2}),
    "pipeline": ([sl.pipeline("1f1b", microbatches=4), sl.zero(2)], {"pipe": 2, "data": 2}),
}  # fmt: skip


def on_disk(folder, **options):
    return sl.offload("disk", params="disk", folder=folder, **options)


@pytest.mark.parametrize("plan", PLANS)
def test_training_is_the_same_to_the_last_bit(plan, tmp_path):
    wanted = trained(*PLANS[plan], 5)
    for number, more in enumerate([{}, {"fraction": 0.5}, {"fraction": 0.0}]):
        folder = [tmp_path / f"{number}/{name}" for name in "ab"]
        assert_alike(trained(*PLANS[plan], 5, on_disk(folder, **more)), wanted)


LOSS, PARAMS = mlp([5, 7, 6, 3], torch.float32)
BATCHES = [regression_batch(12, 5, 3, torch.float32, seed=seed) for seed in range(5)]


def start(mesh, *transforms, params=PARAMS, **options):
    return sl.make_train_step(LOSS, sl.shard(params, mesh, sl.chain(*transforms)), tx(), **options)


def test_tied_and_whole_number_leaves(tmp_path):
    shared = torch.randn(6, 6)

    def run(*transforms):
        params = {"in": shared, "out": shared, "steps": torch.arange(3)}

        def loss_fn(p, x):
            return ((x @ p["in"]).tanh() @ p["out"].mT * p["steps"].sum()).square().mean()

        state, step = sl.make_train_step(loss_fn, sl.shard(params, sl.make_mesh(), sl.chain(*transforms)), tx())
        for _ in range(3):
            state, _ = step(state, torch.ones(4, 6))
        whole = sl.unshard(state.params)
        assert whole["in"] is whole["out"]
        return whole

    assert_same(run(on_disk(tmp_path)), run(sl.zero(0)))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_bytes_are_the_plans(tmp_path, monkeypatch, stage):
    """Files, the window of host memory, and what is read and written: of masters and without."""
    moved: dict[tuple[str, bool], list[int]] = {}

    def counted(call):
        real = getattr(os, call)

        def counting(fd, views, offset):
            done, path = real(fd, views, offset), os.readlink(f"/proc/self/fd/{fd}")
            if path.endswith(".data"):
                moved.setdefault((call, FOLDER in path), []).append(done)  # by sixteen threads
            return done

        monkeypatch.setattr(os, call, counting)

    mesh = sl.make_mesh()
    for more in ([sl.precision("bf16")], [], [sl.freeze(["*0*"])], [sl.accumulate(2)]):
        moved.clear()
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        transform = sl.chain(sl.zero(stage), *more, on_disk(folder))
        params = sl.shard(PARAMS, mesh, transform)
        (file,) = (folder / FOLDER).glob("*.data")
        plan = sl.make_plan(PARAMS, mesh, transform, optimizer=tx(), loss_fn=LOSS, batch=BATCHES[0])
        assert file.stat().st_size == plan.bytes("param", "disk") == 3 * 2 * 4096
        assert params.on_disk.files.store._pool._limit == plan.bytes("param", "host") == 3 * 4096
        assert plan.bytes("param", "device") == 0
        state, step = sl.make_train_step(LOSS, params, tx())
        state, _ = step(state, BATCHES[0])
        with monkeypatch.context():
            counted("preadv")
            counted("pwritev")
            moved.clear()
            state, _ = step(state, BATCHES[1])
            found = {key: sum(sizes) for key, sizes in moved.items()}
        monkeypatch.undo()
        for way, call in (("read", "preadv"), ("written", "pwritev")):
            of_params = [
                sent.bytes for sent in messages(plan, moves=True) if (sent.what, sent.axis) == ("parameters", way)
            ]
            assert found[call, True] == sum(of_params) > 0
            assert found[call, True] + found[call, False] == plan.transfers()[way]
        assert found["pwritev", True] == 4096 * len(plan.trained), "frozen parameters are never written"
        assert re.search(r"parameters +read +whole blocks +before each use", str(plan))
        assert re.search(r"parameters +written +whole blocks +after the update", str(plan))
        assert "In disk memory" in str(plan)
        del state, params, step


def deep(layers=24, width=64):
    """A function that makes parameters, a loss of them, and the bytes of one layer."""

    def init():
        return {"layers": [{"w": torch.randn(width, width) / width**0.5} for _ in range(layers)]}

    def loss_fn(params, x):
        for layer in params["layers"]:
            x = torch.tanh(x @ layer["w"])
        return x.square().mean()

    return init, loss_fn, 4 * width**2


class RealBytes(LiveBytes):
    """Bytes of tensors that have memory; a deferred initialiser has others."""

    def _meet(self, value, made):
        if not isinstance(value, FakeTensor):
            super()._meet(value, made)


def test_never_are_all_parameters_in_memory(tmp_path):
    """From the first value on: a unit or two beside the pool, of six."""
    init, loss_fn, layer = deep()
    mesh, x = sl.make_mesh(), torch.ones(2, 64)
    with RealBytes() as live:
        params = sl.shard(init, mesh, on_disk(tmp_path))
        evaluate = sl.make_eval_step(lambda p, x: loss_fn(p, x), params)
        found = [evaluate(params, x) for _ in range(3)]
        assert len(sl.checkpoint.export_safetensors(tmp_path / "out", params) or "") == 0
    assert live.peak < 5 * layer
    assert params.on_disk.files.store._pool._limit == 6 * layer
    whole = sl.checkpoint.import_safetensors(tmp_path / "out", sl.shard(init, mesh))
    assert found == [sl.make_eval_step(lambda p, x: loss_fn(p, x), whole)(whole, x)] * 3


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_an_update_has_one_bucket_of_parameters_in_memory(tmp_path, fraction):
    """Of states on the device too. What is made besides is a step's gradients."""
    init, loss_fn, layer = deep()
    params = sl.shard(init, sl.make_mesh(), on_disk(tmp_path, fraction=fraction))
    state, step = sl.make_train_step(loss_fn, params, sl.optim.sgd(0.1))
    state, _ = step(state, torch.ones(2, 64))
    with RealBytes() as live:
        state, _ = step(state, torch.ones(2, 64))
    assert 24 * layer < live.peak < (24 + 6) * layer


def test_units_are_read_three_ahead(tmp_path, monkeypatch):
    """Reads of a unit end no sooner than its third predecessor is used: they would wait forever if they began later."""
    init, _loss_fn, _ = deep(layers=8)
    params = sl.shard(init, sl.make_mesh(), on_disk(tmp_path))
    used, slow = [threading.Event() for _ in range(8)], []

    def noting(params, x):
        for number, layer in enumerate(params["layers"]):
            x = torch.tanh(x @ layer["w"])
            used[number].set()
        return x.square().mean()

    evaluate = sl.make_eval_step(noting, params)
    first = evaluate(params, torch.ones(2, 64))
    for event in used:
        event.clear()

    def seen():
        return sum(event.is_set() for event in used)

    begun, fetch = [], params.on_disk.files.store.fetch
    monkeypatch.setattr(
        params.on_disk.files.store, "fetch", lambda name: (begun.append((name, seen())), fetch(name))[1]
    )
    real = os.preadv

    def preadv(fd, views, offset):
        done = real(fd, views, offset)
        number = len(slow)
        slow.append(number)
        if number >= 3:
            assert used[number - 3].wait(30), "the read is waited for before the use of a unit far behind"
        return done

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(params.on_disk.files.store, "_threads", _OneByOne())
    assert evaluate(params, torch.ones(2, 64)) == first
    assert [uses for _, uses in begun] == [0, 0, 0, *range(5)] or [uses for _, uses in begun] == [
        0,
        0,
        0,
        0,
        *range(1, 5),
    ]


class _OneByOne:
    """Threads that take requests in order."""

    def __init__(self):
        from concurrent.futures import ThreadPoolExecutor

        self._pool = ThreadPoolExecutor(1)

    def submit(self, *args):
        return self._pool.submit(*args)

    def shutdown(self, wait=True):
        self._pool.shutdown()


@pytest.mark.parametrize("back", ["disk", "host", "none"])
def test_a_checkpoint_holds_what_is_on_disk(tmp_path, back):
    def disk(name):
        return [on_disk(tmp_path / name)]

    def run(mesh, kinds):
        state, step = start(mesh, sl.zero(1), sl.precision("bf16"), *kinds[0])
        state = stepped(state, step, BATCHES[:2])
        sl.checkpoint.save(tmp_path / "run", state, keep=1)
        state, step = start(mesh, sl.zero(3), sl.precision("bf16"), *kinds[1])
        state = sl.checkpoint.restore(tmp_path / "run", state)
        state = stepped(state, step, BATCHES[2:])
        return sl.unshard(state.params)

    wanted = sl.simulate(run, ([], []), mesh={"data": 2})
    other = {"disk": disk, "host": lambda name: [sl.offload(params="host")], "none": lambda name: []}[back]
    assert_same(sl.simulate(run, (disk("a"), other("b")), mesh={"data": 2}), wanted)
    assert_same(sl.simulate(run, (other("c"), disk("d")), mesh={"data": 2}), wanted)


CHANGES = {
    "replaced": lambda state, whole: sl.replace_params(state, whole),
    "assigned": lambda state, whole: setattr(state, "params", optree.tree_map(lambda leaf: leaf * 2, state.params)) or state,
    "mapped": lambda state, whole: sl.replace_params(state, optree.tree_map(lambda leaf: leaf * 2, state.params)),
    "imported": lambda state, whole: sl.checkpoint.import_safetensors("double", state.params) and state,
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("precision", [[], [sl.precision("bf16")]], ids=["fp32", "bf16"])
def test_other_parameters_are_what_the_next_step_starts_from(tmp_path, monkeypatch, change, precision):
    monkeypatch.chdir(tmp_path)

    def run(mesh, *offload):
        state, step = start(mesh, *precision, *offload)
        state = stepped(state, step, BATCHES[:1])
        doubled = optree.tree_map(lambda leaf: leaf * 2, sl.unshard(state.params))
        sl.checkpoint.export_safetensors("double", sl.shard(doubled, mesh))
        state = CHANGES[change](state, doubled)
        assert_same(sl.unshard(state.params), doubled)
        after = stepped(state, step, BATCHES[1:]).params
        assert (after.on_disk is not None) == bool(offload)
        return sl.unshard(after)

    assert_same(run(sl.make_mesh(), on_disk(tmp_path)), run(sl.make_mesh()))


def test_a_tree_of_earlier_parameters_is_refused(tmp_path):
    mesh = sl.make_mesh()
    state, step = start(mesh, on_disk(tmp_path))
    kept, doubled = state.params, optree.tree_map(lambda leaf: leaf * 2, state.params)
    state.params = doubled
    state = stepped(state, step, BATCHES[:1])
    with pytest.raises(DonatedStateError, match="where a later state is now"):
        kept.buffers["0/float32"]


@pytest.mark.parametrize("way", ["host", "disk", "folder"])
def test_a_moved_state_comes_back(tmp_path, way):
    """What is on disk is copied from its files, or stays there."""
    mesh = sl.make_mesh()
    wanted = stepped(*start(mesh, sl.precision("bf16")), BATCHES)
    state, step = start(mesh, sl.precision("bf16"), on_disk(tmp_path / "files"))
    state = stepped(state, step, BATCHES[:2])
    moved = sl.to_host(state) if way == "host" else sl.to_disk(state, tmp_path / "parked")
    if way == "folder":
        fresh, step = start(mesh, sl.precision("bf16"), on_disk(tmp_path / "others"))
        state = sl.to_device(tmp_path / "parked", like=fresh)
    else:
        state = sl.to_device(moved)
    assert state.step == 2
    assert_same(sl.unshard(stepped(state, step, BATCHES[2:]).params), sl.unshard(wanted.params))


def test_a_moved_state_leaves_no_memory_of_its_step(tmp_path):
    """Through which states and parameters pass; the next step makes it anew."""
    mesh = sl.make_mesh()
    state, step = start(mesh, sl.precision("bf16"), on_disk(tmp_path))
    state = stepped(state, step, BATCHES[:2])
    stores = [state.params.on_disk.files.store, next(iter(state.opt.masters.values())).store]
    assert all(store._pool._idle for store in stores)
    moved = sl.to_host(state)
    assert not any(store._pool._idle or store._pool._lent for store in stores)
    wanted = stepped(*start(mesh, sl.precision("bf16")), BATCHES)
    assert_same(sl.unshard(stepped(sl.to_device(moved), step, BATCHES[2:]).params), sl.unshard(wanted.params))


def test_gradients_and_updates_without_a_step(tmp_path):
    def run(*transforms):
        params = sl.shard(PARAMS, sl.make_mesh(), sl.chain(sl.zero(0), *transforms))
        optimizer = tx()
        _, grads = sl.value_and_grad(LOSS)(params, BATCHES[0])
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return sl.unshard(sl.optim.apply_updates(params, updates))

    assert_same(run(on_disk(tmp_path)), run())


def test_what_cannot_be_on_disk_is_refused(tmp_path):
    mesh = sl.make_mesh()
    with pytest.raises(IllegalComposition, match=r"use offload\('disk', params='disk', folder=\.\.\.\)"):
        sl.offload(params="disk")
    with pytest.raises(IllegalComposition, match="donate=False keeps the old state of every step"):
        start(mesh, on_disk(tmp_path), donate=False)
    with pytest.raises(IllegalComposition, match="donate=False keeps the old state of every step"):
        start(mesh, on_disk(tmp_path, fraction=0.0), donate=False)
    params = sl.shard(PARAMS, mesh, on_disk(tmp_path))
    with pytest.raises(StorageError, match="is in use"):
        sl.shard(PARAMS, mesh, on_disk(tmp_path))
    del params


def test_a_rank_without_space_is_an_error_of_all(tmp_path, monkeypatch):
    def run(mesh):
        with pytest.raises(StorageError if mesh.rank else RankFailure) as refused:
            start(mesh, sl.zero(1), on_disk(tmp_path / call))
        return str(refused.value)

    for call in ("posix_fallocate", "pwritev"):
        with monkeypatch.context() as patch:
            Faults(patch).fails(call, FULL, f"{FOLDER}/rank-1-of-2")
            first, own = sl.simulate(run, mesh={"data": 2})
        assert "Free space there" in own and "rank 1: StorageError: " in first


FAULTS = {
    "disk full": (lambda faults, part: faults.fails("pwritev", FULL, part, after=1, times=2), r"writing .*Free space"),
    "broken": (lambda faults, part: faults.fails("pwritev", BROKEN, part, after=1, times=2), r"writing .*\[Errno 5\]"),
    "cannot be read": (lambda faults, part: faults.fails("preadv", BROKEN, part, after=2, times=1), r"reading .*\[Errno 5\]"),
    "short read": (lambda faults, part: faults.short("preadv", 100, part, after=2, times=2), r"reading .*The file was cut"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("part", [f"{FOLDER}/rank", ".data"], ids=["parameters", "any"])
@pytest.mark.parametrize("precision", [[], [sl.precision("bf16")]], ids=["fp32", "bf16"])
def test_a_step_that_fails_leaves_the_last_one(tmp_path, monkeypatch, fault, part, precision):
    """Its parameters and its states, which can be saved and trained further."""
    mesh = sl.make_mesh()
    wanted = sl.unshard(stepped(*start(mesh, *precision), BATCHES).params)
    state, step = start(mesh, *precision, on_disk(tmp_path / "files"))
    state = stepped(state, step, BATCHES[:2])
    before = sl.unshard(state.params)
    arm, message = FAULTS[fault]
    with monkeypatch.context() as patch:
        arm(Faults(patch), part)
        with pytest.raises(StorageError, match=message) as refused:
            stepped(state, step, BATCHES[2:3])
        assert ".data" in str(refused.value)
    assert state.step == 2 and damages(state.params.on_disk.files.store) == []
    assert_same(sl.unshard(state.params), before)
    sl.checkpoint.save(tmp_path / "run", state)
    assert_same(sl.unshard(stepped(state, step, BATCHES[2:]).params), wanted)
    fresh, step = start(mesh, *precision)
    fresh = sl.checkpoint.restore(tmp_path / "run", fresh)
    assert_same(sl.unshard(stepped(fresh, step, BATCHES[2:]).params), wanted)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("part", [f"{FOLDER}/rank-1-of-2", "files/rank-1-of-2"], ids=["parameters", "states"])
def test_a_step_that_fails_on_a_rank_is_taken_back_on_all(tmp_path, monkeypatch, stage, part):
    """The other rank reaches the end of its update, with its gathers, and both go on from the state before it."""

    def run(mesh, fault, *offload):
        state, step = start(mesh, sl.zero(stage), sl.precision("bf16"), *offload)
        state = stepped(state, step, BATCHES[:2])
        if fault:
            with monkeypatch.context() as patch:
                if mesh.rank:
                    Faults(patch).fails("pwritev", BROKEN, part)
                with pytest.raises(StorageError if mesh.rank else RankFailure):
                    stepped(state, step, BATCHES[2:3])
        return sl.unshard(stepped(state, step, BATCHES[2:]).params)

    wanted = sl.simulate(run, False, mesh={"data": 2})
    assert_same(sl.simulate(run, True, on_disk(tmp_path / "files"), mesh={"data": 2}), wanted)


def test_a_file_that_is_cut_is_named(tmp_path):
    mesh = sl.make_mesh()
    state, step = start(mesh, on_disk(tmp_path))
    state = stepped(state, step, BATCHES[:1])
    (file,) = (tmp_path / FOLDER).glob("*.data")
    os.truncate(file, 4096)
    with pytest.raises(StorageError, match=r"parameters/rank-0.*\.data.*The file was cut"):
        stepped(state, step, BATCHES[1:2])


def test_files_close_with_the_last_tree(tmp_path):
    import gc

    mesh = sl.make_mesh()
    state, step = start(mesh, on_disk(tmp_path))
    state = stepped(state, step, BATCHES[:1])
    del state, step
    gc.collect()
    start(mesh, on_disk(tmp_path))


def test_memory_is_given_back_before_a_read_waits_for_it(tmp_path):
    """Units that were announced and are not used yet make room for one that is."""
    params = sl.shard(
        {"layers": [{"w": torch.full((32, 32), float(n))} for n in range(9)]}, sl.make_mesh(), on_disk(tmp_path)
    )
    files: ParamsOnDisk = params.on_disk.files
    names = list(params.buffers)
    for name in names:
        files.announce(name)
    assert len(files._begun) == 6, "as many as fit"
    for number, name in enumerate(names):
        assert torch.equal(files.get(name), torch.full((1024,), float(number)))
    files.announce(names[1])
    files.put(names[1], torch.zeros(1024))
    assert not files.get(names[1]).any(), "what was announced before the write is read again"
