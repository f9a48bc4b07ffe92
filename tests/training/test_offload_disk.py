"""Offload: states on disk train to the last bit as states in memory, through files that are what the plan says."""

import os
import re
import weakref

import optree
import pytest
import torch
from helpers.faults import BROKEN, FULL, Faults
from helpers.models import mlp, regression_batch
from helpers.offloaded import OVERFLOWING, assert_alike, stepped, trained, tx
from helpers.trees import assert_same

import shardlib as sl
from shardlib.collectives import primitives
from shardlib.common.thresholds import small
from shardlib.errors import DonatedStateError, IllegalComposition, RankFailure, StorageError
from shardlib.optim.on_disk import OnDisk

PLANS = {
    "one device": ([sl.zero(0)], {"data": 1}),
    "stage 1, fp16": ([sl.zero(1), OVERFLOWING], {"data": 2}),
    "stage 3, bf16": ([sl.zero(3), sl.precision("bf16")], {"data": 2}),
    "int8": ([sl.zero(3), sl.quantize("int8", "int8")], {"data": 2}),
    "frozen": ([sl.zero(2), sl.freeze(["*mlp*"])], {"data": 2}),
    "reproducible": ([sl.zero(2), sl.reproducible(4)], {"data": 2}),
    "pipeline": ([sl.pipeline("1f1b", microbatches=4), sl.zero(2)], {"pipe": 2, "data": 2}),
}  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_training_is_the_same_to_the_last_bit(plan, tmp_path):
    wanted = trained(*PLANS[plan], 10)
    for number, more in enumerate([{}, {"fraction": 0.5}]):
        folder = [tmp_path / f"{number}/{name}" for name in "ab"]
        assert_alike(trained(*PLANS[plan], 10, sl.offload("disk", folder=folder, **more)), wanted)


CHOOSING = {
    "masked": lambda: sl.optim.masked(sl.optim.adam(1e-2), "layers/0/*"),
    "slow weights": lambda: sl.optim.lookahead(sl.optim.adagrad(1e-2, 0.3), 2, 0.5),
}


@pytest.mark.parametrize("name", CHOOSING)
def test_first_states_are_those_of_all_parameters(name, tmp_path):
    """What an optimizer begins with depends on paths and values, though a few buckets at a time are in memory."""

    def run(mesh, *offload):
        return sl.unshard(stepped(*start(mesh, *offload, optimizer=CHOOSING[name]()), BATCHES).params)

    assert_same(run(sl.make_mesh(), sl.offload("disk", folder=tmp_path)), run(sl.make_mesh()))


LOSS, PARAMS = mlp([5, 7, 6, 3], torch.float32)
BATCHES = [regression_batch(12, 5, 3, torch.float32, seed=seed) for seed in range(5)]


def start(mesh, *transforms, optimizer=None, **options):
    params = sl.shard(PARAMS, mesh, sl.chain(*transforms))
    return sl.make_train_step(LOSS, params, optimizer or tx(), **options)


def test_the_files_and_the_memory_are_the_plans(tmp_path):
    disk, mesh = sl.offload("disk", folder=tmp_path), sl.make_mesh()
    state, _ = start(mesh, sl.precision("bf16"), disk)
    plan = sl.make_plan(PARAMS, mesh, sl.chain(sl.precision("bf16"), disk), optimizer=tx())
    tensors = [leaf for leaf in optree.tree_leaves(state.opt) if isinstance(leaf, torch.Tensor)]
    assert all(leaf.dim() == 0 for leaf in tensors), "counters alone are in memory"
    leaves = [leaf for leaf in optree.tree_leaves(state.opt) if isinstance(leaf, OnDisk)]
    assert sum(leaf.like.nbytes for leaf in leaves) == 12 * plan.parameters
    (file,) = tmp_path.glob("*.data")
    assert file.stat().st_size == plan.bytes("optimizer", "disk") == 3 * 3 * 2 * 4096
    assert plan.bytes("optimizer", "host") == leaves[0].store._pool._limit == 3 * 3 * 4096
    assert plan.bytes("grad", "disk") == 0 and plan.bytes("grad", "host") == 4 * plan.parameters
    assert "disk" in str(plan) and f"files in {tmp_path}" in str(plan)


def test_the_plan_counts_what_is_read_and_written(tmp_path, monkeypatch):
    disk, mesh = sl.offload("disk", folder=[tmp_path / "a", tmp_path / "b"]), sl.make_mesh()
    state, step = start(mesh, sl.precision("bf16"), disk)
    plan = sl.make_plan(PARAMS, mesh, sl.chain(sl.precision("bf16"), disk), optimizer=tx())
    moved: dict[str, list[int]] = {"preadv": [], "pwritev": []}

    def counted(call):
        real = getattr(os, call)

        def counting(fd, views, offset):
            done = real(fd, views, offset)
            if os.readlink(f"/proc/self/fd/{fd}").endswith(".data"):
                moved[call].append(done)  # by eight threads
            return done

        monkeypatch.setattr(os, call, counting)

    counted("preadv")
    counted("pwritev")
    stepped(state, step, BATCHES[:1])
    transfers = plan.transfers()
    found = sum(moved["preadv"]), sum(moved["pwritev"])
    assert found == (transfers["read"], transfers["written"]) == (3 * 3 * 4096,) * 2
    assert re.search(r"states +read +whole blocks +before the update +3", str(plan))


@pytest.mark.parametrize("back", ["disk", "host", "none"])
def test_a_checkpoint_holds_what_is_on_disk(tmp_path, back):
    """Saved from disk, restored to disk or to memory, and the other way round."""

    def disk(name):
        return [sl.offload("disk", folder=tmp_path / name)]

    def run(mesh, kinds):
        state, step = start(mesh, sl.zero(1), sl.precision("bf16"), *kinds[0])
        state = stepped(state, step, BATCHES[:2])
        sl.checkpoint.save(tmp_path / "run", state, keep=1)
        state, step = start(mesh, sl.zero(2), sl.precision("bf16"), *kinds[1])
        state = sl.checkpoint.restore(tmp_path / "run", state)
        state = stepped(state, step, BATCHES[2:])
        return sl.unshard(state.params)

    wanted = sl.simulate(run, ([], []), mesh={"data": 2})
    other = {"disk": disk("b"), "host": [sl.offload()], "none": []}[back]
    assert_same(sl.simulate(run, (disk("a"), other), mesh={"data": 2}), wanted)
    assert_same(sl.simulate(run, (other, disk("c")), mesh={"data": 2}), wanted)


def test_replaced_parameters_are_what_the_next_step_starts_from(tmp_path):
    def run(mesh, *offload):
        state, step = start(mesh, sl.precision("bf16"), *offload)
        state = stepped(state, step, BATCHES[:1])
        doubled = optree.tree_map(lambda leaf: leaf * 2, sl.unshard(state.params))
        state = stepped(sl.replace_params(state, doubled), step, BATCHES[1:])
        return sl.unshard(state.params)

    assert_same(run(sl.make_mesh(), sl.offload("disk", folder=tmp_path)), run(sl.make_mesh()))


def test_parameters_that_cannot_be_replaced_leave_the_state_before(tmp_path, monkeypatch):
    """The old state is not kept beside the new one; and one that was not replaced on some rank is the old one on all."""

    def run(mesh):
        state, step = start(mesh, sl.zero(1), sl.precision("bf16"), sl.offload("disk", folder=tmp_path))
        state = stepped(state, step, BATCHES[:1])
        doubled = optree.tree_map(lambda leaf: leaf * 2, sl.unshard(state.params))
        with pytest.raises(IllegalComposition, match="what is on disk is there once: leave donate=True"):
            sl.replace_params(state, doubled, donate=False)
        masters = [leaf.unpacked() for leaf in state.opt.masters.values()]
        primitives.all_gather_object(
            mesh, ["data"], mesh.rank == 0 and Faults(monkeypatch).fails("pwritev", BROKEN, "rank-1-", after=1, times=1)
        )
        with pytest.raises(StorageError if mesh.rank else RankFailure, match=r"rank 1: StorageError|Errno 5"):
            sl.replace_params(state, doubled)
        assert all(map(torch.equal, masters, [leaf.unpacked() for leaf in state.opt.masters.values()]))
        return sl.unshard(stepped(state, step, BATCHES[1:]).params)

    def plain(mesh):
        return sl.unshard(stepped(*start(mesh, sl.zero(1), sl.precision("bf16")), BATCHES).params)

    assert_same(sl.simulate(run, mesh={"data": 2}), sl.simulate(plain, mesh={"data": 2}))


@pytest.fixture
def read(monkeypatch):
    """A list that gets, with each tensor that is read from disk outside of steps, how many of them are alive."""
    alive, most, part = weakref.WeakSet(), [], OnDisk.part

    def counted(self, first, stop):
        values = part(self, first, stop)
        alive.add(values)
        most.append(len(alive))
        return values

    monkeypatch.setattr(OnDisk, "part", counted)
    return most


def test_replacing_reads_one_master_at_a_time(tmp_path, read):
    """Also for trees that hold parameters: what was read is given back before the next."""
    optimizer = sl.optim.lookahead(sl.optim.adam(1e-2), 2, 0.5)
    state, _ = start(sl.make_mesh(), sl.offload("disk", folder=tmp_path), optimizer=optimizer)
    sl.replace_params(state, optree.tree_map(lambda leaf: leaf * 2, PARAMS))
    assert len(read) == 3 + 2 * 3 and max(read) <= 3  # old and new slow parameters, and their master


@pytest.mark.parametrize("manager", [False, True])
def test_a_checkpoint_reads_a_few_tensors_at_a_time(tmp_path, read, manager):
    loss, params = mlp([5] * 12, torch.float32)
    disk = sl.offload("disk", folder=tmp_path / "states")
    state, step = sl.make_train_step(loss, sl.shard(params, sl.make_mesh(), disk), tx())
    state, _ = step(state, regression_batch(12, 5, 5, torch.float32))
    with small(256):
        if manager:
            with sl.checkpoint.Manager(tmp_path / "run") as managed:
                managed.save(state)
                assert managed.latest() is not None  # at once: a copy for later would be all of it
        else:
            sl.checkpoint.save(tmp_path / "run", state)
    assert len(read) == 3 * 11 and max(read) <= 5  # two batches on their way, and one tensor between them


def test_a_moved_state_leaves_its_files_where_they_are(tmp_path):
    mesh = sl.make_mesh()
    wanted = stepped(*start(mesh), BATCHES)
    state, step = start(mesh, sl.offload("disk", folder=tmp_path / "states"))
    state = stepped(state, step, BATCHES[:2])
    state = sl.to_device(sl.to_disk(state, tmp_path / "parked"))
    assert_same(sl.unshard(stepped(state, step, BATCHES[2:]).params), sl.unshard(wanted.params))


def test_what_cannot_be_on_disk_is_refused(tmp_path):
    mesh, disk = sl.make_mesh(), sl.offload("disk", folder=tmp_path)
    for transform in (lambda: sl.offload("disk"), lambda: sl.offload("host", folder=tmp_path)):
        with pytest.raises(IllegalComposition, match="states on disk need a folder, others have none"):
            transform()
    late_clip = sl.optim.chain(sl.optim.adam(1e-3), sl.optim.clip_by_global_norm(1.0))
    across = r"reads across parameters, so .* put clips first .* for skip_nonfinite.* offload\('host'"
    undeclared = sl.optim.GradientTransformation(lambda params: (), lambda updates, state, params: (updates, state))
    for optimizer, message in {
        late_clip: across,
        sl.optim.skip_nonfinite(sl.optim.adam(1e-3), 3): across,
        undeclared: "declares no locality, so .*; pass locality=",
        sl.optim.onebit_adam(1e-3, 10): r"sums gradients itself, so that it needs all of them; use offload\('host'\)",
    }.items():
        with pytest.raises(IllegalComposition, match=message):
            start(mesh, disk, optimizer=optimizer)
    with pytest.raises(IllegalComposition, match="donate=False keeps the old state of every step"):
        start(mesh, disk, donate=False)
    state, _ = start(mesh, disk)
    with pytest.raises(StorageError, match="is in use"):
        start(mesh, disk)
    del state


def test_a_rank_without_space_is_an_error_of_all(tmp_path, monkeypatch):
    def run(mesh):
        with pytest.raises(StorageError if mesh.rank else RankFailure) as refused:
            start(mesh, sl.zero(1), sl.offload("disk", folder=tmp_path))
        return str(refused.value)

    with monkeypatch.context() as patch:
        Faults(patch).fails("posix_fallocate", FULL, "rank-1-")
        first, own = sl.simulate(run, mesh={"data": 2})
    sl.simulate(lambda mesh: start(mesh, sl.zero(1), sl.offload("disk", folder=tmp_path)) and None, mesh={"data": 2})
    assert "Free space there" in own and "could not be opened:\n  - rank 1: StorageError: making" in first


FAILING = {
    "one device": (0, {"data": 1}, PARAMS),
    "stage 1": (1, {"data": 2}, PARAMS),
    "stage 1, leaves alone": (1, {"data": 2}, {"layers": [{"weight": layer["weight"]} for layer in PARAMS["layers"]]}),
    "stage 3": (3, {"data": 2}, PARAMS),
}


def without_bias(params, batch):
    """`LOSS` of layers that may have weights alone."""
    layers = [{"bias": layer["weight"].new_zeros(len(layer["weight"])), **layer} for layer in params["layers"]]
    return LOSS({"layers": layers}, batch)


@pytest.mark.parametrize("fault", ["a write", "a read", "a later write", "memory"])
@pytest.mark.parametrize("plan", FAILING)
def test_a_step_that_fails_leaves_the_state_before_it(tmp_path, monkeypatch, plan, fault):
    """On all ranks, to the bit: it can be saved, and trained on. The other ranks' errors name the one that failed."""
    stage, sizes, params = FAILING[plan]

    def start(mesh, *transforms):
        return sl.make_train_step(without_bias, sl.shard(params, mesh, sl.chain(*transforms)), tx())

    def arm(patch):
        part = f"rank-{max(sizes.values()) - 1}-"
        if fault == "memory":
            return failing_update(patch, max(sizes.values()) - 1)
        call, after = {"a write": ("pwritev", 0), "a read": ("preadv", 4), "a later write": ("pwritev", 7)}[fault]
        return Faults(patch).fails(call, BROKEN, part, after=after, times=1)

    def run(mesh, fails):
        disk = sl.offload("disk", folder=tmp_path / ("states" if fails else "whole"))
        memory = [sl.zero(stage), *([sl.precision("bf16")] if stage else [])]
        state, step = start(mesh, *memory, disk)
        state = stepped(state, step, BATCHES[:2])
        if fails:
            before = [buffer.clone() for buffer in state.params.buffers.values()]
            primitives.all_gather_object(mesh, ["data"], mesh.rank == 0 and arm(monkeypatch))
            with pytest.raises((StorageError, MemoryError, RankFailure)) as refused:
                stepped(state, step, BATCHES[2:3])
            primitives.all_gather_object(mesh, ["data"], mesh.rank == 0 and monkeypatch.undo())
            assert "The state that the step was given is as it was" in refused.value.__notes__[0]
            if mesh.rank + 1 < mesh.size:
                assert re.search("the step was not made:\n  - rank 1: (StorageError|MemoryError)", str(refused.value))
            assert all(map(torch.equal, before, state.params.buffers.values()))
            sl.checkpoint.save(tmp_path / "run", state)
            restored, again = start(mesh, *memory)
            restored = stepped(sl.checkpoint.restore(tmp_path / "run", restored), again, BATCHES[2:])
        state = stepped(state, step, BATCHES[2:])
        if fails:
            assert_same(sl.unshard(restored.params), sl.unshard(state.params))
        return sl.unshard(state.params)

    wanted = sl.simulate(run, False, mesh=sizes)
    assert_same(sl.simulate(run, True, mesh=sizes), wanted)


def failing_update(patch, rank):
    """The second bucket's update runs out of memory on a rank."""
    from shardlib.optim.group_update import GroupUpdate

    real, calls = GroupUpdate.run, []

    def update(self, *args):
        calls.append(self._mesh.rank)
        if self._mesh.rank == rank and calls.count(rank) == 2:
            raise MemoryError("out of memory")
        return real(self, *args)

    patch.setattr(GroupUpdate, "run", update)


def test_a_step_that_cannot_be_taken_back_says_so(tmp_path, monkeypatch):
    """A disk that neither writes the new states nor reads the old ones; or a share of the states that is in memory."""
    mesh = sl.make_mesh()
    for more, lost in (
        ({}, "The states are lost .*reading.*: restore a checkpoint"),
        ({"fraction": 0.5}, "The states are lost .*in memory.*: restore a checkpoint"),
    ):
        state, step = start(mesh, sl.offload("disk", folder=tmp_path / str(len(more)), **more))
        with monkeypatch.context() as patch:
            Faults(patch).fails("pwritev", BROKEN, ".data")
            Faults(patch).fails("preadv", BROKEN, ".data", after=3)
            with pytest.raises(StorageError, match=r"(reading|writing) .* of .*\.data: \[Errno 5\]") as refused:
                step(state, BATCHES[2])
        assert re.search(lost, refused.value.__notes__[0])
        with pytest.raises(DonatedStateError):
            step(state, BATCHES[2])


def test_a_step_waits_for_no_sync(tmp_path, monkeypatch):
    state, step = start(sl.make_mesh(), sl.offload("disk", folder=tmp_path))
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: pytest.fail("it waits for the disk"))
    stepped(state, step, BATCHES)
