"""`shardlib checkpoint`, as a user types it."""

import shutil
from pathlib import Path

import pytest

from shardlib.commands import __main__ as cli

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


@pytest.mark.parametrize("action", ["list", "show", "verify"])
def test_no_checkpoint(action, tmp_path):
    with pytest.raises(
        SystemExit, match=r"shardlib checkpoint: .*no(t a| complete) checkpoint|is no complete checkpoint"
    ):
        cli.main(["checkpoint", action, str(tmp_path)])
