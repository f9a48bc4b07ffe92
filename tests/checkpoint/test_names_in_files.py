"""Parameters in files of others by their names with dots: all names of a tied one, and one parameter for each name."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardlib as sl
from shardlib.checkpoint.safetensors import convert
from shardlib.common import thresholds
from shardlib.errors import TreeError

NAN = float("nan")


def tied(mesh, size=6, stage=0):
    one = torch.zeros(size)
    return sl.shard({"a": {"w": one}, "b": one, "c": torch.zeros(2)}, mesh, stage=stage)


def write(folder, b, a=None):
    a = torch.arange(6.0) if a is None else a
    sl.checkpoint.export_safetensors(
        folder, sl.shard({"a": {"w": a}, "b": b, "c": torch.tensor([3.0, 4.0])}, sl.make_mesh())
    )


def differing(at, size=6):
    return torch.arange(float(size)).index_fill(0, torch.tensor([at]), 7.0)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("at", [0, 5])
def test_different_values_for_tied_leaves_are_refused(tmp_path, at, stage):
    write(tmp_path, differing(at))

    def run(mesh):
        params = tied(mesh, stage=stage)
        with pytest.raises(TreeError) as caught:
            sl.checkpoint.import_safetensors(tmp_path, params)
        assert not any(leaf.any() for leaf in (sl.unshard(params)["b"], sl.unshard(params)["c"]))
        return str(caught.value)

    (message,) = set(sl.simulate(run, mesh={"data": 2}))
    assert "different values for leaves that are tied here" in message and "  - a.w and b\n" in message


def test_other_shapes_for_tied_leaves_are_refused(tmp_path):
    write(tmp_path, torch.arange(6.0).view(2, 3))
    with pytest.raises(TreeError, match=r"a\.w and b \(shapes \[6\] and \[2, 3\]\)"):
        sl.checkpoint.import_safetensors(tmp_path, tied(sl.make_mesh()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stage", [0, 3])
def test_equal_values_for_tied_leaves_are_read(tmp_path, stage, dtype):
    values = torch.tensor([0.0, 1.0, NAN, float("inf"), -2.0, 0.5])
    write(tmp_path, torch.where(values == 0, -0.0, values).to(dtype), values)

    def run(mesh):
        return sl.unshard(sl.checkpoint.import_safetensors(tmp_path, tied(mesh, stage=stage)))

    for found in sl.simulate(run, mesh={"data": 2}):
        torch.testing.assert_close(found["b"], values, rtol=0, atol=0, equal_nan=True)
        assert found["c"].tolist() == [3.0, 4.0]


def test_large_leaves_are_compared_to_their_end(tmp_path):
    size = 1000
    write(tmp_path, differing(size - 1, size), torch.arange(float(size)))
    with thresholds.small(1 << 10), pytest.raises(TreeError, match=r"a\.w and b"):
        sl.checkpoint.import_safetensors(tmp_path, tied(sl.make_mesh(), size))


@pytest.mark.parametrize("what", ["parameters", "state", "moments"])
def test_torchs_checkpoints_are_compared_too(tmp_path, what):
    one, other = torch.arange(6.0), differing(2)
    moments = {name: {"exp_avg": one, "exp_avg_sq": one, "step": torch.tensor(3.0)} for name in ("a.w", "b", "c")}
    moments["c"] = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "step": torch.tensor(3.0)}
    if what == "moments":
        moments["b"] = moments["b"] | {"exp_avg_sq": other}
    model = {"a.w": one, "b": one if what == "moments" else other, "c": torch.ones(2)}
    dcp.save({"model": model, "optim": {"state": moments}}, checkpoint_id=tmp_path, no_dist=True)

    def run(mesh):
        params = tied(mesh, stage=1)
        if what != "parameters":
            loss_fn = lambda p, x: (p["b"] * x).sum() + p["c"].sum()  # noqa: E731
            params = sl.make_train_step(loss_fn, params, sl.optim.adamw(0.1))[0]
        name = r"state.a.w.exp_avg_sq and optim.state.b.exp_avg_sq" if what == "moments" else r"model.a.w and model.b"
        with pytest.raises(TreeError, match=rf"different values for leaves that are tied here.*\n  - .*{name}\n"):
            partial = ["optim.*"] if what == "parameters" else []
            sl.checkpoint.import_dcp(tmp_path, params, prefix="model.", partial=partial)
        assert not sl.unshard(params if what == "parameters" else params.params)["c"].any()

    sl.simulate(run, mesh={"data": 2})


COLLIDING = {"a": {"b": torch.ones(2), "c": torch.ones(1)}, "a.b": torch.full((2,), 7.0)}


def test_parameters_with_one_name_are_refused(tmp_path):
    params = sl.shard(COLLIDING, sl.make_mesh())
    with pytest.raises(TreeError, match=r"one name:\n  - a\.b: 'a/b' and 'a\.b'\nRename"):
        sl.checkpoint.export_safetensors(tmp_path / "out", params)
    assert not (tmp_path / "out").exists()
    write(tmp_path, torch.ones(2))
    with pytest.raises(TreeError, match=r"one name:\n  - a\.b: 'a/b' and 'a\.b'\nRename"):
        sl.checkpoint.import_safetensors(tmp_path, params, partial=["*"])
    with pytest.raises(TreeError, match=r"one name:\n  - c: 'c' and the buffer 'c'\nRename"):
        sl.checkpoint.export_safetensors(tmp_path / "out", tied(sl.make_mesh()), buffers={"c": torch.ones(2)})


def test_a_converted_checkpoint_has_a_name_for_each_parameter(tmp_path):
    state, _ = sl.make_train_step(lambda p, x: p["a.b"].sum(), COLLIDING, sl.optim.sgd(0.1))
    saved = sl.checkpoint.save(tmp_path / "run", state)
    with pytest.raises(TreeError, match=r"one name:\n  - a\.b: 'a/b' and 'a\.b'\nRename"):
        convert(saved, tmp_path / "out")


def test_leaves_with_one_path_are_refused(tmp_path):
    """Of parameters when they are sharded; of what else a checkpoint holds when it is saved."""
    same = {"a": {"b": torch.ones(2)}, "a/b": torch.full((2,), 7.0)}
    with pytest.raises(TreeError, match=r"(?s)one path.*a/b: \[.a.\]\[.b.\] and \[.a/b.\]"):
        sl.shard(same, sl.make_mesh())
    state, _ = sl.make_train_step(lambda p, x: p["w"].sum(), {"w": torch.ones(2)}, sl.optim.sgd(0.1))
    with pytest.raises(TreeError, match=r"several tensors of the state have one name:\n  - also/it/a/b\n"):
        sl.checkpoint.save(tmp_path, state, also={"it": same})
