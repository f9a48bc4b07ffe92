"""The start of a run's processes, here threads, at a store that outlives them."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import shardlib as sl
from shardlib.errors import RankFailure
from shardlib.mesh.transport import process

LIMIT = timedelta(seconds=40)


@pytest.fixture
def store(monkeypatch):
    """A store of torchrun's agent."""
    made = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setitem(os.environ, "MASTER_ADDR", "127.0.0.1")
    monkeypatch.setitem(os.environ, "MASTER_PORT", str(made.port))
    return made


def meet(size, later=()):
    """The stores that the ranks of a start get; ranks in ``later`` begin when the others wait for them."""

    def run(rank):
        while rank in later and len(begun) < size - len(later):
            time.sleep(0.01)
        begun.append(rank)
        return process.meet(rank, size, LIMIT)

    begun = []
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


@pytest.mark.parametrize("later", [(), (0,), (1, 2)])
def test_each_start_has_keys_of_its_own(store, later):
    """Nothing that an earlier start left is found by a later one, though ranks asked that have ended since."""
    starts = []
    for number, size in enumerate((3, 3, 2)):
        store.set("shardlib/asks/1", f"a rank of an attempt that was killed before it met, {number}")
        stores = meet(size, [rank for rank in later if rank < size])
        assert not any(each.check(["address"]) for each in stores)
        stores[-1].set("address", str(number))
        assert [each.get("address") for each in stores] == [str(number).encode()] * size
        starts.append(stores)
    assert [each[0].get("address") for each in starts] == [b"0", b"1", b"2"]


def test_a_rank_that_asks_twice(store):
    """torchrun may restart one agent's ranks while rank 0 already waits for the others."""
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(process.meet, 0, 2, LIMIT)
        store.set("shardlib/asks/1", "killed")
        store.get("shardlib/start of killed")
        second = process.meet(1, 2, LIMIT)
        second.set("address", "1")
        assert first.result().get("address") == b"1"


def test_ranks_that_do_not_come_are_named(store):
    limit = timedelta(seconds=1)
    threading.Thread(target=lambda: process.meet(1, 4, LIMIT), daemon=True).start()
    store.get("shardlib/asks/1")
    with pytest.raises(RankFailure, match=r"^rank 2, 3 of 4 has not started within 0:00:01, and rank 0 waits for it"):
        process.meet(0, 4, limit)
    with pytest.raises(RankFailure, match=r"^rank 0 has not started within 0:00:01, and rank 2 waits for it"):
        process.meet(2, 4, limit)


def test_a_world_without_a_rank_is_said_to_have_none(monkeypatch):
    for name in ("RANK", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="environment variable RANK expected"):
        process.start_processes(torch.device("cpu"), 1.0)


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_processes_that_a_launcher_started_without_a_world_are_told(monkeypatch, caplog, variable):
    """mpirun and srun alone start several, each of which would train by itself."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv(variable, "1")
    assert sl.make_mesh().size == 1 and not caplog.messages
    monkeypatch.setenv(variable, "8")
    assert sl.make_mesh().size == 1
    (told,) = caplog.messages
    assert "one of 8" in told and "torchrun" in told
    monkeypatch.setenv("WORLD_SIZE", "1")  # of torchrun, which srun started on each of 8 hosts
    caplog.clear()
    assert sl.make_mesh().size == 1 and not caplog.messages
