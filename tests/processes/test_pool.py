"""The pool that other tests run on: what hangs is stopped, and what only takes long is not."""

import time

import pytest
from helpers.pool import Pool


@pytest.fixture
def pool():
    made = Pool(2, patience=2)
    yield made
    made.stop()


def _computes(mesh):
    start = time.process_time()
    while time.process_time() < start + 3:
        pass
    return mesh.rank


def _waits(mesh):
    time.sleep(3600)


def test_who_computes_has_time_and_who_waits_has_not(pool):
    assert pool.run(_computes, mesh={"data": 2}) == [0, 1]
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] of 2 did not answer, and hardly computed for 2 s: a hang"):
        pool.run(_waits, mesh={"data": 2})
    assert time.monotonic() < start + 60
