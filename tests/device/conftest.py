"""Processes whose meshes are on the test device, `helpers.rig`. It is not for processes in which other tests run."""

import pytest
from helpers.pool import Pool


@pytest.fixture(scope="session")
def rigs():
    """Two processes with a device each."""
    pool = Pool(2, device="rig")
    yield pool
    pool.stop()


@pytest.fixture
def on_rig(rigs):
    """``on_rig(fn, *args)``: ``fn(mesh, *args)`` in a process with the device, on a mesh of one."""
    return lambda fn, *args: rigs.run(fn, *args, mesh={"data": 1})[0]
