"""Buffers on disk: what was written is read, in bounded memory, over steps, runs and folders."""

import os
import random
import subprocess
import sys
import threading
import time

import pytest
import torch
from helpers.profile import NIGHTLY

from shardlib.common.thresholds import small
from shardlib.errors import StorageError
from shardlib.sharded.disk import Flat, Store
from shardlib.sharded.disk.files import NOTES

BUFFERS = {
    "params/0": Flat(5000, torch.float32),
    "exp_avg/0": Flat(5000, torch.bfloat16),
    "empty": Flat(0, torch.float32),
    "one": Flat(1, torch.int64),
    "params/1": Flat(1024, torch.float64),
    "codes": Flat(12289, torch.uint8),
}
MEMORY = 200_000


@pytest.fixture(autouse=True, params=[None, 4096], ids=["one request", "many requests"])
def request_size(request):
    if request.param is None:
        yield
    else:
        with small(request.param):
            yield


def value(name, step):
    flat = BUFFERS[name]
    return torch.arange(flat.numel).add(len(name) + 7 * step).remainder(120).to(flat.dtype)


def write_step(store, step, names=BUFFERS):
    for name in names:
        store.write(name, value(name, step))


def read(store, name):
    tensor = store.fetch(name).result()
    copy = tensor.clone()
    store.release(tensor)
    return copy


def holds(store, step):
    return all(torch.equal(read(store, name), value(name, step)) for name in BUFFERS)


@pytest.mark.parametrize("folders", [1, 3])
def test_what_was_written_is_read(tmp_path, folders):
    folders = [tmp_path / f"{number}/deep" for number in range(folders)]
    with Store(folders, BUFFERS, MEMORY) as store:
        assert store.step is None and store.steps == [] and store.notes == b""
        assert all(not read(store, name).any() for name in BUFFERS)
        write_step(store, 1)
        assert holds(store, 1)
        store.commit(1, b"noted")
        assert (store.step, store.notes) == (1, b"noted") and holds(store, 1)
    with Store(folders, BUFFERS, MEMORY) as store:
        assert (store.step, store.notes) == (1, b"noted") and holds(store, 1)
        write_step(store, 2)
    with Store(folders, BUFFERS, MEMORY) as store:  # nobody committed the second step
        assert store.step == 1 and holds(store, 1)


def test_buffers_are_divided_over_the_folders(tmp_path):
    folders = [tmp_path / str(number) for number in range(3)]
    buffers = {str(number): Flat(4096, torch.uint8) for number in range(30)}
    with Store(folders, buffers, MEMORY):
        sizes = [path.stat().st_size for folder in folders for path in folder.glob("*.data")]
        assert sizes == [2 * 10 * 4096] * 3
        assert len(list(tmp_path.glob("*/*"))) == 3 + 3 + 1  # data, locks and a header


def test_a_step_may_change_some_buffers_many_times(tmp_path):
    """Any writes, commits, roll-backs and new runs against a plain model of them."""
    draw = random.Random(3)
    for _ in range(20 if NIGHTLY else 3):
        folder = tmp_path / str(draw.random())
        store = Store([folder], BUFFERS, MEMORY)
        committed = current = dict.fromkeys(BUFFERS, -1)
        step = 0
        for _ in range(60):
            action = draw.choice(["write", "write", "write", "read", "update", "commit", "back", "again"])
            name = draw.choice(list(BUFFERS))
            if action == "write":
                current = current | {name: draw.randrange(1000)}
                store.write(name, value(name, current[name]))
            elif action == "update":
                current = current | {name: draw.randrange(1000)}
                tensor = store.fetch(name).result()
                store.write(name, tensor.copy_(value(name, current[name])))
            elif action == "read":
                wanted = value(name, current[name]) if current[name] >= 0 else value(name, 0) * 0
                assert torch.equal(read(store, name), wanted)
            elif action == "commit":
                committed, step = current, step + 1
                store.commit(step)
            else:
                if action == "back":
                    store.roll_back()
                else:
                    store.close()
                    store = Store([folder], BUFFERS, MEMORY)
                current = committed
                assert store.step == (step or None)
        store.close()


def test_the_step_before_the_last_is_there_until_the_first_write(tmp_path):
    with Store([tmp_path], BUFFERS, MEMORY) as store:
        for step in (1, 2, 3):
            write_step(store, step)
            store.commit(step)
    with Store([tmp_path], BUFFERS, MEMORY) as store:
        assert store.steps == [3, 2]
        store.return_to(2)
        assert (store.step, store.steps) == (2, [2]) and holds(store, 2)
    with Store([tmp_path], BUFFERS, MEMORY) as store:
        assert store.steps == [2] and holds(store, 2)
        write_step(store, 4)
        store.commit(4)
        assert store.steps == [4, 2]
        store.write("one", value("one", 5))
        assert store.steps == [4]
        with pytest.raises(StorageError, match=r"step 2 is not on disk; \[4\] are"):
            store.return_to(2)


@pytest.mark.parametrize("again", [False, True], ids=["rolled back", "opened again"])
def test_a_step_that_was_written_over_is_not_offered(tmp_path, again):
    store = Store([tmp_path], BUFFERS, MEMORY)
    for step in (1, 2):
        write_step(store, step)
        store.commit(step)
    store.write("one", value("one", 9))
    if again:
        store.close()
        store = Store([tmp_path], BUFFERS, MEMORY)
    else:
        store.roll_back()
    assert store.steps == [2] and holds(store, 2)
    with pytest.raises(StorageError, match="step 1 is not on disk"):
        store.return_to(1)
    write_step(store, 3)
    store.commit(3)
    assert store.steps == [3, 2]
    store.close()


def test_states_of_one_run_alone_wait_for_no_disk(tmp_path, monkeypatch):
    """Their commits sync nothing, and what was written since is taken back."""
    import os

    with Store([tmp_path], BUFFERS, MEMORY, durable=False) as store:
        with monkeypatch.context() as patch:
            for name in ("fsync", "fdatasync"):
                patch.setattr(os, name, lambda fd: pytest.fail("it waits for the disk"))
            for step in (1, 2, 3):
                write_step(store, step)
                store.commit(step)
                assert store.steps == [step] and holds(store, step)
            write_step(store, 4)
            store.flush()
            assert holds(store, 4)
            store.roll_back()
            assert store.step == 3 and holds(store, 3)
    with Store([tmp_path], BUFFERS, MEMORY, durable=False) as store:
        assert store.step is None and not any(read(store, name).any() for name in BUFFERS)
    with pytest.raises(StorageError, match="  - states of a running step, here a state that was moved\n"):
        Store([tmp_path], BUFFERS, MEMORY)


def test_groups_are_read_ahead_as_far_as_memory_allows(tmp_path, monkeypatch):
    buffers = {str(number): Flat(8192, torch.uint8) for number in range(8)}
    groups = [[str(number)] for number in range(8)]
    for blocks in (1, 2, 5):
        with Store([tmp_path / str(blocks)], buffers, blocks * 8192) as store:
            for number, name in enumerate(buffers):
                store.write(name, torch.full((8192,), number, dtype=torch.uint8))
            store.commit(1)
            fetch, begun, ahead = store.fetch, [], []

            def counted(name, fetch=fetch, begun=begun):
                begun.append(name)
                return fetch(name)

            monkeypatch.setattr(store, "fetch", counted)
            for number, group in enumerate(store.fetched(groups, ahead=3)):
                (tensor,) = group.values()
                assert tensor.eq(number).all()
                ahead.append(len(begun) - number - 1)
                store.release(tensor) if number % 2 else store.write(str(number), tensor.add_(1))
            monkeypatch.undo()
            assert max(ahead) == min(3, blocks - 1)
            for number in range(8):
                assert read(store, str(number)).eq(number + 1 - number % 2).all()


def test_reading_ahead_that_is_stopped_gives_its_memory_back(tmp_path):
    buffers = {str(number): Flat(8192, torch.uint8) for number in range(4)}
    with Store([tmp_path], buffers, 4 * 8192) as store:
        for group in store.fetched([[name] for name in buffers]):
            store.release(*group.values())
            break
        assert store._pool.room([8192] * 4)


def test_a_writer_waits_for_its_disk(tmp_path, monkeypatch):
    """With memory for two buffers, the third write waits until one of the others is on the disk."""
    from shardlib.sharded.disk import pool

    buffers = {str(number): Flat(8192, torch.uint8) for number in range(6)}
    gate, at_disk, real = threading.Semaphore(0), [], pool.write

    def slow(fd, view, offset, what, path):
        if what in buffers:
            at_disk.append(what)
            gate.acquire()
        real(fd, view, offset, what, path)

    with Store([tmp_path], buffers, 2 * 8192) as store:
        monkeypatch.setattr(pool, "write", slow)
        begun = []

        def writer():
            for name in buffers:
                begun.append(name)
                store.write(name, torch.ones(8192, dtype=torch.uint8))

        thread = threading.Thread(target=writer)
        thread.start()
        while len(begun) < 3:
            time.sleep(0.001)
        thread.join(0.05)
        assert begun == ["0", "1", "2"] and thread.is_alive()
        gate.release(1000)
        thread.join()
        store.commit(1)
        assert store._pool.room([8192, 8192]) and all(read(store, name).all() for name in buffers)


def test_memory_that_nobody_gives_back_is_an_error_not_a_hang(tmp_path):
    buffers = {"a": Flat(8192, torch.uint8), "b": Flat(8192, torch.uint8)}
    with Store([tmp_path], buffers, 8192) as store:
        kept = store.fetch("a").result()
        with pytest.raises(
            StorageError, match=r"needs 8,192 bytes of host memory, and 8,192 of 8,192 are lent: write or"
        ):
            store.fetch("b")
        store.release(kept)
        read(store, "b")
    with pytest.raises(StorageError, match="5,000 bytes of host memory do not hold the largest buffer, of 8,192"):
        Store([tmp_path], buffers, 5000)


def test_lent_memory_is_aligned_and_used_again(tmp_path):
    buffers = {"a": Flat(5000, torch.uint8)}
    with Store([tmp_path], buffers, 16384) as store:
        addresses = set()
        for _ in range(10):
            tensor = store.fetch("a").result()
            addresses.add(tensor.data_ptr())
            store.write("a", tensor)
        assert len(addresses) <= 2 and not any(address % 4096 for address in addresses)


def test_what_is_wrong_with_a_write_is_said(tmp_path):
    with Store([tmp_path], BUFFERS, MEMORY) as store:
        with pytest.raises(StorageError, match=r"params/0 is a buffer of .*5000.*float32.*, and was given .*3.*"):
            store.write("params/0", torch.ones(3))
        with pytest.raises(StorageError, match="70,000 bytes of notes; 65,536 is the most"):
            store.commit(1, bytes(70_000))
        store.commit(1, bytes(NOTES))


def test_two_runs_on_one_folder_are_refused(tmp_path):
    with Store([tmp_path / "a", tmp_path / "b"], BUFFERS, MEMORY), Store([tmp_path], BUFFERS, MEMORY, rank=1, ranks=2):
        with pytest.raises(StorageError, match=r"b is in use: another run .* rank-0.lock"):
            Store([tmp_path / "b"], BUFFERS, MEMORY)
    program = (
        "import sys, torch; from shardlib.sharded.disk import Flat, Store; "
        "store = Store([sys.argv[1]], {'a': Flat(4, torch.float32)}, 4096); print('open', flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "c")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout.readline() == b"open\n"
    with pytest.raises(StorageError, match="is in use"):
        Store([tmp_path / "c"], {"a": Flat(4, torch.float32)}, 4096)
    other.kill()
    other.wait()
    Store([tmp_path / "c"], {"a": Flat(4, torch.float32)}, 4096).close()


def test_a_folder_of_another_run_is_refused_with_what_differs(tmp_path):
    Store([tmp_path], BUFFERS, MEMORY, rank=0, ranks=2).close()
    others = {name: flat for name, flat in BUFFERS.items() if name != "one"} | {
        "params/1": Flat(1000, torch.float64),
        "new": Flat(2, torch.float16),
    }
    with pytest.raises(StorageError) as refused:
        Store([tmp_path], others, MEMORY, rank=0, ranks=2)
    for line in (
        "  - params/1: 1,024 × float64, here 1,000 × float64\n",
        "  - one: 1 × int64, here absent\n",
        "  - new: absent, here 2 × float16\n",
        "Use its plan, another folder, or remove these files",
    ):
        assert line in str(refused.value)
    for ranks, rank in ((1, 0), (3, 2)):
        with pytest.raises(StorageError, match=f"  - 2 ranks, here {ranks}\n"):
            Store([tmp_path], BUFFERS, MEMORY, rank=rank, ranks=ranks)
    with pytest.raises(StorageError, match="  - 1 folders, here 2\n"):
        Store([tmp_path, tmp_path / "more"], BUFFERS, MEMORY, rank=0, ranks=2)
    Store([tmp_path], BUFFERS, MEMORY, rank=1, ranks=2).close()


def test_another_format_is_refused(tmp_path, monkeypatch):
    from shardlib.sharded.disk import files

    with monkeypatch.context() as patch:
        patch.setattr(files, "FORMAT", 99)
        Store([tmp_path], BUFFERS, MEMORY).close()
    with pytest.raises(StorageError, match="  - format 99, here 2\n"):
        Store([tmp_path], BUFFERS, MEMORY)


def test_files_keep_the_size_of_requests_they_were_made_with(tmp_path):
    with small(8192), Store([tmp_path], BUFFERS, MEMORY) as store:
        write_step(store, 1)
        store.commit(1)
    with Store([tmp_path], BUFFERS, MEMORY) as store:
        assert store._layout.request in (4096, 8192) and holds(store, 1)


def test_without_direct_io_it_is_said_once(tmp_path, monkeypatch, caplog):
    import errno
    import os

    opened = os.open

    def plain(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", plain)
    for _ in range(2):
        with Store([tmp_path], BUFFERS, MEMORY) as store:
            write_step(store, 1)
            store.commit(1)
            assert holds(store, 1)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: its file system has no direct I/O, so buffers on disk pass through the system's cache"
    ]


def test_direct_io_is_used_where_the_file_system_has_it(tmp_path):
    import os

    probe = tmp_path / "probe"
    probe.touch()
    try:
        os.close(os.open(probe, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("no direct I/O here")
    with Store([tmp_path], BUFFERS, MEMORY) as store:
        assert store._files.direct == [True]


def test_syncs_of_a_commit_are_few(tmp_path, monkeypatch):
    """One for each file that was written, and one for the record."""
    import os

    synced, real = [], os.fdatasync
    with Store([tmp_path / str(number) for number in range(2)], BUFFERS, MEMORY) as store:
        write_step(store, 1)
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or real(fd))
        store.commit(1)
        assert sorted(path.rpartition(".")[2] for path in synced) == ["data", "data", "header"]
        assert synced[-1].endswith("header")
        del synced[:]
        store.commit(2)
        assert len(synced) == 1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_hold_the_folder(tmp_path):
    """One that lives on when the store is closed, and closes nothing of it itself."""
    store = Store([tmp_path], BUFFERS, MEMORY)
    ready, told = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(ready[1], b"x")
        os.read(told[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        with pytest.raises(StorageError, match="is in use"):
            Store([tmp_path], BUFFERS, MEMORY)
        store.close()
        Store([tmp_path], BUFFERS, MEMORY).close()
    finally:
        os.write(told[1], b"x")
        os.waitpid(child, 0)
        for end in (*ready, *told):
            os.close(end)


def test_a_store_is_closed_within_threadings_own_locks(tmp_path, monkeypatch):
    """A collection may close a store anywhere, also where a thread begins: waiting for a thread to end takes locks there."""
    store = Store([tmp_path], BUFFERS, MEMORY)
    write_step(store, 1)
    monkeypatch.setattr(threading.Thread, "join", lambda *_: pytest.fail("waited for a thread to end"))
    store.close()
    with Store([tmp_path], BUFFERS, MEMORY):
        monkeypatch.undo()
