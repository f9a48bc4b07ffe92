"""`shardlib checkpoint`, as a user types it."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers.saved import tensors
from helpers.trees import assert_same
from safetensors.torch import load_file

import shardlib as sl
from shardlib.checkpoint.reading import open_checkpoint
from shardlib.commands import __main__ as cli
from shardlib.common import thresholds

GOLDEN = Path(__file__).parents[1] / "checkpoint" / "golden"


def test_list(capsys):
    assert cli.main(["checkpoint", "list", str(GOLDEN)]) == 0
    header, _, row = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["checkpoint", "bytes", "tensors"]
    assert row.startswith("step-00000002") and "data=2, model=2" in row and "0.1.0" in row


def test_show(capsys):
    assert cli.main(["checkpoint", "show", str(GOLDEN), "--tensors", "params/blocks/0/*"]) == 0
    out = capsys.readouterr().out
    assert "step-00000002: step 2, seed 5, format 1" in out and "notes: position" in out
    assert any(
        line.split()[:3] == ["params/blocks/0/attn/qkv/weight", "bfloat16", "30×10"] for line in out.splitlines()
    )
    assert "opt/" not in out


def test_verify(capsys, tmp_path):
    assert cli.main(["checkpoint", "verify", str(GOLDEN / "step-00000002")]) == 0
    assert "every byte as it was written" in capsys.readouterr().out
    damaged = tmp_path / "step-00000002"
    shutil.copytree(GOLDEN / "step-00000002", damaged)
    content = bytearray((damaged / "__1_0.distcp").read_bytes())
    content[5000] ^= 1
    (damaged / "__1_0.distcp").write_bytes(content)
    assert cli.main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert "__1_0.distcp: bytes" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["list", "show", "verify", "export"])
def test_no_checkpoint(action, tmp_path):
    with pytest.raises(
        SystemExit, match=r"shardlib checkpoint: .*no(t a| complete) checkpoint|is no complete checkpoint"
    ):
        cli.main(["checkpoint", action, str(tmp_path), *(["--to", "out"] if action == "export" else [])])


@pytest.mark.parametrize(
    ("dtype", "source"), [(None, "params"), ("float32", "opt/masters"), ("float16", "opt/masters")]
)
def test_export(capsys, tmp_path, dtype, source):
    """Parts of a few elements, as of leaves of more than 64 MB."""
    arguments = ["--dtype", dtype] if dtype else []
    with thresholds.small(64):
        assert (
            cli.main(["checkpoint", "export", str(GOLDEN), "--to", str(tmp_path), "--prefix", "gpt.", *arguments]) == 0
        )
    assert capsys.readouterr().out == f"{tmp_path}: the parameters of {GOLDEN / 'step-00000002'}\n"
    saved = tensors(GOLDEN / "step-00000002")
    wanted = {
        f"gpt.{name.removeprefix(source + '/').replace('/', '.')}": tensor.to(getattr(torch, dtype or "bfloat16"))
        for name, tensor in saved.items()
        if name.startswith(f"{source}/")
    }
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert_same(load_file(tmp_path / "model.safetensors"), wanted)


def test_what_is_damaged_or_no_parameter_is_not_exported(capsys, tmp_path):
    module = torch.nn.BatchNorm1d(3)
    apply, params, buffers = sl.from_module(module, buffers=True)
    state, _ = sl.make_train_step(apply, params, sl.optim.adamw(0.1), buffers=buffers)
    folder = sl.checkpoint.save(tmp_path / "run", state)
    assert cli.main(["checkpoint", "export", str(folder), "--to", str(tmp_path / "out")]) == 0
    assert "not written, since it is no parameter: buffers/running_mean" in capsys.readouterr().out
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == ["bias", "weight"]
    with open_checkpoint(folder) as saved:
        chunk = saved.tensors["params/weight"].chunks[0]
    with (folder / chunk.file).open("r+b") as file:
        file.seek(chunk.data)
        file.write(b"\x01")
    with pytest.raises(SystemExit, match=r"is damaged:\n.*of params/weight, differ"):
        cli.main(["checkpoint", "export", str(folder), "--to", str(tmp_path / "again")])
    assert not (tmp_path / "again").exists()
