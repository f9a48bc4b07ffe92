"""A state saved on one mesh and stage trains on any other as if it had never been saved."""

import os

import optree
import pytest
import torch

import shardlib as sl
from shardlib import checkpoint
from shardlib.errors import RankFailure, TreeError


def _start(mesh, stage, precision=None, width=6):
    torch.manual_seed(0)
    params = {
        "embed": {"w": torch.randn(10, width, dtype=torch.float64)},
        "blocks": [
            {
                "w": torch.randn(width, width, dtype=torch.float64) * 0.3,
                "b": torch.randn(width + 1, dtype=torch.float64),
            }
            for _ in range(2)
        ],
        "head": {"w": torch.randn(10, width, dtype=torch.float64)},
    }

    def loss_fn(params, batch):
        x = params["embed"]["w"][batch["x"]].double()
        for block in params["blocks"]:
            x = torch.nn.functional.linear(x, block["w"].double(), block["b"][:-1].double()).tanh()
        logits = torch.nn.functional.linear(x, params["head"]["w"].double())
        return torch.nn.functional.cross_entropy(logits, batch["y"])

    transform = sl.zero(stage) if precision is None else sl.chain(sl.zero(stage), sl.precision(precision))
    optimizer = sl.optim.chain(
        sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(sl.optim.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10))
    )
    return sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), optimizer)


def _batch(mesh, step):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randint(0, 10, (2, 24), generator=generator)
    return {"x": x.chunk(mesh.size)[mesh.rank], "y": y.chunk(mesh.size)[mesh.rank]}


def _save_midway(mesh, folder, stage, precision):
    state, step = _start(mesh, stage, precision)
    for index in range(6):
        if index == 3:
            checkpoint.save(folder, state)
        state, _ = step(state, _batch(mesh, index))
    return sl.unshard(state.params)


def _resume(mesh, folder, stage, precision):
    state, step = _start(mesh, stage, precision)
    state = checkpoint.restore(checkpoint.latest(folder), state)
    assert state.step == 3
    for index in range(3, 6):
        state, _ = step(state, _batch(mesh, index))
    return sl.unshard(state.params)


@pytest.mark.parametrize("ranks, stage", [(1, 0), (2, 1), (2, 2), (4, 3), (3, 3)])
def test_resharding_on_resume(tmp_path, ranks, stage):
    straight = sl.simulate(_save_midway, tmp_path, 3, None, mesh={"data": 3})[0]
    resumed = sl.simulate(_resume, tmp_path, stage, None, mesh={"data": ranks})[0]
    for wanted, got in zip(optree.tree_leaves(straight), optree.tree_leaves(resumed), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_the_saved_runs_key_is_taken_up(tmp_path):
    """A resumed run draws what the saved one draws next, whatever key the fresh state was made with."""
    batch = torch.randn(64, generator=torch.Generator().manual_seed(1))

    def start(rng):
        def loss_fn(params, batch, rng):
            return sl.dropout(params["w"] * batch, 0.5, rng).sum()

        return sl.make_train_step(loss_fn, {"w": torch.ones(64)}, sl.optim.sgd(0.1), rng=rng)

    state, step = start(5)
    state, _ = step(state, batch)
    checkpoint.save(tmp_path, state)
    _, wanted = step(state, batch)
    state, step = start(0)
    _, found = step(checkpoint.restore(tmp_path, state), batch)
    assert found["loss"] == wanted["loss"]


def test_masters_are_kept(tmp_path):
    straight = sl.simulate(_save_midway, tmp_path, 2, "bf16", mesh={"data": 2})[0]
    resumed = sl.simulate(_resume, tmp_path, 2, "bf16", mesh={"data": 2})[0]
    for wanted, got in zip(optree.tree_leaves(straight), optree.tree_leaves(resumed), strict=True):
        assert torch.equal(wanted, got)


@pytest.mark.parametrize(
    "saved, wanted", [("bf16", None), ("bf16", "fp16"), (None, "bf16"), (None, "fp16"), ("fp16", None)]
)
def test_in_another_precision_masters_are_the_parameters(tmp_path, saved, wanted):
    """No digit is lost on the way; what is computed with is the masters rounded."""

    def wide(state):
        return torch.cat([buffer for _, buffer in sorted((state.opt.masters or state.params.buffers).items())])

    def first(mesh):
        _save_midway(mesh, tmp_path, 3, saved)
        state, _ = _start(mesh, 3, saved)
        return wide(checkpoint.restore(checkpoint.latest(tmp_path), state))

    def second(mesh):
        state, step = _start(mesh, 3, wanted)
        state = checkpoint.restore(checkpoint.latest(tmp_path), state)
        restored = wide(state).clone()
        for name, master in state.opt.masters.items():
            rounded = state.params.buffers[name]
            assert torch.equal(rounded, master.to(rounded.dtype))
        step(state, _batch(mesh, 3))
        return restored

    for before, after in zip(sl.simulate(first, mesh={"data": 2}), sl.simulate(second, mesh={"data": 2}), strict=True):
        assert torch.equal(before.float(), after.float())


def test_another_model_is_refused_and_nothing_changes(tmp_path):
    def run(mesh):
        state, _ = _start(mesh, 3)
        checkpoint.save(tmp_path, state)
        other, _ = _start(mesh, 3, width=8)
        before = [buffer.clone() for buffer in other.params.buffers.values()]
        with pytest.raises(TreeError, match=r"params/blocks/0/b: saved \[7\], wanted \[9\]"):
            checkpoint.restore(checkpoint.latest(tmp_path), other)
        assert all(torch.equal(a, b) for a, b in zip(before, other.params.buffers.values(), strict=True))

    sl.simulate(run, mesh={"data": 2})


def test_only_complete_checkpoints_count_and_old_ones_go(tmp_path):
    def run(mesh):
        state, step = _start(mesh, 3)
        for index in range(4):
            checkpoint.save(tmp_path, state, keep=2)
            state, _ = step(state, _batch(mesh, index))

    sl.simulate(run, mesh={"data": 2})
    (tmp_path / "step-00000009.partial").mkdir()
    (tmp_path / "step-00000008").mkdir()
    assert checkpoint.latest(tmp_path).name == "step-00000003"
    complete = sorted(path.parent.name for path in tmp_path.glob("*/manifest.json"))
    assert complete == ["step-00000002", "step-00000003"]


def test_the_newest_checkpoint_of_a_folder_is_restored(tmp_path):
    def run(mesh):
        state, step = _start(mesh, 3)
        for index in range(3):
            state, _ = step(state, _batch(mesh, index))
            checkpoint.save(tmp_path, state)
        states = [
            checkpoint.restore(folder, _start(mesh, 3)[0]) for folder in (tmp_path, str(tmp_path / "step-00000002"))
        ]
        newest, named = (sl.unshard(found.params) for found in states)
        assert [found.step for found in states] == [3, 2]
        same = torch.equal(newest["head"]["w"], sl.unshard(state.params)["head"]["w"])
        return same, torch.equal(newest["head"]["w"], named["head"]["w"])

    assert sl.simulate(run, mesh={"data": 2}) == [(True, False)] * 2


@pytest.mark.parametrize("name", ["", "nothing", "step-00000009.partial"])
def test_a_folder_without_a_checkpoint_is_refused(tmp_path, name):
    (tmp_path / "step-00000009.partial").mkdir()
    (tmp_path / "step-00000009.partial" / "manifest.json").write_text("{}")
    state, _ = sl.make_train_step(lambda p, b: p["w"].sum(), {"w": torch.ones(2)}, sl.optim.sgd(0.1))
    with pytest.raises(FileNotFoundError, match="holds none: give restore the folder that save was given, or one of"):
        checkpoint.restore(tmp_path / name, state)
    assert state.params["w"].tolist() == [1, 1]


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    """Beyond eight digits too; and what has another name is no checkpoint."""
    for name in ("step-99999999", "step-100000000", "step-00000007", "step-new", "step-3.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    assert checkpoint.latest(tmp_path).name == "step-100000000"


def test_parameters_in_a_bare_list(tmp_path):
    """Leaves are named by a number, as are the states of a chain, and as the bucket of a leaf of its own begins."""

    def run(mesh):
        params = [torch.full((1 << 17,), 0.5), torch.ones(3)]  # the first is a bucket of its own
        tx = sl.optim.chain(sl.optim.adamw(1e-2), sl.optim.clip_by_global_norm(1e9))

        def start():
            loss_fn = lambda p, batch: (p[0] * batch).sum() + p[1].square().sum()  # noqa: E731
            return sl.make_train_step(loss_fn, sl.shard([p.clone() for p in params], mesh, stage=2), tx)

        state, step = start()
        assert set(state.params.plan.bucket_of) == {"(top)/float32", "0/float32"}
        state, _ = step(state, torch.tensor(2.0))
        checkpoint.save(tmp_path, state)
        fresh, _ = start()
        again = checkpoint.restore(checkpoint.latest(tmp_path), fresh)
        pairs = zip(optree.tree_leaves(again.opt), optree.tree_leaves(state.opt), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)

    assert all(sl.simulate(run, mesh={"data": 2}))


def test_files_of_an_interrupted_save_are_ignored(tmp_path):
    """Files of more ranks than save now: their fragments would be read as if they belonged to this state."""
    partial = tmp_path / "step-00000000.partial"
    partial.mkdir()
    for stale in ("__1_0.distcp", "__3_0.distcp", "2.report", "manifest.json"):
        (partial / stale).write_text("stale")

    def run(mesh):
        state, _ = _start(mesh, 3)
        return checkpoint.save(tmp_path, state)

    (folder, _) = sl.simulate(run, mesh={"data": 2})
    assert {file.name for file in folder.iterdir()} == {"__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"}
    assert (folder / "__1_0.distcp").read_bytes() != b"stale"


@pytest.mark.parametrize(
    ("notes", "named"),
    [({1: 2}, r"keys \[1\]"), ({"a": [{2.5: 0}]}, r"keys \[2.5\]"), ({"a": torch.ones(2)}, "Tensor")],
)
def test_notes_that_would_come_back_otherwise_are_refused(tmp_path, notes, named):
    state, _ = _start(sl.make_mesh(), 0)
    with pytest.raises(TypeError, match=named):
        checkpoint.save(tmp_path, state, notes=notes)
    assert checkpoint.latest(tmp_path) is None


def test_what_is_no_state_is_refused(tmp_path):
    state, _ = _start(sl.make_mesh(), 0)
    checkpoint.save(tmp_path, state)
    for wrong in (state.params, torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=r"is no TrainState.*export_safetensors"):
            checkpoint.save(tmp_path, wrong)
        with pytest.raises(TypeError, match=r"restore: .*is no TrainState"):
            checkpoint.restore(tmp_path, wrong)


@pytest.mark.parametrize("keep", [0, -1, 1.5])
def test_a_number_of_checkpoints_to_keep_is_refused(tmp_path, keep):
    """With -1 the new one would be deleted."""
    with pytest.raises(ValueError, match=r"save\(keep=.*: keep is an integer from 1"):
        checkpoint.save(tmp_path, _start(sl.make_mesh(), 0)[0], keep=keep)


@pytest.mark.parametrize("shape", [(4, 5), (8, 6), (24,), ()])
@pytest.mark.parametrize("tx", [sl.optim.adamw, sl.optim.adamw8bit])
def test_what_partial_names_keeps_its_values_in_another_shape(tmp_path, shape, tx):
    def start(mesh, shape, value):
        params = {"head": torch.full(shape, value), "w": torch.full((3,), value)}
        return sl.make_train_step(lambda p, x: p["w"].sum(), sl.shard(params, mesh, stage=3), tx(0.1))[0]

    checkpoint.save(tmp_path, start(sl.make_mesh(), (4, 6), 1.0))

    def run(mesh):
        state = checkpoint.restore(tmp_path, start(mesh, shape, 7.0), partial="*head")
        return sl.unshard(state.params)

    for found in sl.simulate(run, mesh={"data": 2}):
        assert found["head"].eq(7).all() and found["w"].eq(1).all()


def test_notes_come_back(tmp_path):
    notes = {"position": 17, "curve": [[1, 2.5], [2, None]], "text": ',"checksum":'}
    state, _ = sl.make_train_step(lambda p, b: p["w"].sum(), {"w": torch.ones(2)}, sl.optim.sgd(0.1))
    assert checkpoint.read_notes(checkpoint.save(tmp_path, state, notes=notes)) == notes
    assert checkpoint.read_notes(tmp_path) == notes


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_lets_no_other_wait(rank, tmp_path, monkeypatch):
    written = os.pwritev

    def pwritev(fd, buffers, offset):
        if os.readlink(f"/proc/self/fd/{fd}").endswith(f"__{rank}_0.distcp"):
            raise OSError(28, "No space left on device")
        return written(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)

    def run(mesh):
        state, _ = _start(mesh, 3)
        with pytest.raises((OSError, RankFailure)) as caught:
            checkpoint.save(tmp_path, state)
        return str(caught.value)

    messages = sl.simulate(run, mesh={"data": 2})
    assert all("No space left on device" in message for message in messages)
    assert f"the checkpoint was not written:\n  - rank {rank}: OSError" in messages[1 - rank]
    assert checkpoint.latest(tmp_path) is None
