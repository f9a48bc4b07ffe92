"""Layouts of sparse attention: against plain loops over dense matrices, and published densities."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import shardlib as sl
from shardlib import sparse
from shardlib.sparse import Layout

sizes = st.integers(1, 24)
flags = st.booleans()


def plain(size, causal, sees):
    """Every (row, column) asked in turn."""
    return torch.tensor([[sees(r, c) and not (causal and c > r) for c in range(size)] for r in range(size)])


def plain_fixed(size, local, count, pattern, horizontal):
    """The definition of DeepSpeed's documentation, with loops."""
    dense = torch.zeros(size, size, dtype=torch.bool)
    for start in range(0, size, local):
        dense[start : start + local, start : start + local] = True
    first, whole = local - (1 + pattern) * count, size - size % local
    starts = list(range(first, whole, local))
    if size % local:
        starts.append(max(0, min(whole + first, size - count)))
    for start in starts:
        dense[:, start : start + count] = True
        if horizontal:
            dense[start : start + count] = True
    return dense


@given(size=sizes, local=st.integers(1, 3), count=st.integers(1, 3), data=st.data(), causal=flags, horizontal=flags)
def test_fixed(size, local, count, data, causal, horizontal):
    assume(not (causal and horizontal))
    patterns = data.draw(st.integers(1, local))
    layout = sparse.fixed(
        16 * size,
        causal=causal,
        heads=2 * patterns,
        local=local * count,
        global_blocks=count,
        patterns=patterns,
        horizontal=horizontal,
    )
    wanted = [plain_fixed(size, local * count, count, h % patterns, horizontal) for h in range(2 * patterns)]
    wanted = torch.stack([dense.tril() if causal else dense for dense in wanted])
    assert torch.equal(layout.to_dense(), wanted)
    assert layout.columns.numel() <= wanted[:patterns].sum()  # what heads share is held once


@pytest.mark.parametrize("length, density", [(512, 0.3438), (1024, 0.2969), (2048, 0.2734), (4096, 0.2617)])
def test_fixed_has_its_published_densities(length, density):
    assert round(sparse.fixed(length).density, 4) == density


@pytest.mark.parametrize(
    "pattern, percent",
    [
        (sparse.fixed, "25.07"),
        (sparse.bigbird, "0.15"),
        (sparse.longformer, "0.12"),
        (sparse.variable, "0.12"),
        (sparse.sliding_window, "0.05"),
    ],
)
def test_densities_of_long_sequences(pattern, percent):
    assert f"{100 * pattern(65536).density:.2f}" == percent


@given(
    size=sizes,
    windows=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    spans=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3)), max_size=3),
    causal=flags,
    horizontal=flags,
)
def test_variable(size, windows, spans, causal, horizontal):
    assume(not (causal and horizontal))
    layout = sparse.variable(
        16 * size,
        causal=causal,
        windows=windows,
        global_blocks=[start for start, _ in spans],
        global_ends=[start + width for start, width in spans],
        horizontal=horizontal,
    )
    window = [number for number, width in enumerate(windows) for _ in range(width)]
    window += [len(windows) + (i // windows[-1]) for i in range(size)]

    def named(block):
        return any(start <= block < start + width for start, width in spans)

    wanted = plain(size, causal, lambda r, c: window[r] == window[c] or named(c) or (horizontal and named(r)))
    assert torch.equal(layout.to_dense()[0], wanted)


@given(size=sizes, window=st.sampled_from([1, 3, 5, 7]), count=st.integers(0, 3), causal=flags)
def test_windows_and_global_blocks(size, window, count, causal):
    def near(r, c):
        return abs(r - c) <= window // 2

    length = 16 * size - 3  # the last block is not full
    found = sparse.sliding_window(length, window=window, causal=causal)
    assert torch.equal(found.to_dense()[0], plain(size, causal, near))
    first_blocks = min(count, size)
    found = sparse.bigbird(length, random=0, window=window, global_blocks=first_blocks, causal=causal)
    first = plain(size, causal, lambda r, c: near(r, c) or r < count or c < count)
    assert torch.equal(found.to_dense()[0], first)
    found = sparse.longformer(length, window=window, global_blocks=[count], causal=causal)
    wanted = plain(size, causal, lambda r, c: near(r, c) or r == count or c == count)
    assert torch.equal(found.to_dense()[0], wanted)
    found = sparse.dense(length, causal=causal)
    assert torch.equal(found.to_dense()[0], plain(size, causal, lambda r, c: True))


@given(size=st.integers(3, 24), random=st.integers(1, 3), causal=flags, seed=st.integers(0, 2**40))
def test_random_blocks(size, random, causal, seed):
    """Exactly so many different ones a row, or all there are; the same from the same seed, others for each head."""
    make = {"heads": 3, "random": random, "causal": causal, "seed": seed}
    layout = sparse.variable(16 * size, windows=[1], global_blocks=[], **make).to_dense()
    alone = layout & ~torch.eye(size, dtype=torch.bool)
    for row in range(size):
        available = row + 1 if causal else size
        drawn = alone[:, row].sum(dim=1)
        assert ((drawn == min(random, available)) | (drawn == min(random, available) - 1)).all()
    assert not (causal and layout.triu(1).any())
    assert torch.equal(layout, sparse.variable(16 * size, windows=[1], global_blocks=[], **make).to_dense())
    bigbird = sparse.bigbird(16 * size, window=1, global_blocks=0, **make).to_dense()
    assert torch.equal(bigbird, layout)


def test_random_blocks_are_uniform_and_differ_between_heads():
    layout = sparse.variable(16 * 2048, windows=[1], global_blocks=[], random=4, heads=2)
    _, columns = layout.pairs(0)
    share = columns.bincount(minlength=2048).view(8, 256).sum(dim=1) / len(columns)
    assert ((share - 1 / 8).abs() < 0.01).all()
    assert not torch.equal(columns, layout.pairs(1)[1])


@given(size=sizes, heads=st.integers(1, 4), density=st.floats(0, 1), seed=st.integers(0, 2**30))
def test_compressed_is_dense(size, heads, density, seed):
    dense = torch.rand(heads, size, size, generator=torch.Generator().manual_seed(seed)) < density
    dense[heads // 2] = dense[0]  # heads that share their blocks
    layout = Layout.from_dense(dense, 32)
    assert torch.equal(layout.to_dense(), dense)
    assert (layout.heads, layout.size, layout.blocks) == (heads, size, int(dense.sum()))
    assert layout.density == pytest.approx(dense.double().mean().item())
    for number in range(size):
        columns, held = layout.row(number)
        assert torch.equal(columns, dense[:, number].any(0).nonzero().flatten())
        assert torch.equal(held, dense[:, number, columns])
    for first in range(1, size + 1):
        leading = layout.leading(32 * first - 31)
        assert torch.equal(leading.to_dense(), dense[:, :first, :first])
        assert leading.columns.numel() <= layout.columns.numel()  # what heads share is held once


def test_a_hundred_thousand_tokens_are_small():
    layout = sparse.bigbird(2**17, heads=16)
    stored = layout.columns.numel() + layout.row_offsets.numel()
    assert 4 * stored < 2**22 and layout.size == 8192
    shared = sparse.fixed(2**15, heads=16, patterns=4)
    assert 4 * shared.columns.numel() == shared.blocks  # 4 bytes a block, every four heads of which 4 are the same


def test_what_does_not_fit_is_refused():
    offsets, columns = torch.tensor([[0, 1, 2]], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    Layout(16, offsets, columns)
    for block in (8, 24):
        with pytest.raises(ValueError, match="power of two, 16 or more"):
            Layout(block, offsets, columns)
    with pytest.raises(TypeError, match="not int32"):
        Layout(16, offsets.long(), columns)
    with pytest.raises(ValueError, match=r"not \(heads, size \+ 1\)"):
        Layout(16, offsets[0], columns)
    with pytest.raises(ValueError, match="columns must be from 0 to 1"):
        Layout(16, offsets, columns + 1)
    with pytest.raises(ValueError, match="row_offsets must ascend"):
        Layout(16, offsets + 1, columns)
    with pytest.raises(ValueError, match="columns must ascend within a row"):
        Layout(16, torch.tensor([[0, 2, 2]], dtype=torch.int32), columns.flip(0))
    with pytest.raises(ValueError, match="contiguous"):
        Layout(16, offsets, torch.zeros(4, dtype=torch.int32)[::2])
    with pytest.raises(
        ValueError, match="49 positions have 4 blocks of 16, and the layout has 3: make it for length=49"
    ):
        sparse.dense(48).leading(49)
    with pytest.raises(ValueError, match=r"use \(size, size\)"):
        Layout.from_dense(torch.ones(2, 3), 16)
    with pytest.raises(ValueError, match="multiple of global_blocks"):
        sparse.fixed(512, local=3, global_blocks=2)
    with pytest.raises(ValueError, match=r"from 1 to local // global_blocks = 4"):
        sparse.fixed(512, heads=8, patterns=5)
    with pytest.raises(ValueError, match="pass heads"):
        sparse.fixed(512, patterns=2)
    for pattern in (sparse.fixed, sparse.variable):
        with pytest.raises(ValueError, match="leave causal out"):
            pattern(512, causal=True, horizontal=True)
    with pytest.raises(ValueError, match="one end for each start, after it"):
        sparse.longformer(512, global_blocks=[3], global_ends=[3])
    with pytest.raises(ValueError, match="and a row has 2: use fewer"):
        sparse.bigbird(32, random=3)
    with pytest.raises(ValueError, match="length=0"):
        sparse.dense(0)


FIXED, VARIABLE, BIGBIRD = sparse.fixed, sparse.variable, sparse.bigbird
LONGFORMER, WINDOW = sparse.longformer, sparse.sliding_window


@pytest.mark.parametrize(
    ("pattern", "wrong", "error", "message"),
    [
        (WINDOW, {"window": -3}, ValueError, "window=-3 must be at least 1"),
        (WINDOW, {"window": 0}, ValueError, "window=0 must be at least 1"),
        (WINDOW, {"window": 2}, ValueError, "window=2 blocks do not lie evenly .*: use 1 or 3"),
        (WINDOW, {"window": 3.0}, TypeError, "window=3.0 is a float: use an integer"),
        (WINDOW, {"causal": "yes"}, TypeError, "causal='yes': True or False"),
        (BIGBIRD, {"window": 4}, ValueError, "use 3 or 5"),
        (BIGBIRD, {"window": -1}, ValueError, "window=-1 must be at least 1"),
        (BIGBIRD, {"random": -1}, ValueError, "random=-1 must be at least 0"),
        (BIGBIRD, {"random": 9}, ValueError, "and a row has 8: use fewer"),
        (BIGBIRD, {"global_blocks": -2}, ValueError, "global_blocks=-2 must be at least 0"),
        (BIGBIRD, {"global_blocks": 9}, ValueError, r"global_blocks=9, and length=128 has 8 blocks a side: use fewer"),
        (BIGBIRD, {"global_blocks": (0,)}, TypeError, r"global_blocks=\(0,\) is a tuple"),
        (BIGBIRD, {"heads": 0}, ValueError, "heads=0 must be at least 1"),
        (BIGBIRD, {"seed": 0.5}, TypeError, "a seed is an integer"),
        (LONGFORMER, {"window": 6}, ValueError, "use 5 or 7"),
        (LONGFORMER, {"global_blocks": [-1]}, ValueError, r"global_blocks\[0\]=-1 must be at least 0"),
        (LONGFORMER, {"global_blocks": 1}, TypeError, r"global_blocks=1: pass a list of blocks, such as \(1,\)"),
        (LONGFORMER, {"global_blocks": [0], "global_ends": [1, 2]}, ValueError, "one end for each start, after it"),
        (LONGFORMER, {"global_blocks": [0], "global_ends": [1.5]}, TypeError, r"global_ends\[0\]=1.5 is a float"),
        (VARIABLE, {"windows": 4}, ValueError, r"windows=4: pass a list of at least one size, such as \(4,\)"),
        (VARIABLE, {"windows": []}, ValueError, "at least one size"),
        (VARIABLE, {"windows": [2, -1]}, ValueError, r"windows\[1\]=-1 must be at least 1"),
        (VARIABLE, {"random": -1}, ValueError, "random=-1 must be at least 0"),
        (VARIABLE, {"heads": -1}, ValueError, "heads=-1 must be at least 1"),
        (FIXED, {"heads": 0}, ValueError, "heads=0 must be at least 1"),
        (FIXED, {"local": -4}, ValueError, "local=-4 must be at least 1"),
        (FIXED, {"global_blocks": 0}, ValueError, "global_blocks=0 must be at least 1"),
        (FIXED, {"patterns": 0}, ValueError, "patterns=0 must be at least 1"),
        (FIXED, {"local": 2.0}, TypeError, "local=2.0 is a float"),
    ],
)
def test_wrong_sizes_are_refused(pattern, wrong, error, message):
    with pytest.raises(error, match=message):
        pattern(128, **wrong)


@pytest.mark.parametrize("pattern", [sparse.dense, FIXED, VARIABLE, BIGBIRD, LONGFORMER, WINDOW])
def test_lengths_and_blocks_of_every_pattern(pattern):
    for wrong, error, message in (
        ({"length": 0}, ValueError, "length=0 must be at least 1"),
        ({"length": -64}, ValueError, "length=-64 must be at least 1"),
        ({"length": 64.0}, TypeError, "length=64.0 is a float"),
        ({"block": -16}, ValueError, "block=-16 must be at least 1"),
        ({"block": 48}, ValueError, "power of two, 16 or more"),
        ({"block": 16.0}, TypeError, "block=16.0 is a float"),
    ):
        with pytest.raises(error, match=message):
            pattern(**{"length": 128} | wrong)
    made = pattern(np.int64(100), causal=True)  # numbers of numpy are numbers
    assert made.causal and "causal" in repr(made) and not made.to_dense().triu(1).any()
    open_layout = pattern(100, causal=False)
    assert not open_layout.causal and "causal" not in repr(open_layout)


def test_a_causal_layout_stays_one():
    causal = sparse.dense(96, block=32, causal=True)
    for layout in (causal.leading(33), causal.leading(96), causal.to("cpu"), copy.deepcopy(causal)):
        assert layout.causal
    assert dataclasses.replace(causal, row_offsets=causal.row_offsets.clone()).causal
    lower = torch.ones(2, 3, 3).tril()
    assert Layout.from_dense(lower, 32, causal=True).causal and not Layout.from_dense(lower, 32).causal
    with pytest.raises(ValueError, match=r"blocks above the diagonal.*matrix.tril\(\)"):
        Layout.from_dense(torch.ones(2, 3, 3), 32, causal=True)
    gaps = torch.tensor([[0, 0, 0], [0, 0, 0], [1, 0, 1]])
    assert torch.equal(Layout.from_dense(gaps, 32, causal=True).to_dense()[0], gaps.bool())
    with pytest.raises(ValueError, match="above the diagonal"):
        Layout.from_dense(torch.tensor([[0, 0, 0], [0, 0, 1], [0, 0, 0]]), 32, causal=True)
    for length in (0, -5):
        with pytest.raises(ValueError, match=f"length={length} must be at least 1"):
            causal.leading(length)


def test_wrong_pictures_are_refused():
    for wrong in ({"head": 1}, {"head": -1}, {"width": 0}):
        with pytest.raises(ValueError, match="heads are 0 to 0, and a width is at least 1"):
            sparse.draw(sparse.dense(64), **wrong)


def test_drawn_as_text():
    assert sparse.draw(sparse.sliding_window(80)).splitlines() == [
        "██",
        "████",
        "  ████",
        "    ████",
        "      ████",
    ]
    # Cells of 2 × 2 blocks, the last of 2 × 1, 1 × 2 and 1.
    assert sparse.draw(sparse.sliding_window(80), width=3).splitlines() == ["▓▓", "░░▓▓", "  ▒▒██"]


def test_drawn_as_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    sparse.plot(tmp_path / "made" / "layout.png", sparse.fixed(512, heads=2, patterns=2))
    assert (tmp_path / "made" / "layout.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("causal", [False, True])
def test_block_masks_of_flex_attention(causal):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    layout = sparse.bigbird(300, block=32, heads=2, causal=causal)
    mask = sparse.to_block_mask(layout, 300)
    back = sparse.from_block_mask(mask, causal=causal)
    assert torch.equal(back.to_dense(), layout.to_dense()) and back.block == 32 and back.causal == causal
    q, k, v = (torch.randn(1, 2, 300, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), sl.nn.attention(q, k, v, layout=back))
    converted = sparse.to_block_mask(sparse.bigbird(300, block=32, heads=2), 300, causal=True)
    wanted = sl.nn.attention(q, k, v, layout=sparse.bigbird(300, block=32, heads=2), causal=True)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=converted), wanted)
    made = create_block_mask(mask.mask_mod, 1, 2, 300, 300, device="cpu", BLOCK_SIZE=32)
    assert torch.equal(made.to_dense(), mask.to_dense())
    assert torch.equal(sparse.from_block_mask(made, causal=causal).to_dense(), layout.to_dense())


def test_block_masks_that_a_layout_cannot_say():
    from torch.nn.attention.flex_attention import create_block_mask

    def made(mask_mod, batch=1, block=32, keys=256):
        return create_block_mask(mask_mod, batch, 1, 256, keys, device="cpu", BLOCK_SIZE=block)

    window = made(lambda b, h, q, k: (q >= k) & (q - k < 64))
    with pytest.raises(ValueError, match="partial blocks, this BlockMask hides other pairs than causal=True"):
        sparse.from_block_mask(window, causal=True)
    causal = made(lambda b, h, q, k: q >= k)
    with pytest.raises(ValueError, match="than causal=False does"):
        sparse.from_block_mask(causal)
    assert torch.equal(
        sparse.from_block_mask(causal, causal=True).to_dense(), sparse.dense(256, block=32, causal=True).to_dense()
    )
    everything = made(lambda b, h, q, k: q >= 0)
    with pytest.raises(ValueError, match="full blocks, this BlockMask"):
        sparse.from_block_mask(everything, causal=True)
    with pytest.raises(ValueError, match="2 samples"):
        sparse.from_block_mask(made(lambda b, h, q, k: q >= k, batch=2))
    with pytest.raises(ValueError, match="32 × 64"):
        sparse.from_block_mask(made(lambda b, h, q, k: q >= k, block=(32, 64)))
    with pytest.raises(ValueError, match="not those of length=256"):
        sparse.to_block_mask(sparse.dense(300), 256)
    with pytest.raises(ValueError, match="the layout is causal"):
        sparse.to_block_mask(sparse.dense(256, causal=True), 256, causal=False)
