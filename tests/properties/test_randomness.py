"""Keys are independent and their bits random, by the usual statistics.

A p-value below 1e-6 fails. Seeds are fixed, so a test fails or it does not; with seeds drawn anew, its some 20 p-values
would raise a false alarm once in 50,000 times (and once in 4,000 for all of this file).
"""

from fractions import Fraction

import pytest
import torch
from helpers import randomness

import shardlib as sl
from shardlib.kernels.counter import reference
from shardlib.rng import bits_at, random_bits

ALARM = 1e-6
KEYS, COUNT = 16, 2048


def chained():
    key = sl.Key(0)
    for _ in range(KEYS):
        key = key.fold_in(0)
        yield key


FAMILIES = {
    "following seeds": [sl.Key(seed) for seed in range(KEYS)],
    "seeds from 2^40": [sl.Key(2**40 + seed) for seed in range(KEYS)],
    "negative seeds": [sl.Key(-1 - seed) for seed in range(KEYS)],
    "seeds of one upper bit": [sl.Key(1 << (32 + bit)) for bit in range(KEYS)],
    "seeds of one lower bit": [sl.Key(1 << bit) for bit in range(KEYS)],
    "seeds of 20 zeros below": [sl.Key(seed << 20) for seed in range(KEYS)],
    "seeds that the constant of the hash lies between": [
        sl.Key(seed * 0x9E3779B97F4A7C15 % 2**64) for seed in range(KEYS)
    ],
    "steps folded in": [sl.Key(0).fold_in(step) for step in range(KEYS)],
    "one step folded into following seeds": [sl.Key(seed).fold_in(1) for seed in range(KEYS)],
    "a chain of folds": list(chained()),
    "paths": [sl.Key(0).fold_in(f"layers/{i // 2}/{['weight', 'bias'][i % 2]}") for i in range(KEYS)],
    "slots": [sl.Key(1).at_slot(slot) for slot in range(KEYS)],
    "slots between": [sl.Key(1).at_slot(Fraction(slot, 3 * 4099)) for slot in range(1, KEYS + 1)],
}


def refused(found):
    return {name: p for name, p in found.items() if not p >= ALARM}


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_are_independent(family):
    draws = torch.stack([random_bits(key, COUNT) for key in FAMILIES[family]])
    assert not refused(randomness.alike(draws))


@pytest.mark.parametrize(
    ("first", "stride"),
    [(0, 1), (2**32 - 2**16, 1), (0, 2**10), (0, 2**32), (5, 2**40)],
    ids=["following", "where a word ends", "far apart", "upper words", "updates"],
)
def test_the_numbers_of_one_key_are_random(first, stride):
    draws = bits_at(sl.Key(0), first + stride * torch.arange(1 << 17))
    assert not refused(randomness.stream(draws))


def test_the_number_at_the_seeds_own_index_is_random():
    numbers = torch.tensor([int(bits_at(sl.Key(seed), torch.tensor([seed]))) for seed in range(2048)])
    assert not refused(randomness.stream(numbers))


def test_upper_and_lower_words_of_the_index_do_not_mix_up():
    """`stochastic_rounding` has the element in the lower and the update in the upper word."""
    index = torch.arange(COUNT) + (torch.arange(KEYS) << 40)[:, None]
    assert not refused(randomness.alike(bits_at(sl.Key(3), index)))


def test_masks_of_dropout_are_independent():
    """A share p of all pairs is dropped in both of two masks where it should be p²."""
    masks = torch.stack([sl.dropout(torch.ones(1 << 16), 0.5, sl.Key(seed)) == 0 for seed in range(KEYS)]).double()
    both = ((masks - 0.5) @ (masks - 0.5).T * 4)[*torch.triu_indices(KEYS, KEYS, 1)]
    assert both.abs().max() / 2**8 < 6.3  # of 120 normal numbers: one in a million goes beyond


def test_the_statistics_notice_seeds_that_are_not_spread():
    """An implementation is given spread seeds; other ones it only combines with the index."""
    draws = torch.stack([reference.random_bits(seed, torch.arange(COUNT)) for seed in range(KEYS)])
    assert {"values in common", "nearest distributions", "bytes over keys"} <= refused(randomness.alike(draws)).keys()


def test_the_statistics_notice_worse_generators():
    index = torch.arange(1 << 17)
    linear = (index * 1103515245 + 12345) >> 7 & 0xFFFFFF
    assert {"birthday spacings", "serial"} <= refused(randomness.stream(linear)).keys()
    biased = random_bits(sl.Key(0), 1 << 17) & ~1
    assert {"monobit", "bytes"} <= refused(randomness.stream(biased)).keys()
    twice = (biased[:, None] >> torch.arange(12) & 1).repeat_interleave(2, 1) << torch.arange(24)
    assert {"runs", "serial", "serial again"} <= refused(randomness.stream(twice.sum(1))).keys()
    repeated = random_bits(sl.Key(0), COUNT).expand(4, -1)
    assert {"correlation", "equal pairs", "equal bits"} <= refused(randomness.alike(repeated)).keys()


def test_draws_for_different_purposes_differ():
    """With one seed, a loss function's dropout, gradient noise, rounding and random blocks differ."""
    tx = sl.optim.add_noise(1.0, 0.0, 0)
    state, grads = tx.init({"w": torch.zeros(COUNT)}), {"w": torch.zeros(COUNT)}
    noise, _ = tx.update(grads, state, grads)
    step = sl.Key(0).fold_in(0)
    for key in (sl.Key(0), step, step.fold_in("w"), sl.Key(0).fold_in("w")):
        both = torch.stack([noise["w"], sl.init.normal(key, (COUNT,))])
        assert torch.corrcoef(both)[0, 1].abs() < 6 / COUNT**0.5
    layout = sl.sparse.variable(16 * 512, random=1, windows=[1], global_blocks=[])
    rows, columns = layout.pairs()
    drawn = torch.zeros(512, dtype=torch.int64).scatter_reduce_(0, rows, columns.long() * (columns != rows), "amax")
    for key in (sl.Key(0), step):
        wanted = random_bits(key, 512) * 512 >> 24
        assert (drawn == wanted).sum() < 20  # of 512, one in 512 by chance and, as 0 stands for its own, a few more
