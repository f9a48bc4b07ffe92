"""What SECURITY.md says of files: nothing that is read as data is executed."""

import ast
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

import shardlib as sl

ROOT = Path(__file__).parents[2]
# Files that load pickles, and why each may: SECURITY.md has them.
LOADS = {
    "mesh/transport/watch.py": "a rank's own store",
    "mesh/launch/processes.py": "a function between a process and its child",
    "execute/stages/messages.py": "messages of ranks",
}
RESTRICTED = {"checkpoint/archives.py", "checkpoint/dcp.py"}
RUNNING = {"eval", "exec", "__import__"}


def calls_of(path):
    """Names of what a file calls: "pickle.loads", "eval"."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def test_files_are_not_unpickled_but_by_the_restricted_unpicklers():
    found, unpicklers = {}, set()
    for path in (ROOT / "shardlib").rglob("*.py"):
        name, source = str(path.relative_to(ROOT / "shardlib")), path.read_text()
        called = set(calls_of(path))
        assert not called & (RUNNING | {"torch.load", "marshal.loads", "marshal.load", "shelve.open"}), name
        assert "allow_pickle=True" not in source and "trust_remote_code" not in source, name
        if called & {"pickle.loads", "pickle.load", "cloudpickle.loads", "cloudpickle.load", "pickle.Unpickler"}:
            found[name] = called
        if "(pickle.Unpickler)" in source:
            assert "def find_class" in source, name
            unpicklers.add(name)
    assert found.keys() == LOADS.keys()
    assert unpicklers == RESTRICTED


class _Harmful:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("importer", ["import_dcp", "import_deepspeed"])
def test_a_checkpoint_that_names_a_function_does_not_run_it(importer, tmp_path):
    mark, folder = tmp_path / "ran", tmp_path / "saved"
    (folder / "global_step1").mkdir(parents=True)
    (folder / ".metadata").write_bytes(pickle.dumps(_Harmful(mark)))
    (folder / "latest").write_text("global_step1")
    for name in ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"):
        with zipfile.ZipFile(folder / "global_step1" / name, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(_Harmful(mark)))
            archive.writestr("archive/version", "3\n")
    state, _ = sl.make_train_step(lambda p, x: p["w"].sum(), {"w": torch.ones(2)}, sl.optim.adamw(1e-3))
    with pytest.raises(sl.errors.CheckpointError):
        getattr(sl.checkpoint, importer)(folder, state)
    assert not mark.exists()
    pickle.loads(pickle.dumps(_Harmful(mark)))  # which a plain unpickler runs
    assert mark.exists()
