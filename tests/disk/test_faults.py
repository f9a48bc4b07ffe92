"""What a disk may do to a run: an error that names file, buffer and remedy, and the last committed step still loads."""

import contextlib
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from helpers.faults import BROKEN, DENIED, FULL, READ_ONLY, Faults, damages
from helpers.profile import NIGHTLY

from shardlib.errors import StorageError
from shardlib.sharded.disk import Flat, Store

BUFFERS = {"exp_avg/0": Flat(5000, torch.float32), "params/0": Flat(3000, torch.bfloat16)}
MEMORY = 100_000


@pytest.fixture
def faults(monkeypatch):
    return Faults(monkeypatch)


def value(name, step):
    """What a step holds; before the first there are zeros."""
    flat = BUFFERS[name]
    if step is None:
        return torch.zeros(flat.numel, dtype=flat.dtype)
    return torch.arange(flat.numel).add(step).remainder(128).to(flat.dtype)


def write_step(store, step):
    for name in BUFFERS:
        store.write(name, value(name, step))


def opened(folder):
    return Store([folder], BUFFERS, MEMORY)


def loads(folder, step):
    with opened(folder) as store:
        return store.step == step and damages(store) == [] and all(_equal(store, name, step) for name in BUFFERS)


def _equal(store, name, step):
    tensor = store.fetch(name).result()
    equal = torch.equal(tensor, value(name, step))
    store.release(tensor)
    return equal


@pytest.fixture
def folder(tmp_path):
    """A folder with a committed step 1."""
    with opened(tmp_path) as store:
        write_step(store, 1)
        store.commit(1)
    return tmp_path


def file_of(folder, kind="data"):
    (path,) = folder.glob(f"*.{kind}")
    return path


def test_a_full_disk_is_noticed_before_anything_runs(tmp_path, faults, monkeypatch):
    with monkeypatch.context() as patch:
        Faults(patch).fails("posix_fallocate", FULL, ".data")
        with pytest.raises(StorageError) as refused:
            opened(tmp_path)
    assert re.search(
        r"making .*\.data, of 57,344 bytes for two copies of every buffer: \[Errno 28\]", str(refused.value)
    )
    assert "Free space there, or name further folders" in str(refused.value)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    opened(tmp_path).close()


def test_space_is_reserved(folder):
    assert os.stat(file_of(folder)).st_blocks * 512 >= 57_344


@pytest.mark.parametrize(("number", "remedy"), [(FULL, "Free space"), (BROKEN, "The disk or the way to it fails")])
@pytest.mark.parametrize("after", [0, 1])
def test_a_failed_write_is_an_error_of_the_next_call(folder, monkeypatch, number, remedy, after):
    store = opened(folder)
    with monkeypatch.context() as patch:
        Faults(patch).fails("pwritev", number, ".data", after)
        with contextlib.suppress(StorageError):  # the second write may see what became of the first
            write_step(store, 2)
        with pytest.raises(StorageError) as first:
            store.commit(2)
        name = list(BUFFERS)[after]
        assert f"{file_of(folder)}: [Errno {number}]" in str(first.value)
        assert re.search("writing .* at bytes [0-9,]+ to [0-9,]+ of ", str(first.value)) and remedy in str(first.value)
        assert any(each in str(first.value) for each in BUFFERS)  # threads write them in any order
        assert "Step 1 is whole on disk; what was written since is not" in str(first.value)
        for call in (lambda: store.fetch(name), lambda: store.write(name, value(name, 2)), lambda: store.commit(2)):
            with pytest.raises(StorageError, match="Step 1 is whole"):
                call()
    store.roll_back()  # and the run may go on, if it wants to
    assert _equal(store, name, 1)
    write_step(store, 3)
    store.commit(3)
    store.close()
    assert loads(folder, 3)


@pytest.mark.parametrize("kind", ["data", "header"])
def test_a_failed_sync_is_an_error(folder, monkeypatch, kind):
    store = opened(folder)
    with monkeypatch.context() as patch:
        write_step(store, 2)
        Faults(patch).fails("fdatasync", BROKEN, f".{kind}")
        with pytest.raises(StorageError, match=rf"syncing .*\.{kind}: \[Errno 5\]"):
            store.commit(2)
        with pytest.raises(StorageError):
            store.commit(2)
        with pytest.raises(StorageError):  # what the header says is not known as long as it cannot be written
            store.roll_back() if kind == "header" else store.fetch("params/0")
    store.roll_back()
    store.write("params/0", value("params/0", 7))
    store.close()
    assert loads(folder, 1)


def test_short_reads_and_writes_go_on(folder, monkeypatch):
    store = opened(folder)
    with monkeypatch.context() as patch:
        for call in ("preadv", "pwritev"):
            Faults(patch).short(call, 5000, ".data")
        write_step(store, 2)
        store.commit(2)
        assert all(_equal(store, name, 2) for name in BUFFERS)
    store.close()
    assert loads(folder, 2)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_calls_that_do_nothing_are_an_error(folder, monkeypatch, call):
    store = opened(folder)
    with monkeypatch.context() as patch:
        Faults(patch).short(call, 100, ".data", after=0)
        with pytest.raises(StorageError, match=r"exp_avg/0 at bytes .* of .*\.data: 100 of 20,480 bytes, then no more"):
            if call == "preadv":
                store.fetch("exp_avg/0").result()
            else:
                store.write("exp_avg/0", value("exp_avg/0", 2))
                store.commit(2)
    store.close()
    assert loads(folder, 1)


def test_a_failed_read_is_an_error_and_gives_its_memory_back(folder, monkeypatch):
    with opened(folder) as store:
        for _ in range(20):
            with monkeypatch.context() as patch:
                Faults(patch).fails("preadv", BROKEN, ".data")
                with pytest.raises(
                    StorageError, match=r"reading params/0 at bytes .*\.data: \[Errno 5\] .*system's log"
                ):
                    store.fetch("params/0").result()
        assert _equal(store, "params/0", 1)


def test_a_file_that_is_cut_while_it_is_used(folder):
    store = opened(folder)
    os.truncate(file_of(folder), 4096)
    with pytest.raises(StorageError, match=r"reading exp_avg/0 at bytes .*: 4,096 of 20,480 bytes, then no more"):
        store.fetch("exp_avg/0").result()
    for call in (lambda: write_step(store, 2), lambda: store.commit(2)):
        with pytest.raises(
            StorageError, match=r"from outside:\n  - .*\.data was cut to 4,096 of 57,344 bytes\nRestore"
        ):
            call()
    store.close()
    with pytest.raises(StorageError, match=r"\.data was cut to [0-9,]+ of 57,344 bytes"):
        opened(folder)


def test_a_file_that_was_cut_and_grew_again(folder):
    """Its zeros are not taken for what was written."""
    with opened(folder) as store:
        os.truncate(file_of(folder), 0)
        os.truncate(file_of(folder), 57_344)
        with pytest.raises(StorageError, match=r"has other bytes of exp_avg/0 at .* than were written"):
            store.fetch("exp_avg/0").result()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_is_removed_while_it_is_used(folder, replaced):
    store = opened(folder)
    path = file_of(folder)
    content = path.read_bytes()
    path.unlink()
    if replaced:
        path.write_bytes(content)
    for call in (lambda: write_step(store, 2), lambda: store.commit(2)):
        with pytest.raises(StorageError, match=r"changed from outside:\n  - .*\.data was removed or replaced\nRestore"):
            call()
    assert _equal(store, "params/0", 1)  # this process still has it
    store.close()
    if replaced:
        assert loads(folder, 1)
    else:
        with pytest.raises(StorageError, match=r"opening .*\.data: \[Errno 2\] .* name the folders in the order"):
            opened(folder)


@pytest.mark.parametrize("number", [READ_ONLY, DENIED])
@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_a_folder_that_may_not_be_written(tmp_path, faults, number, call):
    faults.fails(call, number, "states")
    with pytest.raises(StorageError, match=rf"(making|opening) .*states.*: \[Errno {number}\] .*Name a folder"):
        opened(tmp_path / "states")


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_group_that_cannot_be_read_gives_all_its_memory_back(tmp_path, monkeypatch, ahead):
    buffers = {name: Flat(1000, torch.float32) for name in "abcdef"}
    with Store([tmp_path], buffers, 6 * 4096) as store:
        for name in buffers:
            store.write(name, torch.ones(1000))
        store.commit(1)
        with monkeypatch.context() as patch:
            Faults(patch).fails("preadv", BROKEN, ".data", after=1)
            with pytest.raises(StorageError, match="reading"):
                list(store.fetched(["abc", "def"], ahead))
        assert store._pool.room([4096] * 6)


def test_a_write_that_is_refused_gives_its_memory_back(folder, monkeypatch):
    with opened(folder) as store:
        lent = [store.fetch(name).result() for name in BUFFERS]
        with monkeypatch.context() as patch:
            Faults(patch).fails("pwritev", BROKEN, ".data")
            store.write("exp_avg/0", lent[0])
            with pytest.raises(StorageError):
                store.flush()
            with pytest.raises(StorageError, match="Step 1 is whole"):
                store.write("params/0", lent[1])
        with pytest.raises(StorageError, match="is a buffer of"):
            store.write("params/0", lent[0])
        assert store._pool.room([MEMORY])


def test_a_header_that_cannot_be_read_is_closed(folder, monkeypatch):
    held = len(os.listdir("/proc/self/fd"))
    for call in ("pread", "fdatasync"):
        with monkeypatch.context() as patch:
            Faults(patch).fails(call, BROKEN, ".header")
            with pytest.raises(StorageError, match=r"opening .*\.header: \[Errno 5\]|syncing"):
                opened(folder)
        assert len(os.listdir("/proc/self/fd")) == held


def flip(path, at, bit=3):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def test_every_bit_that_flips_in_a_buffer_is_noticed(folder):
    """The buffer and the file are named, and nothing else is damaged."""
    path = file_of(folder)
    whole = path.read_bytes()
    with opened(folder) as store:
        places = {
            name: [
                slot * 28_672 + extent.offset + at
                for extent in store._layout.extents[name]
                for at in (0, extent.length - 1)
            ]
            for name in BUFFERS
            for slot in [store._slots[name]]
        }
    for name, offsets in places.items():
        for at in offsets:
            flip(path, at)
            with opened(folder) as store:
                (damage,) = damages(store)
                assert f"{path} has other bytes of {name} at" in damage and "Restore a checkpoint" in damage
            path.write_bytes(whole)
    assert loads(folder, 1)


def test_the_step_before_a_damaged_one_still_loads(folder):
    with opened(folder) as store:
        write_step(store, 2)
        store.commit(2)
        at = store._slots["params/0"] * 28_672 + store._layout.extents["params/0"][0].offset
    flip(file_of(folder), at)
    with opened(folder) as store:
        assert store.steps == [2, 1] and len(damages(store)) == 1
        store.return_to(1)
        assert damages(store) == []
    assert loads(folder, 1)


def test_every_damage_of_the_header_is_noticed(folder, caplog):
    """A flipped bit is an error or, in a record, leaves the other record; never another content."""
    path = file_of(folder, "header")
    whole = path.read_bytes()
    used = [at for at in range(len(whole)) if whole[at : at + 1].strip(b"\0")]
    errors = 0
    for at in used if NIGHTLY else used[::17]:
        flip(path, at)
        try:
            with opened(folder) as store:
                assert store.step in (None, 1)
                if store.step is None:
                    assert "one of two records cannot be read" in caplog.text
                assert all(_equal(store, name, store.step) for name in BUFFERS)
        except StorageError as error:
            assert path.name in str(error) and "is damaged" in str(error)
            errors += 1
        caplog.clear()
        path.write_bytes(whole)
    assert errors
    path.write_bytes(whole[:4096] + bytes(len(whole) - 4096))
    with pytest.raises(StorageError, match="neither of its records can be read"):
        opened(folder)


_WRITER = """
import sys, torch
from shardlib.sharded.disk import Flat, Store
torch.set_num_threads(1)
buffers = {str(n): Flat(300_000, torch.float32) for n in range(4)}
with Store([sys.argv[1]], buffers, 8_000_000) as store:
    step = store.step or 0
    print(step, flush=True)
    for group in store.fetched([[name] for name in buffers]):
        for name, tensor in group.items():
            assert tensor.eq(step).all(), (name, step)
            store.release(tensor)
    while True:
        step += 1
        for group in store.fetched([[name] for name in buffers]):
            for name, tensor in group.items():
                store.write(name, tensor.add_(1))
        store.commit(step)
        print(step, flush=True)
"""


def test_a_killed_process_goes_on_where_it_had_committed(tmp_path):
    done = 0
    for kill in range(30 if NIGHTLY else 4):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        line = process.stdout.readline()
        assert line, process.stderr.read()
        assert int(line) in (done, done + 1)  # the commit that the kill met may have been complete
        for _ in range(kill % 3 + 1):
            done = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()  # what `communicate` would read comes after what was read ahead here
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        done = int(rest[-1]) if rest else done
    assert done >= 6
