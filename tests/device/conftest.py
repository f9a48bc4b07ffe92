"""Processes whose meshes are on a device with a memory of its own. They are not for processes in which other tests run."""

import pytest
import torch
from helpers import gpu
from helpers.pool import Pool


@pytest.fixture(scope="session")
def rigs():
    """Two processes with a test device each, `helpers.rig`."""
    pool = Pool(2, device="rig", patience=300)
    yield pool
    pool.stop()


@pytest.fixture
def on_rig(rigs):
    """``on_rig(fn, *args)``: ``fn(mesh, *args)`` in a process with the test device, on a mesh of one."""
    return lambda fn, *args: rigs.run(fn, *args, mesh={"data": 1})[0]


@pytest.fixture(scope="session")
def gpus():
    """Two processes that share a GPU."""
    pool = Pool(2, device="cuda", patience=300)
    yield pool
    pool.stop()


_GPU = pytest.mark.skipif(not (torch.version.cuda and gpu.found()), reason="no GPU")


@pytest.fixture(params=["rigs", pytest.param("gpus", marks=_GPU)])
def on_device(request):
    """``on_device(fn, *args)``, as `on_rig`: with the test device, and on a machine with a GPU with that too."""
    pool = request.getfixturevalue(request.param)
    return lambda fn, *args: pool.run(fn, *args, mesh={"data": 1})[0]
