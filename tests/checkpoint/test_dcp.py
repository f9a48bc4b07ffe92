"""Parameters from checkpoints of `torch.distributed.checkpoint`: FSDP2's on real ranks, and others."""

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.saved import tensors
from helpers.trees import assert_same
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardlib as sl
from shardlib.errors import CheckpointError, TreeError
from shardlib.tree import leaves_of


def made():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def sharded_by_fsdp(mesh):
    """FSDP2's module and its AdamW."""
    module = made()
    over = init_device_mesh("cpu", (mesh.size,))
    for layer in module:
        fully_shard(layer, mesh=over)
    fully_shard(module, mesh=over)
    return module, torch.optim.AdamW(module.parameters(), 0.1)


def save_by_fsdp(mesh, folder):
    """FSDP2's sharded state dict, model and optimizer, after a step."""
    module, optimizer = sharded_by_fsdp(mesh)
    module(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    state = {"model": module.state_dict(), "optim": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    return {name: tensor.full_tensor() for name, tensor in module.state_dict().items()}


def test_fsdps_parameters(pool, tmp_path):
    # All of the pool, as FSDP2 uses the world.
    wanted = pool.run(save_by_fsdp, tmp_path / "theirs", mesh={"data": 4})[0]

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


def save_all_by_fsdp(mesh, folder):
    """The parameters and the state of AdamW by names, after two steps; returns them whole."""
    module, optimizer = sharded_by_fsdp(mesh)
    for _ in range(2):
        module(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
    dcp.save({"model": module.state_dict(), "optim": get_optimizer_state_dict(module, optimizer)}, checkpoint_id=folder)
    whole = get_optimizer_state_dict(module, optimizer, options=StateDictOptions(full_state_dict=True))["state"]
    return {name: tensor.full_tensor() for name, tensor in module.state_dict().items()}, whole


def test_fsdps_optimizer(pool, tmp_path):
    wanted, moments = pool.run(save_all_by_fsdp, tmp_path / "theirs", mesh={"data": 4})[0]

    def run(mesh, stage, tx):
        apply, params = sl.from_module(made())
        state, step = sl.make_train_step(
            lambda p, x: apply(p, x).square().sum(), sl.shard(params, mesh, stage=stage), tx
        )
        state = sl.checkpoint.import_dcp(tmp_path / "theirs", state, prefix="model.")
        after = state.step
        # A further step in which all ranks see the same batch.
        folder = sl.checkpoint.save(tmp_path / f"ours-{mesh.size}-{stage}", state)
        state, _ = step(state, torch.ones(2, 5))
        return folder, after, sl.models.state_dict(made(), state.params)

    torchs = sl.optim.from_torch(torch.optim.AdamW, lr=0.1)
    for mesh, stage, tx in (({"data": 1}, 0, torchs), ({"data": 3}, 3, sl.optim.adamw(0.1)), ({"data": 2}, 1, torchs)):
        folder, after, _ = sl.simulate(run, stage, tx, mesh=mesh)[0]
        held = tensors(folder)
        assert after == 2 and held["opt/inner/count"] == 2
        mu, nu = ("elements/exp_avg", "elements/exp_avg_sq") if tx is torchs else ("mu", "nu")
        for name, tensor in wanted.items():
            path = name.replace(".", "/")
            assert torch.equal(held[f"params/{path}"], tensor)
            assert torch.equal(held[f"opt/inner/{mu}/{path}"], moments[name]["exp_avg"])
            assert torch.equal(held[f"opt/inner/{nu}/{path}"], moments[name]["exp_avg_sq"])
    # A further step is torch's.
    module = made()
    module.load_state_dict(wanted)
    optimizer = torch.optim.AdamW(module.parameters(), 0.1)
    for name, each in module.named_parameters():
        optimizer.state[each] = {kind: tensor.clone() for kind, tensor in moments[name].items()}
    module(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    _, _, after = sl.simulate(run, 0, torchs, mesh={"data": 1})[0]
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(after[name], tensor)


def test_another_optimizer_is_listed(pool, tmp_path):
    pool.run(save_all_by_fsdp, tmp_path / "theirs", mesh={"data": 4})
    apply, params = sl.from_module(made())
    state, _ = sl.make_train_step(
        lambda p, x: apply(p, x).sum(), sl.shard(params, sl.make_mesh()), sl.optim.sgd(0.1, momentum=0.9)
    )
    with pytest.raises(TreeError) as caught:
        sl.checkpoint.import_dcp(tmp_path / "theirs", state, prefix="model.")
    for line in (
        "opt/inner/trace/0/bias: not in the checkpoint",
        "optim.state.0.bias.exp_avg_sq: in the checkpoint, not in the state",
    ):
        assert f"  - {line}\n" in str(caught.value)
    partial = ["opt/inner/trace/*", "optim.*"]
    assert sl.checkpoint.import_dcp(tmp_path / "theirs", state, prefix="model.", partial=partial).step == 2


def save_by_ddp(mesh, file):
    module = DistributedDataParallel(made())
    module(torch.ones(2, 5)).sum().backward()
    torch.optim.SGD(module.parameters(), 0.1).step()
    if mesh.rank == 0:
        torch.save(module.state_dict(), file)
    return {name: tensor.detach() for name, tensor in module.module.state_dict().items()}


def test_ddps_state_dict(pool, tmp_path):
    """As docs/checkpoints.md says."""
    wanted = pool.run(save_by_ddp, tmp_path / "ddp.pt", mesh={"data": 4})[0]

    def run(mesh):
        module = made()
        saved = torch.load(tmp_path / "ddp.pt", mmap=True)
        module.load_state_dict({name.removeprefix("module."): tensor for name, tensor in saved.items()})
        params = sl.shard(sl.from_module(module)[1], mesh, stage=3)
        return sl.models.state_dict(made(), params)

    for found in sl.simulate(run, mesh={"data": 3}):
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


class Attribute:
    """As Python 3.11.2 writes a member of an enumeration."""

    def __init__(self, *of):
        self.of = of

    def __reduce__(self):
        return getattr, self.of


def test_members_of_enumerations_written_as_attributes(tmp_path, monkeypatch):
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda one, _: (getattr, (type(one), one.name)))
    dcp.save({"w": torch.arange(4.0)}, checkpoint_id=tmp_path, no_dist=True)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    params = sl.shard({"w": torch.zeros(4)}, sl.make_mesh())
    assert sl.checkpoint.import_dcp(tmp_path, params)["w"].tolist() == [0, 1, 2, 3]


# The second names a function of torch whose name begins like a dtype's.
@pytest.mark.parametrize(
    ("content", "name"),
    [
        (pickle.dumps(Evil()), r"posix\.mkdir"),
        (b"ctorch\nint_repr\n.", r"torch\.int_repr"),
        (pickle.dumps(Attribute(torch.Size, "__class__")), r"the attribute __class__ of <class 'torch.Size'>"),
        (pickle.dumps(Attribute(_MEM_FORMAT_ENCODING, "__class__")), "the attribute __class__ of <enum"),
    ],
)
def test_no_code_is_run(tmp_path, monkeypatch, content, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(content)
    params = sl.shard({"a": torch.zeros(4)}, sl.make_mesh())
    with pytest.raises(CheckpointError, match=rf"the metadata name {name},? .* not trusted"):
        sl.checkpoint.import_dcp(tmp_path, params)
    assert not (tmp_path / "it-ran").exists()


def test_damaged_metadata_are_named(tmp_path):
    dcp.save({"a": torch.ones(4)}, checkpoint_id=tmp_path, no_dist=True)
    content = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=rf"{tmp_path} cannot be read as expected \(UnpicklingError"):
        sl.checkpoint.import_dcp(tmp_path, sl.shard({"a": torch.zeros(4)}, sl.make_mesh()))


def test_one_glob_names_what_may_be_missing_and_nothing_else(tmp_path):
    dcp.save({"a": torch.ones(4)}, checkpoint_id=tmp_path, no_dist=True)
    params = sl.shard({"a": torch.zeros(4), "new": torch.zeros(1)}, sl.make_mesh())
    state, _ = sl.make_train_step(lambda p, x: p["a"].sum(), params, sl.optim.adamw(0.1))
    with pytest.raises(TreeError, match="params/new: not in the checkpoint"):
        sl.checkpoint.import_dcp(tmp_path, state, partial="opt/*")


def test_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no \.metadata"):
        sl.checkpoint.import_dcp(tmp_path, sl.shard({"a": torch.zeros(4)}, sl.make_mesh()))
