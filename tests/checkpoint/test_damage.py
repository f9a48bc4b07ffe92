"""Damage of every kind to a checkpoint is noticed before the state changes, and named."""

import os
import random
import shutil

import pytest
from helpers import saved
from helpers.models import mlp, regression_batch, share
from helpers.profile import NIGHTLY

import shardlib as sl
from shardlib.errors import RankFailure

LOSS, PARAMS = mlp([5, 7, 3])
BATCH = regression_batch(4, 5, 3)
NUMBER = 2000 if NIGHTLY else 120


def fresh(mesh, seed=0):
    params = {"layers": [{name: leaf + seed for name, leaf in layer.items()} for layer in PARAMS["layers"]]}
    return sl.make_train_step(LOSS, sl.shard(params, mesh, stage=3), sl.optim.adamw(0.1))


def save(mesh, folder):
    state, step = fresh(mesh)
    for _ in range(2):
        state, _ = step(state, share(BATCH, mesh.rank, mesh.size))
    return sl.checkpoint.save(folder, state)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return sl.simulate(save, tmp_path_factory.mktemp("good"), mesh={"data": 2})[0]


def refused(folder, ranks=2):
    return saved.refused(lambda mesh: fresh(mesh, seed=1)[0], folder, ranks)


def flip(draw, folder):
    path = draw.choice(sorted(folder.iterdir()))
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return path


def cut(draw, folder):
    path = draw.choice(sorted(folder.iterdir()))
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])
    return path


def grow(draw, folder):
    path = draw.choice(sorted(folder.iterdir()))
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randint(1, 600)))
    return path


def swap_ranges(draw, folder):
    path = draw.choice(sorted(folder.iterdir()))
    content = bytearray(path.read_bytes())
    while True:
        size = draw.randint(1, len(content) // 2)
        one, other = sorted(draw.sample(range(len(content) - size + 1), 2))
        if one + size <= other and content[one : one + size] != content[other : other + size]:
            break
    content[one : one + size], content[other : other + size] = content[other : other + size], content[one : one + size]
    path.write_bytes(content)
    return path


def zeros(draw, folder):
    path = draw.choice(sorted(folder.iterdir()))
    content = bytearray(path.read_bytes())
    start = draw.randrange(len(content))
    stop = min(len(content), start + draw.choice([1, 512, 4096]))
    if not any(content[start:stop]):
        return flip(draw, folder)
    content[start:stop] = bytes(stop - start)
    path.write_bytes(content)
    return path


def swap_files(draw, folder):
    one, other = sorted(folder.glob("*.distcp"))
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    return one


def remove(draw, folder):
    path = draw.choice([path for path in sorted(folder.iterdir()) if path.name != "manifest.json"])
    path.unlink()
    return path


def test_every_damage_is_noticed(good, tmp_path):
    draw, found = random.Random(1), {}
    for number in range(NUMBER):
        kind = draw.choice([flip, flip, cut, grow, swap_ranges, zeros, swap_files, remove])
        folder = tmp_path / f"step-{number}"
        shutil.copytree(good, folder)
        path = kind(draw, folder)
        message = refused(folder, ranks=draw.choice([1, 2]))
        assert path.name in message, (kind, message)
        found[kind.__name__] = found.get(kind.__name__, 0) + 1
        shutil.rmtree(folder)
    print(found)
    assert len(found) == 7


def test_a_damaged_tensor_is_named(good, tmp_path):
    folder = tmp_path / "step-00000002"
    shutil.copytree(good, folder)
    with (folder / "__1_0.distcp").open("r+b") as file:
        file.seek(-200, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))
    message = refused(folder)
    assert "step-00000002 is damaged:\n  - __1_0.distcp: bytes " in message
    assert "of opt/inner/" in message and "Restore an older checkpoint" in message


def test_a_missing_file_names_the_tensors_in_it(good, tmp_path):
    folder = tmp_path / "step-00000002"
    shutil.copytree(good, folder)
    (folder / "__0_0.distcp").unlink()
    assert "__0_0.distcp: cannot be read" in refused(folder) and "it holds opt/inner/" in refused(folder)


def test_a_file_that_may_not_be_read_is_named(good, tmp_path, monkeypatch):
    opened = os.open

    def denied(path, *args, **kwargs):
        if str(path).endswith("__0_0.distcp"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", denied)
    assert "__0_0.distcp: cannot be read ([Errno 13] Permission denied" in refused(good)


def test_a_later_format_is_refused(good, tmp_path):
    from shardlib.checkpoint import manifest

    text = (good / "manifest.json").read_bytes()
    made = manifest.loads(text, good)
    assert made.dumps() == text
    made.format = 99
    folder = tmp_path / "step-00000002"
    shutil.copytree(good, folder)
    (folder / "manifest.json").write_bytes(made.dumps())
    said = refused(folder)
    assert "format 99 was written by shardlib" in said and "this one reads up to 1. Install a newer shardlib" in said


@pytest.mark.parametrize(
    ("number", "name"), [(30, "Read-only file system"), (13, "Permission denied"), (28, "No space left")]
)
@pytest.mark.parametrize("call", ["mkdir", "open", "pwritev", "fsync", "rename"])
def test_what_the_disk_refuses_is_said_and_leaves_the_last_checkpoint(tmp_path, monkeypatch, number, name, call):
    def run(mesh):
        state, step = fresh(mesh)
        first = sl.checkpoint.save(tmp_path, state)
        state, _ = step(state, share(BATCH, mesh.rank, mesh.size))
        with monkeypatch.context() as patch:
            if mesh.rank == 0:
                patch.setattr(os, call, lambda *args, **kwargs: (_ for _ in ()).throw(OSError(number, name)))
            with pytest.raises((OSError, RankFailure), match=name):
                sl.checkpoint.save(tmp_path, state)
        restored = sl.checkpoint.restore(tmp_path, fresh(mesh, seed=1)[0])
        return restored.step, first == sl.checkpoint.latest(tmp_path)

    assert sl.simulate(run, mesh={"data": 1}) == [(0, True)]
