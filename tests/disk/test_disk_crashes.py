"""A crash at any operation on the files leaves the last committed step or the one being committed, whole."""

import os
import random
import shutil

import pytest
import torch
from helpers.crashes import Recorder, crashes, remake, write
from helpers.profile import NIGHTLY

from shardlib.common.thresholds import small
from shardlib.sharded.disk import Flat, Store

BUFFERS = {"a": Flat(2500, torch.float32), "b": Flat(9000, torch.uint8), "c": Flat(7, torch.float64)}
FOLDERS = 2
EACH = 40 if NIGHTLY else 3


def opened(root):
    return Store([root / str(number) for number in range(FOLDERS)], BUFFERS, 100_000)


def value(name, number):
    flat = BUFFERS[name]
    return torch.arange(flat.numel).add(number * 11).remainder(128).to(flat.dtype)


def contents(store):
    found = {}
    for name in BUFFERS:
        tensor = store.fetch(name).result()
        found[name] = tensor.clone()
        store.release(tensor)
    return found


def same(found, numbers):
    return all(torch.equal(found[name], value(name, number)) for name, number in numbers.items())


@pytest.fixture
def unsynced(monkeypatch):
    """Syncs do nothing where no crash is recorded."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)


class Run:
    """A run that is recorded: what each commit promised, and when."""

    def __init__(self, root, patch, log=(), steps=None, seed=0):
        self.recorder = Recorder(root, patch)
        self.recorder.log += log
        self.begun = len(self.recorder.log)
        self.steps = dict(steps or {None: dict.fromkeys(BUFFERS, 0)})
        self.safe = []  # (operations done, the steps that a crash may leave from now on)
        self._draw = random.Random(seed)

    def go(self, root):
        store = opened(root)
        found = self.steps[store.step]
        self.safe.append((len(self.recorder.log), store.step))
        for _ in range(3):
            if self._draw.random() < 0.3:
                store.write("a", value("a", 99))
                store.roll_back()
            made = dict(found)
            for name in self._draw.sample(sorted(BUFFERS), self._draw.randint(1, 3)):
                made[name] = self._draw.randrange(1, 90)
                store.write(name, value(name, made[name]))
            step = (store.step or 0) + 1
            step = max(step, *(each + 1 for each in self.steps if each is not None), 1)
            self.steps[step] = made
            store.commit(step)
            self.safe.append((len(self.recorder.log), step))
            found = made
            if self._draw.random() < 0.2 and len(store.steps) == 2:
                store.return_to(store.steps[1])
                self.safe.append((len(self.recorder.log), store.step))
                found = self.steps[store.step]
        store.close()


def check(run, root, each, seed):
    """Every crash of a run leaves a step that may be there, whole; yields some of those states with their steps."""
    order = [step for _, step in run.safe]
    for done, found in crashes(run.recorder.log, each, seed):
        if done < run.begun:
            continue
        after = root / "after"
        write(after, found)
        store = opened(after)
        latest = max((index for index, (at, _) in enumerate(run.safe) if at <= done), default=0)
        allowed = order[latest : latest + 2] or order[:1]
        assert store.step in {None, *allowed} if not any(at <= done for at, _ in run.safe) else store.step in allowed
        numbers = run.steps[store.step]
        held = contents(store)
        zeros = {name: number for name, number in numbers.items() if number == 0}
        assert not any(held[name].any() for name in zeros)
        assert same(held, {name: number for name, number in numbers.items() if number})
        step = store.step
        store.close()
        shutil.rmtree(after)
        yield found, step


def test_a_crash_leaves_a_whole_step(tmp_path, monkeypatch, unsynced):
    """And a crash of the run that goes on after a crash does so too."""
    draw, states, seen = random.Random(1), 0, set()
    with small(8192):
        with monkeypatch.context() as patch:
            (tmp_path / "run").mkdir()
            first = Run(tmp_path / "run", patch, seed=1)
            first.go(tmp_path / "run")
        left = []
        for found, step in check(first, tmp_path, EACH, seed=2):
            left.append((found, step))
            states += 1
            seen.add(step)
        for number, (found, _) in enumerate(draw.sample(left, 40 if NIGHTLY else 4)):
            root = tmp_path / f"again-{number}"
            write(root, found)
            root.mkdir(exist_ok=True)
            with monkeypatch.context() as patch:
                again = Run(root, patch, remake(found), first.steps, seed=number)
                again.go(root)
            states += sum(1 for _ in check(again, tmp_path, 1, seed=number))
    print(f"{len(first.recorder.log)} operations, {states} states of the disk, steps {seen}")
    assert seen >= {None, 1, 2, 3}


def test_what_a_dead_run_left_half_made_is_made_anew(tmp_path, unsynced):
    store = opened(tmp_path)
    store.write("b", value("b", 5))
    store.commit(1)
    store.close()
    (header,) = tmp_path.rglob("*.header")
    header.rename(header.with_suffix(".partial"))
    store = opened(tmp_path)
    assert store.step is None and not any(tensor.any() for tensor in contents(store).values())
    store.close()
    assert sorted(path.suffix for path in tmp_path.rglob("*.*")) == [".data", ".data", ".header", ".lock", ".lock"]
