"""Index files: values against plain loops, kills at every change of the disk, and merging in little memory."""

import functools
import itertools
import math
import os
import pickle
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.commands import __main__ as cli
from shardlib.data.analyze import merged
from shardlib.data.files import Index
from shardlib.errors import BatchError

documents_ = st.lists(st.lists(st.integers(0, 9), max_size=9), min_size=1, max_size=12).filter(any)


def mean_rarity(samples):
    """By counts of all tokens."""
    counts = Counter(itertools.chain(*samples))
    total = sum(counts.values())
    return [sum(-math.log(counts[t] / total) for t in sample) / max(1, len(sample)) for sample in samples]


def halves(sample):
    """A user's metric, which processes import."""
    return sum(sample) / 2


def check_order(index, values):
    assert index.values.tolist() == pytest.approx(values, rel=1e-12, abs=1e-12)
    assert index.samples.tolist() == sorted(range(len(values)), key=lambda s: (index.values[s], s))
    assert isinstance(index, sl.data.IndexFile)
    index.verify()


@given(documents_, st.integers(1, 5), st.sampled_from([7, 300, -1]))
@example([[], [0]], 1, 7)
def test_metrics_of_lists(tmp_path_factory, documents, part, pad):
    """With empty samples, and dictionaries with padding, by a token or by what is none."""
    folder = tmp_path_factory.mktemp("index")
    width = max(map(len, documents))
    padded = [
        {"input_ids": [*row, *[pad] * (width - len(row))], "attention_mask": [1] * len(row) + [0] * (width - len(row))}
        for row in documents
    ]
    for dataset in (documents, padded):
        check_order(
            sl.data.analyze(dataset, "length", folder / "length", part=part), [*map(float, map(len, documents))]
        )
        check_order(sl.data.analyze(dataset, "rarity", folder / "rarity", part=part), mean_rarity(documents))
    check_order(sl.data.analyze(documents, halves, folder / "half", part=part), [sum(row) / 2 for row in documents])
    assert sorted(os.listdir(folder)) == ["half", "length", "rarity"]


@pytest.mark.parametrize("make", [sl.data.tokens, sl.data.packed])
def test_metrics_of_token_files(tmp_path, make):
    """Windows, and rows with padding, which does not count."""
    drawn = np.random.default_rng(0)
    documents = [drawn.integers(0, 300, size).astype(np.uint16) for size in drawn.integers(1, 40, 60)]
    file = sl.data.write_tokens(tmp_path / "a.tokens", documents, vocabulary=300)
    dataset = make(file.path, 16)
    rows = [dataset[index] for index in range(len(dataset))]
    held = (
        [[t for t, s in zip(*(r[n].tolist() for n in ("tokens", "segments"))) if s >= 0] for r in rows]
        if ("segments" in rows[0])
        else [row["tokens"].tolist() for row in rows]
    )
    for part in (7, 1 << 20):
        check_order(sl.data.analyze(dataset, "rarity", tmp_path / "a.rarity", part=part), mean_rarity(held))
        check_order(sl.data.analyze(dataset, "length", tmp_path / "a.length", part=part), [*map(float, map(len, held))])


def test_processes_write_the_same_file(tmp_path):
    dataset = [[1, 2], [2, 2, 2], [3], [], [1], [9, 9]]
    for metric in ("rarity", halves):
        one = sl.data.analyze(dataset, metric, tmp_path / "one", part=2)
        many = sl.data.analyze(dataset, metric, tmp_path / "many", part=2, processes=2)
        assert one.path.read_bytes() == many.path.read_bytes()


parts_ = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=12), min_size=1, max_size=6)


@given(parts_, st.integers(1, 8))
def test_parts_are_merged_in_little_memory(parts, room):
    values = list(itertools.chain(*parts))
    found = list(merged([Index(part) for part in parts], room))
    assert np.concatenate(found).tolist() == sorted(range(len(values)), key=lambda sample: (values[sample], sample))
    assert all(len(array) <= room for array in found)


CHANGES = ("open", "fsync", "replace", "mkdir", "rmdir", "unlink")


def until(kill, folder):
    """The number of changes to the disk; in a child process, which dies at change ``kill``."""
    child = os.fork()
    if not child:
        done = itertools.count()

        def counted(call):
            def changed(*args, **kwargs):
                if next(done) == kill:
                    os._exit(9)
                return call(*args, **kwargs)

            return changed

        for name in CHANGES:
            setattr(os, name, counted(getattr(os, name)))
        try:
            sl.data.analyze(DATASET, "rarity", folder / "a.index", part=2)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


DATASET = [[1, 1, 2], [2], [3, 1], [1], [4, 4]]


def test_a_kill_at_any_change_of_the_disk_is_made_up_for(tmp_path):
    """By the same index; what was finished is not made again; an index that was there stays until the new one is whole."""
    wanted = sl.data.analyze(DATASET, "rarity", tmp_path / "a.index").path.read_bytes()
    for kill in itertools.count():
        folder = tmp_path / str(kill)
        folder.mkdir()
        (folder / "a.index").write_bytes(b"old")
        status = until(kill, folder)
        assert (folder / "a.index").read_bytes() in (b"old", wanted)
        finished = len([name for name in (folder / "a.index.parts").glob("*") if name.suffix != ".partial"])
        lines = []
        sl.data.analyze(DATASET, "rarity", folder / "a.index", part=2, progress=lines.append)
        assert (folder / "a.index").read_bytes() == wanted and sorted(os.listdir(folder)) == ["a.index"]
        assert len(lines) + finished == 6
        if not status:
            break
    assert kill > 20


WAITING = """
import os, sys, time
import shardlib as sl

def waits(sample):
    open(f"{sample}.pid", "w").write(str(os.getpid()))
    time.sleep(60 if sample else 0)
    return sample

if __name__ == "__main__":
    sl.data.analyze([0, 1], waits, "a.index", processes=2, part=1)
"""


def test_processes_end_with_a_killed_analysis(tmp_path):
    """That which works, and that which waits for a part."""
    (tmp_path / "waiting.py").write_text(WAITING)
    run = subprocess.Popen([sys.executable, "waiting.py"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.getcwd()})
    files = [tmp_path / "0.pid", tmp_path / "1.pid"]
    until_true(lambda: all(file.exists() and file.read_text() for file in files))
    run.kill()
    run.wait()
    until_true(lambda: not any(os.path.exists(f"/proc/{file.read_text()}") for file in files))
    assert sl.data.analyze([0, 1], float, tmp_path / "a.index", part=1).values.tolist() == [0.0, 1.0]


def until_true(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_parts_of_another_analysis_are_made_again(tmp_path):
    path = tmp_path / "a"
    with pytest.raises(BatchError, match="the metric of sample 3 is inf"):
        sl.data.analyze([1, 2, 3, 4], lambda sample: math.inf if sample == 4 else sample, path, part=2)
    assert [file.name for file in (tmp_path / "a.parts").iterdir()] == ["values-0"] and not path.exists()
    (tmp_path / "a.parts" / "values-2").write_bytes(b"cut")
    check_order(sl.data.analyze([[5], [], [1]], "length", path, part=2), [1.0, 0.0, 1.0])


class Counted:
    """A dataset that counts what is read of it, and may have an identity."""

    def __init__(self, rows, identity=None):
        self.rows, self.identity, self.reads = rows, identity, 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.reads += 1
        return self.rows[index]


def total_but(wrong):
    """The sum of a sample, and an error at one."""

    def total(sample):
        if list(sample) == wrong:
            raise ArithmeticError
        return float(sum(sample))

    return total


ROWS = [[1, 1], [2, 2], [3, 1], [3], [4], [6]]


def stopped(dataset, path, metric=None, part=2):
    """An analysis that fails at sample 4."""
    with pytest.raises((ArithmeticError, BatchError)):
        sl.data.analyze(dataset, metric or total_but([4]), path, part=part)


def resumed(dataset, path, metric=None, part=2):
    """The values of the next analysis, and the parts that it made."""
    made = []
    found = sl.data.analyze(dataset, metric or total_but([4]), path, part=part, progress=made.append)
    return found.values.tolist(), len(made)


def killed(dataset, path, metric, part, parts):
    """An analysis that ends after so many parts."""
    lines = []

    def progress(line):
        lines.append(line)
        if len(lines) == parts:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sl.data.analyze(dataset, metric, path, part=part, progress=progress)


def mended(index, row):
    rows = [*ROWS[:4], [5], ROWS[5]]
    rows[index] = row
    return rows


def test_parts_are_those_of_the_same_samples(tmp_path):
    """A dataset without an identity is known by all of its samples: lists, and arrays, which are read in batches."""
    for index, row, parts in ((4, [5], 1), (0, [7, 7], 2), (1, [0, 4], 2), (3, [9], 2)):
        stopped(ROWS, tmp_path / "a")
        rows = mended(index, row)
        assert resumed(rows, tmp_path / "a") == ([*map(sum, rows)], parts)
    stopped([[1, 1], [2, 2], [3], [4]], tmp_path / "a")
    assert resumed([[100, 1], [200, 2], [3], [5]], tmp_path / "a") == ([101.0, 202.0, 3.0, 5.0], 2)

    before = np.arange(1200).reshape(600, 2) % 50
    for convert, changed, made in itertools.product((np.asarray, torch.as_tensor), (False, True), (1, 2)):
        after = before.copy()
        after[299] += changed  # in the second batch of the first part
        wanted, _ = resumed(convert(after), tmp_path / "b", "rarity", 400)
        killed(convert(before), tmp_path / "a", "rarity", 400, parts=made)
        values, parts = resumed(convert(after), tmp_path / "a", "rarity", 400)
        assert values == wanted and parts == 4 - made + changed


def test_rarity_is_by_the_counts_of_all_parts(tmp_path):
    """So the values of a part whose samples are the same are made again when another part's are others."""
    killed(ROWS, tmp_path / "a", "rarity", 2, parts=4)  # the counts, and the values of the first part
    rows = mended(4, [5])
    values, parts = resumed(rows, tmp_path / "a", "rarity")
    assert values == pytest.approx(mean_rarity(rows)) and parts == 1 + 3


def test_parts_are_those_of_the_same_function(tmp_path):
    """By its code, and what it closes over; "rarity" by the counts of all parts."""
    for metric, values in (
        (lambda sample: 2.0 * sum(sample), [2.0 * sum(row) for row in mended(4, [5])]),
        (total_but([5, 5]), [*map(sum, mended(4, [5]))]),
        (functools.partial(max, default=0), [*map(max, mended(4, [5]))]),
    ):
        stopped(ROWS, tmp_path / "a")
        assert resumed(mended(4, [5]), tmp_path / "a", metric) == (values, 3)
    stopped(ROWS, tmp_path / "a", lambda sample: math.inf if sample == [4] else 0)
    assert resumed(ROWS, tmp_path / "a", lambda sample: 0 if sample == [4] else 1) == ([1, 1, 1, 1, 0, 1], 3)


def test_a_dataset_with_an_identity_is_not_read_again(tmp_path):
    for identity, reads in (("these rows", 2), (None, 6)):
        stopped(Counted(ROWS, identity), tmp_path / "a")
        again = Counted(mended(4, [5]), identity)
        assert resumed(again, tmp_path / "a")[1] == 1 and again.reads == reads
    stopped(Counted(ROWS, "these rows"), tmp_path / "a")
    assert resumed(Counted(mended(0, [7, 7]), "other rows"), tmp_path / "a")[1] == 3


def test_samples_that_cannot_be_recognised_are_read_anew(tmp_path):
    class Row(list):
        def __reduce__(self):
            raise TypeError("no bytes")

    rows = [*map(Row, ROWS)]
    stopped(rows, tmp_path / "a")
    rows[4] = [5]
    assert resumed(rows, tmp_path / "a") == ([2, 4, 4, 3, 5, 6], 3)


def test_two_analyses_of_one_index_are_refused(tmp_path):
    def again(sample):
        with pytest.raises(sl.data.IndexFileError, match="another process is writing"):
            sl.data.analyze([1], halves, tmp_path / "a")
        return 0

    sl.data.analyze([1], again, tmp_path / "a")


def test_files_that_are_damaged_or_of_something_else(tmp_path):
    index = sl.data.analyze([[5], [], [1]], "length", tmp_path / "a")
    assert len(pickle.dumps(index)) < 500 and pickle.loads(pickle.dumps(index)).samples.tolist() == [1, 0, 2]
    whole = index.path.read_bytes()
    for bad, message in ((whole[:-1], "was cut"), (b"x" + whole[1:], "is not an index file")):
        index.path.write_bytes(bad)
        with pytest.raises(sl.data.IndexFileError, match=message):
            sl.data.IndexFile(index.path)
    index.path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(sl.data.IndexFileError, match="damaged: its checksum"):
        sl.data.IndexFile(index.path).verify()


@pytest.mark.parametrize(
    "dataset, metric, message",
    [
        ([], "length", "has no samples"),
        ([[1]], "depth", "metric='depth': use 'length' or 'rarity'"),
        ([{"x": 1}], "length", r"sample 0 has no tokens that can be found \('x'\)"),
        ([[1], [0.5]], "rarity", "sample 1 has no tokens"),
        ([[1], [2, -100]], "rarity", "sample 1 has negative tokens: .* attention_mask"),
        ([[1]], None, "metric=None: use 'length' or 'rarity', or a function"),
        ([(torch.tensor([1, 2]), 0)], "length", r"sample 0 has no tokens that can be found \(tuple\).* use a function"),
        ([[1, [2, 3]]], "rarity", r"sample 0 has no tokens that can be found \(list\)"),
        ([torch.ones(2, requires_grad=True)], "length", r"sample 0 has no tokens that can be found \(Tensor\)"),
        ([{"input_ids": [1, 2], "attention_mask": [1]}], "length", r"tokens of shape \(2,\), .* of \(1,\): give"),
        ([[1], [2]], lambda sample: None, "the metric of sample 0 is None: it must be a number"),
        ([[1], [2]], lambda sample: math.nan, "the metric of sample 0 is nan, as of 2 samples"),
    ],
)
def test_wrong_analyses_are_refused(tmp_path, dataset, metric, message):
    with pytest.raises(BatchError, match=message):
        sl.data.analyze(dataset, metric, tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"part": 1.5}, "part=1.5: use integers"),
        ({"processes": "2"}, "processes='2'"),
        ({"path": None}, "path=None: give the name of a file"),
        (
            {"metric": lambda sample: 1, "processes": 2},
            "cannot be sent to processes .*: define it in a module",
        ),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, wrong, message):
    with pytest.raises(BatchError, match=message):
        sl.data.analyze(**{"dataset": [[1], [2]], "metric": "length", "path": tmp_path / "a"} | wrong)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_no_index(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (".", "", tmp_path):
        with pytest.raises(BatchError, match="is a folder: give the name of a file"):
            sl.data.analyze([[1]], "length", path)
    assert not list(tmp_path.iterdir()) and not list(tmp_path.parent.glob(f"{tmp_path.name}.*"))


def test_a_loader_takes_an_index_file_of_its_dataset(tmp_path):
    file = sl.data.write_tokens(tmp_path / "a.tokens", [bytes(range(64))])
    windows = sl.data.tokens(file.path, 4)
    path = sl.data.analyze(windows, lambda sample: -int(sample["tokens"][0]), tmp_path / "a.index").path
    plan = sl.data.curriculum(2, difficulty=path, up_to=sl.data.constant_pace(-52))
    for workers in (0, 1):
        batch = next(iter(sl.data.loader(windows, sl.make_mesh(), plan, workers=workers)))
        assert batch["tokens"].min() >= 52
    with pytest.raises(BatchError, match="has 12: make an index of this dataset"):
        sl.data.loader(sl.data.tokens(file.path, 5), sl.make_mesh(), plan)
    other = sl.data.write_tokens(tmp_path / "b.tokens", [bytes(range(1, 65))])
    with pytest.raises(BatchError, match=r"is an index of windows of 4 of .* analyse this dataset"):
        sl.data.loader(sl.data.tokens(other.path, 4), sl.make_mesh(), plan)


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sl.data.write_tokens("a.tokens", [b"to be or not to be"])
    source = "def rows():\n    return [[1], [2, 2]]\n\ndef size(sample):\n    return len(sample)\n"
    (tmp_path / "mine_to_analyze.py").write_text(source)
    assert cli.main(["analyze", "a.tokens", "--sequence", "4", "--out", "a.rarity"]) == 0
    printed = capsys.readouterr()
    assert "rarity of 4 samples" in printed.out and "values: 1 of 1 parts" in printed.err
    dataset = ["--dataset", "mine_to_analyze:rows", "--metric", "mine_to_analyze:size", "--out", "b"]
    assert cli.main(["analyze", *dataset]) == 0
    assert sl.data.IndexFile("b").values.tolist() == [1, 2]
    assert cli.main(["analyze", "a.tokens", "--sequence", "4", "--packed", "--metric", "length", "--out", "c"]) == 0
    assert sl.data.IndexFile("c").values.max() == 4
    for arguments, message in (
        ([], "a token file, or --dataset"),
        (["none.tokens"], "No such file"),
        (["a.tokens", "--metric", "mine_to_analyze:depth"], "mine_to_analyze:depth"),
        (["a.tokens", "--sequence", "99"], "a window of sequence=99"),
        (["a.tokens", "--sequence", "4", "--metric", "depth"], r"^shardlib analyze: metric='depth'"),
    ):
        with pytest.raises(SystemExit, match=message):
            cli.main(["analyze", *arguments, "--out", "d"])
