"""Text to bytes to batches: deterministic, the same on any number of ranks, and resumable at any step."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.data.bytes import batch_at, batches, load_bytes, split, windows


def text(length: int) -> np.ndarray:
    return (np.arange(length) % 251).astype(np.uint8)


def test_a_file_is_its_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"hello")
    assert load_bytes(tmp_path / "a.txt").tobytes() == b"hello"


def test_a_folder_is_its_text_files_in_order(tmp_path):
    for name, content in {"b/x": b"2", "a": b"1", "b/y": b"3", "binary": b"\0", ".hidden": b"4"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert load_bytes(tmp_path).tobytes() == b"123"


def test_of_a_token_file_the_tokens_are_taken(tmp_path):
    """Alone and in a folder, without its header and ends; other tokens than bytes, and index files, are refused."""
    sl.data.write_tokens(tmp_path / "b.tokens", [b"two", b"three"])
    (tmp_path / "a.txt").write_bytes(b"one")
    assert load_bytes(tmp_path / "b.tokens").tobytes() == b"twothree"
    assert load_bytes(tmp_path).tobytes() == b"onetwothree"
    sl.data.write_tokens(tmp_path / "few.tokens", [[1, 2]], vocabulary=65, tokenizer="letters")
    for path in (tmp_path / "few.tokens", tmp_path):
        with pytest.raises(sl.data.TokenFileError, match="of the tokenizer 'letters', not bytes: read them"):
            load_bytes(path)
    index = sl.data.analyze(sl.data.tokens(tmp_path / "b.tokens", 2), "rarity", tmp_path / "index")
    with pytest.raises(sl.data.TokenFileError, match="index is not a token file but an index file"):
        load_bytes(index.path)


def test_the_standard_library_is_the_default():
    data = load_bytes()
    assert data.dtype == np.uint8 and len(data) > 5_000_000
    assert np.array_equal(data, load_bytes())


def test_missing_and_empty_text_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_bytes(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no text in"):
        load_bytes(tmp_path)


@given(st.integers(20, 200_000), st.sampled_from([0.05, 0.1, 0.25, 0.5]))
def test_split_keeps_every_byte_once(length, validation):
    data = np.arange(length)
    train, held_out = split(data, validation)
    assert np.array_equal(np.sort(np.concatenate([train, held_out])), data)
    assert abs(len(held_out) / length - validation) <= 0.05 + validation / 2


@pytest.mark.parametrize("validation", [0.0, -0.1, 0.6])
def test_split_refuses_an_invalid_share(validation):
    with pytest.raises(ValueError, match=r"must lie in \(0, 0.5\]"):
        split(text(1000), validation)


def test_split_refuses_too_little_text():
    with pytest.raises(ValueError, match="10 bytes are too few"):
        split(text(10))


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_ranks_share_one_global_batch(seed, step, ranks):
    data = text(1000)
    whole = batch_at(data, 12, 7, seed=seed, step=step)
    parts = [batch_at(data, 12, 7, seed=seed, step=step, rank=r, ranks=ranks) for r in range(ranks)]
    for name in ("tokens", "targets"):
        assert torch.equal(whole[name], torch.cat([part[name] for part in parts]))


def test_targets_are_one_byte_ahead():
    batch = batch_at(text(1000), 5, 9, seed=1, step=2)
    assert batch["tokens"].shape == batch["targets"].shape == (5, 9)
    assert batch["tokens"].dtype == batch["targets"].dtype == torch.int64
    assert torch.equal((batch["tokens"] + 1) % 251, batch["targets"])


def test_every_window_can_be_drawn():
    starts = {int(batch_at(text(12), 1, 9, seed=0, step=s)["tokens"][0, 0]) for s in range(50)}
    assert starts == {0, 1, 2}


def test_batches_resume():
    data = text(1000)
    ran_through = list(itertools.islice(batches(data, 4, 8, seed=3), 6))
    resumed = list(itertools.islice(batches(data, 4, 8, seed=3, step=4), 2))
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(ran_through[4:], resumed, strict=True))
    assert not torch.equal(ran_through[0]["tokens"], ran_through[1]["tokens"])


def test_a_batch_that_ranks_cannot_share_is_refused():
    with pytest.raises(
        ValueError, match=r"10 rows does not divide over 4 ranks; choose a multiple of 4, for example 8"
    ):
        batch_at(text(1000), 10, 8, seed=0, step=0, ranks=4)
    with pytest.raises(ValueError, match="8 bytes hold no window of 8"):
        batch_at(text(8), 1, 8, seed=0, step=0)


@given(st.integers(2, 400), st.integers(1, 5), st.integers(1, 9), st.integers(1, 20))
def test_windows_do_not_overlap_and_reach_over_the_text(length, batch, sequence, limit):
    data = np.arange(length)
    available = (length - 1) // sequence
    if available < batch:
        with pytest.raises(ValueError, match="bytes hold"):
            list(windows(data, batch, sequence, limit=limit))
        return
    got = list(windows(data, batch, sequence, limit=limit))
    assert len(got) == min(limit, available // batch)
    tokens = torch.cat([b["tokens"] for b in got]).flatten()
    assert len(tokens.unique()) == len(tokens)
    assert all(torch.equal(b["tokens"] + 1, b["targets"]) for b in got)


def test_seeds_are_those_of_keys():
    """A negative one is itself plus 2^64; of more bits there are none."""
    data = text(1000)
    negative, upper, one = (batch_at(data, 6, 9, seed=seed, step=2)["tokens"] for seed in (-1, 2**64 - 1, 1))
    assert torch.equal(negative, upper) and not torch.equal(negative, one)
    with pytest.raises(ValueError, match="a seed of 65 bits, and 64 are the most"):
        batch_at(data, 6, 9, seed=2**64, step=2)
