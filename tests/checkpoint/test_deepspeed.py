"""Checkpoints of real DeepSpeed 0.19.8 as parameters and train states on other meshes, against its own account of them.

Those in made_by_deepspeed/ were made by ``helpers.deepspeed_checkpoints``; nightly they are made anew.
"""

import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from helpers import deepspeed_checkpoints as made
from helpers.profile import NIGHTLY
from helpers.saved import tensors
from helpers.trees import assert_same

import shardlib as sl
from shardlib.errors import CheckpointError, TreeError
from shardlib.tree import leaves_of

STAGES = made.STAGES
MESHES = [({"data": 1}, 0), ({"data": 2}, 1), ({"data": 3}, 3)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    if not NIGHTLY:
        return Path(__file__).parent / "made_by_deepspeed"
    folder = tmp_path_factory.mktemp("made")
    made.main(folder)
    return folder


def found(folder):
    return torch.load(folder / made.FOUND, weights_only=True)


def start(mesh, stage, tx=None, fill=0.0, transforms=()):
    """The model with other values, in a layout of this mesh, or a state of it."""
    apply, params, buffers = sl.from_module(made.Model().requires_grad_(True), buffers=True)
    for leaf in leaves_of((params, buffers)):
        leaf.data.fill_(fill)
    params = sl.shard(params, mesh, sl.chain(sl.zero(stage), sl.freeze("shift"), *transforms))
    if tx is None:
        return params
    return sl.make_train_step(lambda p, b, x: apply(p, b, x), params, tx, buffers=buffers)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters(checkpoints, stage):
    wanted = found(checkpoints / f"stage{stage}")["zero_to_fp32"]

    def run(mesh, ours):
        params = start(mesh, ours)
        sl.checkpoint.import_deepspeed(checkpoints / f"stage{stage}", params)
        return sl.models.state_dict(made.Model(), params)

    for mesh, ours in MESHES:
        for ranks in sl.simulate(run, ours, mesh=mesh):
            assert_same({name: ranks[name] for name in wanted if name != "seen"}, _without(wanted, "seen"))


def _without(found, name):
    return {each: tensor.float() for each, tensor in found.items() if each != name}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("transforms", [(), (sl.precision("bf16"),)], ids=["fp32", "bf16"])
def test_a_state(checkpoints, tmp_path, stage, transforms):
    """Masters, both moments, counters, buffers, and what no optimizer trained."""
    theirs = found(checkpoints / f"stage{stage}")

    def run(mesh, ours):
        state, _ = start(mesh, ours, sl.optim.adamw(0.1, 0.8, 0.9), 0.5, transforms)
        state = sl.checkpoint.import_deepspeed(checkpoints / f"stage{stage}", state)
        return sl.checkpoint.save(tmp_path / str(mesh.size), state), state.step

    for mesh, ours in MESHES:
        folder, step = sl.simulate(run, ours, mesh=mesh)[0]
        held = tensors(folder)
        assert step == made.STEPS and held["opt/inner/count"] == made.STEPS
        assert torch.equal(held["buffers/seen"], theirs["zero_to_fp32"]["seen"])
        # zero_to_fp32 leaves out what was not trained at stage 1.
        shift = theirs["zero_to_fp32"].get("shift", made.Model().shift)
        assert torch.equal(held["params/shift"].bfloat16(), shift.bfloat16())
        assert len(theirs["by parameter"]) == 4
        for name, tensor in theirs["by parameter"].items():
            path = name.replace(".", "/")
            prefix = "opt/masters" if transforms else "params"
            assert torch.equal(held[f"{prefix}/{path}"], tensor["param"].float())
            assert torch.equal(held[f"params/{path}"].float(), tensor["param"].to(held[f"params/{path}"].dtype).float())
            for ours_, kind in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
                assert tensor[kind].abs().sum() > 0
                assert torch.equal(held[f"opt/inner/{ours_}/{path}"], tensor[kind])


def test_training_goes_on_as_torchs(checkpoints):
    """A further step is that of torch.optim.AdamW with the same moments."""
    theirs = found(checkpoints / "stage1")
    module = made.Model()
    module.load_state_dict(theirs["zero_to_fp32"] | {"shift": module.shift})
    tx = torch.optim.AdamW([each for each in module.parameters() if each.requires_grad], 0.1, betas=(0.8, 0.9))
    for name, each in module.named_parameters():
        if name in theirs["by parameter"]:
            moments = {kind: theirs["by parameter"][name][kind] for kind in ("exp_avg", "exp_avg_sq")}
            tx.state[each] = {"step": torch.tensor(float(made.STEPS)), **moments}
    batch = torch.linspace(-1, 2, 20).view(4, 5)
    module(batch).backward()
    tx.step()

    def run(mesh):
        apply, params, _ = sl.from_module(made.Model().requires_grad_(True), buffers=True)
        params = sl.shard(params, mesh, sl.chain(sl.zero(2), sl.freeze("shift")))
        torchs = sl.optim.from_torch(torch.optim.AdamW, lr=0.1, betas=(0.8, 0.9))
        buffers = {"seen": torch.zeros(2)}
        state, step = sl.make_train_step(lambda p, b, x: apply(p, b, x), params, torchs, buffers=buffers)
        state = sl.checkpoint.import_deepspeed(checkpoints / "stage1", state)
        state, _ = step(state, batch[2 * mesh.rank : 2 * mesh.rank + 2])
        return sl.models.state_dict(made.Model(), state.params)

    after = sl.simulate(run, mesh={"data": 2})[0]
    for name, tensor in module.named_parameters():
        torch.testing.assert_close(after[name], tensor.detach(), rtol=1e-5, atol=1e-6)


def test_what_differs_is_listed(checkpoints):
    state, _ = start(sl.make_mesh(), 0, sl.optim.sgd(0.1, momentum=0.9))
    with pytest.raises(TreeError) as caught:
        sl.checkpoint.import_deepspeed(checkpoints / "stage3", state)
    for line in (
        "state.body.bias.exp_avg: in the checkpoint, not in the state",
        "opt/inner/trace/body/bias: not in the checkpoint",
    ):
        assert f"  - {line}\n" in str(caught.value)
    assert not any(leaf.any() for leaf in state.params.buffers.values())


def write(folder, shapes, **module):
    """A checkpoint of one rank under the tag "it": masters 0, 1, ..., and moments one and two above."""
    flat = torch.arange(4.0)
    adam = {"state": {0: {"exp_avg": flat + 1, "exp_avg_sq": flat + 2}}, "param_groups": [{"step": 3}]}
    facts = {"partition_count": 1, "single_partition_of_fp32_groups": [flat], "base_optimizer_state": adam}
    (folder / "it").mkdir()
    torch.save({"optimizer_state_dict": facts}, folder / "it" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    shapes = [{name: torch.Size(shape) for name, shape in shapes.items()}]
    model = {"module": module, "param_shapes": shapes, "shared_params": {}, "global_steps": 3}
    torch.save(model, folder / "it" / made.MODEL)


def test_a_parameter_without_elements_and_a_buffer_of_complex_numbers(tmp_path):
    turns = torch.tensor([1j, 2.0])
    write(tmp_path, {"empty": [0, 3], "w": [4]}, turns=turns)
    params = sl.shard({"empty": torch.zeros(0, 3), "w": torch.zeros(4)}, sl.make_mesh())
    buffers = {"turns": torch.zeros_like(turns)}
    state, _ = sl.make_train_step(lambda p, b, x: (p["w"].sum(), b), params, sl.optim.adamw(0.1), buffers=buffers)
    state = sl.checkpoint.import_deepspeed(tmp_path, state, tag="it")
    assert state.params["w"].tolist() == [0, 1, 2, 3] and torch.equal(state.buffers["turns"], turns)


def test_parameters_that_are_called_as_the_optimizers_tensors(tmp_path):
    """A recurrent model may well have a part called ``state``."""
    write(tmp_path, {"state.w": [4]})
    params = sl.shard({"state": {"w": torch.zeros(4)}}, sl.make_mesh())
    sl.checkpoint.import_deepspeed(tmp_path, params, tag="it")
    assert params["state"]["w"].tolist() == [0, 1, 2, 3]
    state, _ = sl.make_train_step(lambda p, x: p["state"]["w"].sum(), params, sl.optim.adamw(0.1))
    state = sl.checkpoint.import_deepspeed(tmp_path, state, tag="it")
    assert [each.tolist() for each in state.opt.inner.nu.values()] == [[2, 3, 4, 5]] and state.step == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_or_cut_file_is_named(checkpoints, tmp_path, rank):
    shutil.copytree(checkpoints / "stage2", tmp_path / "it")
    file = tmp_path / "it" / "global_step3" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    content = file.read_bytes()
    file.write_bytes(content[:-100])

    def run(mesh):
        with pytest.raises(CheckpointError) as caught:
            sl.checkpoint.import_deepspeed(tmp_path / "it", start(mesh, 1))
        return str(caught.value)

    assert all(f"{file} is no file of torch.save, or was cut" in each for each in sl.simulate(run, mesh={"data": 2}))
    file.unlink()
    assert all(
        ("rank 0" if rank == 0 else "was written by 2 ranks, and has files of 1") in each
        for each in sl.simulate(run, mesh={"data": 2})
    )
    with pytest.raises(FileNotFoundError, match="holds no checkpoint of DeepSpeed"):
        sl.checkpoint.import_deepspeed(tmp_path / "it", start(sl.make_mesh(), 0), tag="elsewhere")


class Evil:
    def __init__(self, folder):
        self._folder = folder

    def __reduce__(self):
        return os.mkdir, (self._folder,)


def test_no_code_is_run(checkpoints, tmp_path):
    shutil.copytree(checkpoints / "stage1", tmp_path / "it")
    file = tmp_path / "it" / "global_step3" / made.MODEL
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in entries.items():
            if name.endswith("data.pkl"):  # a dict that has a further item
                assert content.endswith(b".")
                content = (
                    content[:-1]
                    + b"("
                    + pickle.dumps("more")[2:-1]
                    + pickle.dumps(Evil(str(tmp_path / "ran")), 2)[2:-1]
                )
                content += b"u."
            archive.writestr(name, content)
    params = start(sl.make_mesh(), 0)
    with pytest.raises(CheckpointError, match=r"names classes or functions .* not trusted:\n  - posix\.mkdir\n"):
        sl.checkpoint.import_deepspeed(tmp_path / "it", params)
    sl.checkpoint.import_deepspeed(tmp_path / "it", params, left_out=["posix.mkdir"])
    assert not (tmp_path / "ran").exists()
