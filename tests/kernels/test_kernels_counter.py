"""Random bits from a counter: every implementation against Python's integers."""

import pytest
import torch
from helpers import counter, kernels
from hypothesis import given
from hypothesis import strategies as st

from shardlib.kernels.counter import random_bits, signed, spread

INDEX = st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from(counter.EDGES))


@pytest.mark.parametrize("by", ["reference", *kernels.ON_CPU])
@given(seed=st.one_of(st.integers(0, 2**64 - 1), st.sampled_from(counter.SEEDS)), numbers=st.lists(INDEX, max_size=70))
def test_bits(by, seed, numbers):
    with kernels.served_by(by) as using:
        counter.check(using, seed, numbers)


def test_the_bits_are_those_recorded():
    """Checkpoints keep seeds."""
    drawn = random_bits(2**40 + 7, torch.tensor([0, 1, 2**32, 2**60])).tolist()
    assert drawn == [3418110, 14664698, 182820, 2883354]


def test_a_seed_is_spread():
    """Published first outputs of SplitMix64, as signed integers; and no two seeds give the same."""
    assert [spread(seed) for seed in (0, 1234567)] == [16294208416658607535 - 2**64, 6457827717110365317]
    seeds = [*counter.SEEDS[:-1], *range(2, 1000), *(1 << bit for bit in range(33, 63))]
    assert len({spread(seed) for seed in seeds}) == len(seeds)
    assert spread(-5) == spread(2**64 - 5) and signed(2**64 - 5) == -5 and signed(7) == 7


def test_shapes_strides_and_threads():
    index = torch.arange(300_000).reshape(300, 1000).mT
    wanted = random_bits(3, index, using="reference")
    for threads in (1, 3):
        with kernels.threads(threads):
            assert torch.equal(random_bits(3, index), wanted)
    assert random_bits(3, torch.zeros((), dtype=torch.int64)).shape == ()


def test_under_transforms_and_a_compiler():
    index = torch.arange(12).reshape(3, 4)
    assert torch.equal(torch.func.vmap(lambda row: random_bits(5, row))(index), random_bits(5, index))
    compiled = torch.compile(lambda i: random_bits(5, i) + 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(index), random_bits(5, index) + 1)


def test_other_numbers_are_refused():
    with pytest.raises(TypeError, match="pass int64"):
        random_bits(1, torch.arange(3, dtype=torch.int32))
