"""Token files, windows and packed documents: each token once, files complete or not there."""

import itertools
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.commands import __main__ as cli
from shardlib.data.tokens import pack
from shardlib.errors import BatchError

documents_ = st.lists(st.lists(st.integers(1, 999), max_size=20), max_size=12)


@given(documents_, st.sampled_from([1000, 70_000]))
def test_a_file_has_the_documents(tmp_path_factory, documents, vocabulary):
    path = tmp_path_factory.mktemp("tokens") / "a.tokens"
    if not any(documents):
        with pytest.raises(sl.data.TokenFileError, match="have no tokens"):
            sl.data.write_tokens(path, documents, vocabulary=vocabulary)
        assert not list(path.parent.iterdir())
        return
    file = sl.data.write_tokens(path, iter(documents), vocabulary=vocabulary, tokenizer="numbers")
    file.verify()
    assert list(path.parent.iterdir()) == [path]
    assert file.tokens.tolist() == list(itertools.chain(*documents))
    assert np.split(file.tokens, file.ends[:-1].astype(int))[-1].tolist() == [d for d in documents if d][-1]
    assert file.documents == sum(map(bool, documents)) and file.header["tokenizer"] == "numbers"
    assert file.tokens.dtype.itemsize == (2 if vocabulary == 1000 else 4)
    assert len(pickle.dumps(file)) < 500 and len(pickle.loads(pickle.dumps(file))) == len(file)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.tokens"
    sl.data.write_tokens(path, [b"old"])

    def broken():
        yield b"new"
        raise OSError("the disk is full")

    for documents, error in ((broken(), "disk is full"), ([[3], [300]], "document 1 has tokens from 300 to 300")):
        with pytest.raises((OSError, sl.data.TokenFileError), match=error):
            sl.data.write_tokens(path, documents)
        assert list(tmp_path.iterdir()) == [path] and sl.data.TokenFile(path).tokens.tobytes() == b"old"


def test_a_crash_before_the_name_leaves_the_old_file(tmp_path, monkeypatch):
    """What is on the disk before the rename, and what is synced by then."""
    path, calls = tmp_path / "a.tokens", []
    sl.data.write_tokens(path, [b"old"])
    monkeypatch.setattr("os.fsync", lambda handle: calls.append("fsync"))
    replace = __import__("os").replace

    def crash(source, target):
        calls.append("replace")
        assert sl.data.TokenFile(path).tokens.tobytes() == b"old"
        sl.data.TokenFile(source).verify()  # complete before it has its name
        replace(source, target)

    monkeypatch.setattr("os.replace", crash)
    sl.data.write_tokens(path, [b"new"])
    assert calls == ["fsync", "replace", "fsync"]


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "a.tokens"
    sl.data.write_tokens(path, [b"one document", b"another"])
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[4100] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(sl.data.TokenFileError, match="is damaged: its checksum is"):
        sl.data.TokenFile(path).verify()
    newer = good.replace(b'"version": 1', b'"version": 2')
    for content, message in (
        (good[:-1], "was cut"),
        (good[:100], "is not a token file; make one"),
        (b"", "is not a token file"),
        (newer, "format 2"),
    ):
        path.write_bytes(content)
        with pytest.raises(sl.data.TokenFileError, match=message):
            sl.data.tokens(path, 4)
    with pytest.raises(FileNotFoundError):
        sl.data.tokens(tmp_path / "nowhere", 4)


@pytest.mark.parametrize("wrong", [[[1.5]], [[[1]]], [["a"]], [[-1]]])
def test_documents_that_are_no_tokens(tmp_path, wrong):
    with pytest.raises(sl.data.TokenFileError, match="document 0"):
        sl.data.write_tokens(tmp_path / "a", wrong)


@given(st.integers(2, 200), st.integers(1, 30))
def test_windows_have_each_target_once(tmp_path_factory, count, sequence):
    path = tmp_path_factory.mktemp("tokens") / "a.tokens"
    sl.data.write_tokens(path, [np.arange(count)])
    if count <= sequence:
        with pytest.raises(BatchError, match=f"{count} tokens, and a window of sequence={sequence}"):
            sl.data.tokens(path, sequence)
        return
    windows = sl.data.tokens(path, sequence)
    rows = windows.rows_at(np.arange(len(windows)))
    assert torch.equal(rows["tokens"].flatten(), torch.arange(len(windows) * sequence))
    assert torch.equal(rows["targets"], rows["tokens"] + 1)
    assert (count - 1) // sequence == len(windows)


@given(st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=40), min_size=1, max_size=12), st.integers(1, 16))
def test_packed_rows_have_every_token_once(documents, sequence):
    dataset = sl.data.packed(documents, sequence)
    rows = dataset.rows_at(np.arange(len(dataset)))
    found = []
    for tokens, targets, segments, positions in zip(*(rows[name] for name in rows), strict=True):
        filled = int((segments >= 0).sum())
        assert (segments[filled:] == -1).all() and (targets[filled:] == -100).all()
        for segment in range(int(segments.max()) + 1):
            here = segments == segment
            piece = tokens[here].tolist()
            assert positions[here].tolist() == list(range(len(piece)))
            assert targets[here][:-1].tolist() == piece[1:]
            found.append((piece, int(targets[here][-1])))
    wanted = []
    for document in documents:
        for start in range(0, len(document), sequence):
            after = document[start + sequence : start + sequence + 1]
            wanted.append((document[start : start + sequence], after[0] if after else -100))
    assert sorted(found) == sorted(wanted)
    assert dataset.filled == sum(map(len, documents)) / (len(dataset) * sequence)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=60))
def test_no_two_rows_of_a_packing_fit_into_one(lengths):
    rows = pack(np.array(lengths), 12)
    held = np.bincount(rows, weights=lengths)
    assert held.max() <= 12
    if len(held) > 1:
        assert np.sort(held)[:2].sum() > 12


def test_packed_documents_from_a_file_are_those_of_the_list(tmp_path):
    documents = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    sl.data.write_tokens(tmp_path / "a", documents)
    one, other = (sl.data.packed(given, 4) for given in (documents, tmp_path / "a"))
    indices = np.arange(len(one))
    for name, values in one.rows_at(indices).items():
        assert torch.equal(values, other.rows_at(indices)[name])


def test_an_empty_packing_is_refused():
    with pytest.raises(BatchError, match="packed: the documents have 0 tokens"):
        sl.data.packed([[]], 4)
    with pytest.raises(BatchError, match="sequence=0"):
        sl.data.packed([[1]], 0)


def test_documents_of_something_else_are_refused(tmp_path):
    """Floats were once cut down to integers."""
    with pytest.raises(BatchError, match=r"document 0: float64 of shape \(1,\)\n.*document 2: object of shape \(\)"):
        sl.data.packed([[1.5], [1], [[1], [2, 3]]], 4)
    with pytest.raises(sl.data.TokenFileError, match=r"document 0 is object of shape \(\), not a list of tokens"):
        sl.data.write_tokens(tmp_path / "a", [[1, [2]]])


def test_tokenize_files_as_bytes(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.txt").write_text("zwei ä\n")
    (tmp_path / "in" / "a.txt").write_text("eins\n\ndrei\n")
    (tmp_path / "in" / ".hidden").write_text("no")
    out = str(tmp_path / "out.tokens")
    assert cli.main(["tokenize", str(tmp_path / "in"), "--out", out]) == 0
    assert "21 tokens of 1 bytes in 2 documents" in capsys.readouterr().out
    assert sl.data.TokenFile(out).tokens.tobytes() == "eins\n\ndrei\n\0zwei ä\n\0".encode()
    cli.main(["tokenize", str(tmp_path / "in"), "--out", out, "--per", "line", "--no-end"])
    assert sl.data.TokenFile(out).ends.tolist() == [4, 8, 15]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps({"body": text}) + "\n" for text in ("one", "three")))
    cli.main(["tokenize", str(lines), "--out", out, "--field", "body"])
    assert sl.data.TokenFile(out).tokens.tobytes() == b"one\0three\0"


def test_tokenize_with_a_hugging_face_tokenizer(tmp_path):
    pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<eos>": 0, "a": 1, "rose": 2, "is": 3}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>").save_pretrained(tmp_path / "words")
    (tmp_path / "text").write_text("a rose is a rose\nis a rose\n")
    arguments = ["--tokenizer", str(tmp_path / "words"), "--per", "line", "--out", str(tmp_path / "out")]
    cli.main(["tokenize", str(tmp_path / "text"), *arguments])
    assert sl.data.TokenFile(tmp_path / "out").tokens.tolist() == [1, 2, 3, 1, 2, 0, 3, 1, 2, 0]


def test_tokenize_refuses_what_it_cannot_read(tmp_path):
    for arguments, message in (
        ([], "give one of them"),
        ([str(tmp_path / "nowhere")], "no file or folder at"),
        ([str(tmp_path)], "have no tokens"),
        ([str(tmp_path), "--tokenizer", str(tmp_path)], "no tokenizer"),
    ):
        with pytest.raises(SystemExit, match=message):
            cli.main(["tokenize", *arguments, "--out", str(tmp_path.with_suffix(".tokens"))])


@pytest.mark.parametrize("made", [sl.data.tokens, sl.data.packed])
@pytest.mark.parametrize("sequence", [0, -3, "4", 2.0, None, float("nan")])
def test_what_is_no_length_of_a_sample(tmp_path, made, sequence):
    path = sl.data.write_tokens(tmp_path / "a.tokens", [bytes(range(9))]).path
    with pytest.raises(BatchError, match=rf"{made.__name__}: sequence={sequence!r}: give the number of tokens"):
        made(path, sequence)
    assert len(made(path, np.int64(4))) > 0
