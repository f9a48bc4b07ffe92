"""What macOS and Windows lack is not needed to import the library, and is named where it is used."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Names of Linux that the others do not have. Torch and NumPy are imported before they go.
LACKING = {
    "darwin": ((), ("O_DIRECT", "posix_fallocate", "sched_getaffinity"), ()),
    "win32": (
        ("fcntl", "resource", "termios", "pwd", "grp", "tty", "pty"),
        (
            "O_DIRECT",
            "O_DIRECTORY",
            "posix_fallocate",
            "sched_getaffinity",
            "fork",
            "register_at_fork",
            "preadv",
            "pwritev",
        ),
        ("SIGUSR1", "SIGUSR2", "SIGKILL", "SIGHUP"),
    ),
}
BEFORE = """
import signal, sys, os
import torch, torch.distributed, torch.distributed.checkpoint, torch.utils.data, torch.func, rich, optree, numpy, cloudpickle
import sysconfig, multiprocessing.connection, subprocess, tempfile, shutil, asyncio, ctypes, logging.handlers, lazy_loader

sysconfig.get_path("stdlib")  # which is looked up by the true name of the system
modules, names, signals = {lacking!r}
sys.modules.update(dict.fromkeys(modules))  # an import of None fails
for name in names:
    if hasattr(os, name):
        delattr(os, name)
for name in signals:
    delattr(signal, name)
sys.platform = {system!r}
"""


def run_as(system, code, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(BEFORE.format(lacking=LACKING[system], system=system) + code)
    command = [sys.executable, str(script)]
    environment = {"EAGER_IMPORT": "1", "PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


USES = {
    "sl.launch": "sl.launch(lambda mesh: 1, mesh=dict(data=1))",
    "saving a checkpoint": "sl.checkpoint.save('run', state)",
    "shardlib run": "supervise.supervise(['true'], supervise.Counts.parse('1'), 0, print)",
    "offload to disk": "sl.shard(params, mesh, sl.chain(sl.zero(3), sl.offload('disk', params='disk', folder='x')))",
}


@pytest.mark.parametrize(("system", "lacking"), [("win32", list(USES)), ("darwin", ["offload to disk"])])
def test_all_is_imported_and_trains_and_what_a_system_lacks_is_named(system, lacking, tmp_path):
    code = """
import importlib, pkgutil
import shardlib as sl
from shardlib.mesh.launch import supervise
found = [module.name for module in pkgutil.walk_packages(sl.__path__, "shardlib.")]
for name in found:
    # Triton is of Linux, and what other libraries import looks for the true system.
    if not name.endswith((".triton", ".tiles", "__main__", "integrations.lightning", "integrations.transformers")):
        importlib.import_module(name)
params, mesh = {"w": torch.ones(4, 4)}, sl.make_mesh()
state, step = sl.make_train_step(lambda p, x: (x @ p["w"]).square().mean(), params, sl.optim.adamw(0.1))
for _ in range(3):
    state, metrics = step(state, torch.ones(2, 4))
print(len(found), state.step)
"""
    for name in lacking:
        code += f"""
try:
    {USES[name]}
except sl.errors.UnsupportedError as error:
    print(error)
"""
    first, *said = run_as(system, code, tmp_path).splitlines()
    modules, step = map(int, first.split())
    assert modules > 400 and step == 3
    assert [line.partition(" makes system calls")[0].partition(" on /")[0] for line in said] == lacking
    assert all(system in line and ("WSL" in line) is (system == "win32") for line in said)
