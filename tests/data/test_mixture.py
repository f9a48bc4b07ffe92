"""Mixtures: proportions within one sample after any number, and every source's own epochs."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.data.mixture import _shares
from shardlib.data.order import Shuffled
from shardlib.errors import BatchError
from shardlib.rng import Key

weights_ = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(weights_, st.integers(0, 9), st.integers(0, 2**40))
def test_proportions_hold_within_one_sample(weights, seed, start):
    """From the beginning on, and over any stretch within two."""
    mix = sl.data.mixture([list(range(3 + source)) for source in range(len(weights))], weights)
    order = mix.order(seed, True)
    for first, most in ((0, 1), (start, 2)):
        indices = order.indices(first + np.arange(300))
        sources = np.searchsorted(np.cumsum([3 + source for source in range(len(weights))]), indices, side="right")
        counts = np.cumsum(sources[:, None] == np.arange(len(weights)), 0)
        ideal = np.arange(1, 301)[:, None] * np.array(weights) / sum(weights)
        assert np.abs(counts - ideal).max() < most
    assert sum(mix.weights) == 1 and mix.weights[0] == Fraction(weights[0], sum(weights))


def test_each_source_has_its_own_epochs():
    sizes = [5, 7]
    mix = sl.data.mixture([list(range(5)), list(range(100, 107))], [0.6, 0.4])
    ids = [mix[index] for index in mix.order(3, True).indices(np.arange(200))]
    for source, size in enumerate(sizes):
        own = [number % 100 for number in ids if number // 100 == source]
        want = Shuffled(size, Key(3).fold_in(f"source {source}").seed).indices(np.arange(len(own)))
        assert own == want.tolist()
    unshuffled = [mix[index] for index in mix.order(3, False).indices(np.arange(10))]
    assert [number for number in unshuffled if number < 100] == [0, 1, 2, 3, 4, 0]


def test_a_mixture_in_a_mixture_keeps_its_proportions():
    inner = sl.data.mixture([[0] * 9, [1]], [1, 1])
    for shuffle in (True, False):
        batches = sl.data.loader(sl.data.mixture([inner, [2] * 5], [1, 1]), sl.make_mesh(), 80, shuffle=shuffle)
        assert next(iter(batches)).bincount().tolist() == [20, 20, 40]


@given(st.lists(st.integers(1, 10**9), min_size=2, max_size=6))
def test_weights_without_a_small_common_denominator_are_rounded(weights):
    shares = _shares(weights, len(weights))
    assert min(shares) > 0 and sum(shares) <= 2**16 + len(weights)
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share / sum(shares) - weight / sum(weights)) <= (1 + len(weights)) / 2**16


def test_weights_are_the_sizes_by_default():
    assert sl.data.mixture([[1, 2], [3]]).weights == (Fraction(2, 3), Fraction(1, 3))
    assert sl.data.mixture([[1], [2], [3]], [0.7, 0.2, 0.1]).weights == (
        Fraction(7, 10),
        Fraction(1, 5),
        Fraction(1, 10),
    )


@pytest.mark.parametrize("as_arrays", [True, False])
def test_a_loader_over_a_mixture_resumes(as_arrays):
    parts = [torch.arange(6), torch.arange(10, 19)]
    mix = sl.data.mixture(parts if as_arrays else [part.tolist() for part in parts], [1, 2])
    batches = sl.data.loader(mix, sl.make_mesh(), 4, seed=1)
    rows = [batch.tolist() for _, batch in zip(range(9), batches, strict=False)]
    resumed = sl.data.loader(mix, sl.make_mesh(), 2, seed=1, samples=8)
    assert [batch.tolist() for _, batch in zip(range(2), resumed, strict=False)] == [rows[2][:2], rows[2][2:]]
    assert sorted(number for row in rows for number in row if number < 10) == sorted([*range(6)] * 2)


def test_wrong_mixtures_are_refused():
    for sources, weights, message in (
        ([], None, "no sources"),
        ([[1]], [1, 2], "2 weights for 1 sources"),
        ([[1], [2]], [1, -1], "source 1: -1"),
        ([[1], [2]], ["1", 1], "source 0: '1'"),
        ([[1], [2]], 3, "3 weights for 2 sources"),
        ([[1], [2]], [0, float("nan")], "source 0: 0\n.*source 1: nan"),
        ([[1], []], None, "has no samples"),
    ):
        with pytest.raises(BatchError, match=f"(?s){message}"):
            sl.data.mixture(sources, weights)
    with pytest.raises(BatchError, match="Mixture has an order of its own"):
        sl.data.loader(sl.data.mixture([[1]]), sl.make_mesh(), 1, epochs=1)
