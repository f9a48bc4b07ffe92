"""What the rules say that functions do along a dimension, against what they do to a tensor of indices."""

import itertools
import math

import torch
import torch.nn.functional as F
from helpers.profile import NIGHTLY
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from shardlib.execute.dim_rules import summed, views

EXAMPLES = settings(max_examples=2000 if NIGHTLY else 150)
shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4)
places = st.integers(0, 3)


def from_end(shape, place):
    return place % len(shape) - len(shape)


def looked_at(function, shape, dim, *args):
    """What a call shows of a dimension: the index at each place of its results is what stands there."""
    indices = torch.arange(shape[dim]).view(-1, *[1] * (-1 - dim)).expand(shape).clone()
    results, found = function(indices, *args), views(function, indices, dim, args, {})
    if found is None:
        return None
    for result, view in zip([results] if isinstance(results, torch.Tensor) else results, found, strict=True):
        assert view.shape == result.shape
        if result.numel():
            sizes = [view.shape[each] for each in view.dims]
            at = (
                torch.arange(math.prod(sizes)) * view.size // math.prod(sizes)
            )  # other dimensions may be joined with it
            shown = [size if each in view.dims else 1 for each, size in zip(range(-result.dim(), 0), view.shape)]
            assert (result == view.start + view.step * at.view(shown)).all(), (function, args, view)
        else:
            assert view.size == 0
    return found


@EXAMPLES
@given(shape=shapes, place=places, first=places, second=places, data=st.data())
def test_moves(shape, place, first, second, data):
    dim, first, second = (from_end(shape, number) for number in (place, first, second))
    order = data.draw(st.permutations(range(len(shape))))
    for function, *args in [
        (torch.transpose, first, second),
        (torch.Tensor.transpose, first % len(shape), second),
        (torch.permute, tuple(order)),
        (torch.Tensor.permute, *order),
        (torch.unsqueeze, first),
        (torch.Tensor.unsqueeze, second % len(shape)),
        *([(torch.Tensor.mT.__get__,)] if len(shape) > 1 else []),
    ]:
        (found,) = looked_at(function, shape, dim, *args)
        assert found.size == shape[dim]


items = st.one_of(
    st.none(), st.integers(-1, 0), st.builds(slice, st.sampled_from([None, 0, 1]), st.none(), st.sampled_from([1, 2]))
)


@EXAMPLES
@given(shape=shapes, place=places, index=st.lists(items, max_size=5), ellipsis=st.integers(0, 5))
def test_indices(shape, place, index, ellipsis):
    assume(sum(item is not None for item in index) <= len(shape))
    index = (*index[:ellipsis], ..., *index[ellipsis:]) if ellipsis <= len(index) else tuple(index)
    assert looked_at(torch.Tensor.__getitem__, shape, from_end(shape, place), index) is not None


@EXAMPLES
@given(shape=shapes, place=places, cuts=st.lists(st.integers(1, 4), min_size=1, max_size=3), other=places)
def test_pieces(shape, place, cuts, other):
    along, dim = from_end(shape, place), from_end(shape, other)
    shape[along] = sum(cuts)
    for function, *args in [
        (torch.chunk, cuts[0], dim),
        (torch.Tensor.tensor_split, min(cuts[0], shape[dim]), dim),
        (torch.split, cuts[0], dim),
        *([(torch.Tensor.split, cuts, dim), (torch.tensor_split, (cuts[0],), dim)] if dim == along else []),
        (torch.Tensor.unbind, dim),
    ]:
        found = looked_at(function, shape, along, *args)
        assert sum(view.size for view in found) == shape[along] * (1 if dim == along else len(found))
    as_numbers = views(torch.Tensor.view, torch.empty(3, 4), -1, (torch.int32,), {})
    assert as_numbers[0].size == 4 and views(torch.Tensor.view, torch.empty(3, 4), -1, (torch.int16,), {}) is None
    halves = views(F.glu, torch.empty(3, 4), -1, (), {})
    assert [(half.start, half.size) for half in halves] == [(0, 2), (2, 2)]


@EXAMPLES
@given(data=st.data(), sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5))
def test_groups(data, sizes):
    """Any two shapes of one size, with and without a size that is left open."""

    def joined():
        cuts = sorted(data.draw(st.sets(st.integers(1, len(sizes) - 1)))) if len(sizes) > 1 else []
        return [math.prod(sizes[start:stop]) for start, stop in itertools.pairwise([0, *cuts, len(sizes)])]

    shape, asked = joined(), joined()
    if data.draw(st.booleans()):
        asked[data.draw(st.integers(0, len(asked) - 1))] = -1
    dim = from_end(shape, data.draw(places))
    found = looked_at(torch.Tensor.view, shape, dim, asked)
    assert found == looked_at(torch.reshape, shape, dim, tuple(asked))
    event("mixed" if found is None else "split" if len(found[0].dims) > 1 else "whole")
    first = from_end(shape, 0)
    assert (
        looked_at(torch.Tensor.view, shape, first, asked) is not None
    )  # nothing is before it that it could be mixed with


def test_sums_of_einsum():
    for equation, sums in (("btd,btd->bt", True), ("bt d, sd -> bts", True), ("btd,de->btde", False), ("ij,jk", True)):
        assert summed(equation, 0, -1) == sums
    assert not summed("...d,d->...d", 0, -2) and summed("...d,d->...", 0, -1) and not summed("ij,k", 0, -1)
