"""Ranges of flattened slices as boxes, against indices that NumPy computes."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlib.checkpoint import fragments
from shardlib.checkpoint.fragments import boxes, runs
from shardlib.common import thresholds
from shardlib.mesh.specs import Window


@st.composite
def windows(draw, shape=None):
    if shape is None:
        shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    first = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Window(shape, first, tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, first)))


def indices(window):
    """The flat indices of a window's elements in the whole tensor, in row-major order."""
    numbers = np.arange(math.prod(window.shape)).reshape(window.shape)
    return numbers[tuple(slice(at, at + size) for at, size in zip(window.first, window.sizes))].reshape(-1)


@given(st.data())
def test_boxes_are_the_range(data):
    window = data.draw(windows())
    start = data.draw(st.integers(0, window.numel))
    stop = data.draw(st.integers(start, window.numel))
    found = boxes(window, start, stop)
    assert len(found) <= max(1, 2 * len(window.shape) - 1)
    wanted = indices(window)[start:stop]
    assert np.concatenate([indices(box) for box in found] or [wanted[:0]]).tolist() == wanted.tolist()


@given(st.data())
def test_an_overlap_is_the_common_elements(data):
    one = data.draw(windows())
    other = data.draw(windows(one.shape))
    shared = one.overlap(other)
    common = sorted(set(indices(one)) & set(indices(other)))
    assert ([] if shared is None else indices(shared).tolist()) == common


@given(st.data())
def test_runs_are_where_a_box_lies_in_another(data):
    outer = data.draw(windows())
    inside = data.draw(windows(outer.sizes))
    inner = Window(outer.shape, tuple(a + b for a, b in zip(outer.first, inside.first)), inside.sizes)
    found = runs(inner, outer)
    starts = list(found.starts())
    assert len(starts) * found.length == inner.numel
    assert [at for start in starts for at in range(start, start + found.length)] == indices(inside).tolist()


@pytest.mark.parametrize("largest", [1, 1 << 20], ids=["large leaves", "small leaves"])
def test_copies_are_shared_out_once(largest):
    shape, leaves = {"data": 2, "node": 3}, [torch.arange(10.0), torch.arange(10.0, 17.0), torch.arange(17.0, 30.0)]
    saved = []
    with thresholds.small(largest):
        for data in range(2):
            for node in range(3):
                mesh = SimpleNamespace(shape=shape, coords={"data": data, "node": node})
                given = [fragments.whole(leaf, str(number)) for number, leaf in enumerate(leaves)]
                saved += [part.data for part in fragments._shared_out(given, mesh, ["data", "node"])]
    assert len(saved) == (18 if largest == 1 else 3)
    assert torch.cat(saved).sort().values.tolist() == list(range(30))
