"""Parameters from checkpoints of `torch.distributed.checkpoint`: FSDP2's on real ranks, and others."""

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.trees import assert_same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardlib as sl
from shardlib.errors import CheckpointError, TreeError
from shardlib.tree import leaves_of


def made():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def save_by_fsdp(mesh, folder):
    """FSDP2's sharded state dict, model and optimizer, after a step."""
    module = made()
    over = init_device_mesh("cpu", (mesh.size,))
    for layer in module:
        fully_shard(layer, mesh=over)
    fully_shard(module, mesh=over)
    optimizer = torch.optim.AdamW(module.parameters(), 0.1)
    module(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    state = {"model": module.state_dict(), "optim": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    return {name: tensor.full_tensor() for name, tensor in module.state_dict().items()}


def test_fsdps_parameters(pool, tmp_path):
    wanted = pool.run(save_by_fsdp, tmp_path / "theirs", mesh={"data": 4})[
        0
    ]  # all of the pool, as FSDP2 uses the world

    def run(mesh, stage):
        module = made()
        _, params = sl.from_module(module)
        for leaf in leaves_of(params):
            leaf.data.zero_()
        params = sl.shard(params, mesh, stage=stage)
        sl.checkpoint.import_dcp(tmp_path / "theirs", params, prefix="model.", partial=["optim.*"])
        return sl.models.state_dict(module, params)

    for mesh, stage in (({"data": 1}, 0), ({"data": 4}, 3), ({"data": 3}, 1)):
        for found in sl.simulate(run, stage, mesh=mesh):
            assert_same(dict(found), dict(wanted))


def test_our_own_checkpoint_by_its_metadata(tmp_path):
    state, _ = sl.make_train_step(lambda p, b: p["w"].sum(), {"w": torch.arange(6.0).view(2, 3)}, sl.optim.sgd(0.1))
    folder = sl.checkpoint.save(tmp_path, state)
    params = sl.shard({"w": torch.zeros(2, 3)}, sl.make_mesh())
    assert sl.checkpoint.import_dcp(folder, params, prefix="params/", partial=["opt/*"])["w"].tolist() == [
        [0, 1, 2],
        [3, 4, 5],
    ]


def test_names_and_shapes_are_listed(tmp_path):
    dcp.save({"a": torch.ones(3), "b": torch.ones(2), "number": 3}, checkpoint_id=tmp_path, no_dist=True)
    params = sl.shard({"a": torch.zeros(4), "new": torch.zeros(1)}, sl.make_mesh())
    with pytest.raises(TreeError) as caught:
        sl.checkpoint.import_dcp(tmp_path, params)
    for line in ("a: saved [3], wanted [4]", "b: in the files, not in the parameters", "new: not in the checkpoint"):
        assert f"  - {line}\n" in str(caught.value)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("it-ran",)


# The second names a function of torch whose name begins like a dtype's.
@pytest.mark.parametrize(
    ("content", "name"), [(pickle.dumps(Evil()), r"posix\.mkdir"), (b"ctorch\nint_repr\n.", r"torch\.int_repr")]
)
def test_no_code_is_run(tmp_path, monkeypatch, content, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(content)
    params = sl.shard({"a": torch.zeros(4)}, sl.make_mesh())
    with pytest.raises(CheckpointError, match=rf"the metadata name {name}, .* not trusted"):
        sl.checkpoint.import_dcp(tmp_path, params)
    assert not (tmp_path / "it-ran").exists()


def test_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no \.metadata"):
        sl.checkpoint.import_dcp(tmp_path, sl.shard({"a": torch.zeros(4)}, sl.make_mesh()))
