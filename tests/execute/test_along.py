"""What the tables say that functions do along a dimension, against what they do to a tensor of indices."""

import itertools
import math

import torch
from helpers.profile import NIGHTLY
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from shardlib.execute.along import MOVES, PIECES, grouped, summed

EXAMPLES = settings(max_examples=2000 if NIGHTLY else 150)
shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4)
places = st.integers(0, 3)


def indices(shape, along):
    """A tensor whose elements are their indices along a dimension."""
    return torch.arange(shape[along]).view(-1, *[1] * (-1 - along)).expand(shape).clone()


def along_of(shape, place):
    return place % len(shape) - len(shape)


def along_result(result, dim):
    """What stands at each index along a dimension of a result: one row of values for each."""
    return result.movedim(dim, 0).reshape(result.shape[dim], -1)


@EXAMPLES
@given(shape=shapes, place=places, first=places, second=places, data=st.data())
def test_moves(shape, place, first, second, data):
    along = along_of(shape, place)
    x = indices(shape, along)
    first, second = (along_of(shape, number) for number in (first, second))
    order = data.draw(st.permutations(range(len(shape))))
    calls = [
        (torch.transpose, (first, second)),
        (torch.Tensor.transpose, (first % len(shape), second)),
        (torch.permute, (tuple(order),)),
        (torch.Tensor.permute, tuple(order)),
        (torch.unsqueeze, (first,)),
        (torch.Tensor.unsqueeze, (second % len(shape),)),
        *([(torch.Tensor.mT.__get__, ())] if len(shape) > 1 else []),
    ]
    for function, args in calls:
        found = MOVES[function](x, along, *args)
        wanted = torch.arange(shape[along])[:, None]
        rows = along_result(function(x, *args), found)
        assert (rows == wanted).all(), (function, args)


items = st.one_of(
    st.none(), st.integers(-1, 0), st.builds(slice, st.sampled_from([None, 0, 1]), st.none(), st.sampled_from([1, 2]))
)


@EXAMPLES
@given(shape=shapes, place=places, index=st.lists(items, max_size=5), ellipsis=st.integers(0, 5), data=st.data())
def test_indices(shape, place, index, ellipsis, data):
    assume(sum(item is not None for item in index) <= len(shape))
    along = along_of(shape, place)
    x = indices(shape, along)
    index = (*index[:ellipsis], ..., *index[ellipsis:]) if ellipsis <= len(index) else tuple(index)
    result = x[index]
    found = MOVES[torch.Tensor.__getitem__](x, along, index)
    pieces = PIECES[torch.Tensor.__getitem__](x, along, index)
    event("gone" if found is None else "kept")
    if result.numel():
        kept = [] if found is None else along_result(result, found).amin(1).tolist()
        if found is not None:
            assert (along_result(result, found) == torch.tensor(kept)[:, None]).all()
        else:
            kept = [int(result.flatten()[0])]
            assert (result == kept[0]).all()
        if pieces:
            assert kept == list(range(pieces[0].start, pieces[0].start + pieces[0].size))
        else:  # every second one
            assert kept == list(range(kept[0], shape[along], 2))


@EXAMPLES
@given(shape=shapes, place=places, cuts=st.lists(st.integers(1, 4), min_size=1, max_size=3), other=places)
def test_pieces(shape, place, cuts, other):
    along = along_of(shape, place)
    shape[along] = sum(cuts)
    x, dim = indices(shape, along), along_of(shape, other)
    calls = [
        (torch.chunk, (cuts[0], dim)),
        (torch.Tensor.tensor_split, (min(cuts[0], shape[dim]), dim)),
        (torch.split, (cuts[0], dim)),
        *([(torch.Tensor.split, (cuts, dim)), (torch.tensor_split, ((cuts[0],), dim))] if dim == along else []),
        (torch.Tensor.unbind, (dim,)),
    ]
    for function, args in calls:
        found = PIECES[function](x, along, *args)
        if dim != along:
            assert not found
            continue
        results = [piece.unsqueeze(dim) if function is torch.Tensor.unbind else piece for piece in function(x, *args)]
        values = [(int(piece.min()), int(piece.max())) for piece in results if piece.numel()]
        assert values == [(piece.start, piece.start + piece.size - 1) for piece in found if piece.size], (
            function,
            args,
        )


@EXAMPLES
@given(data=st.data(), sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5))
def test_groups(data, sizes):
    """Any two shapes of one size, with and without a size that is left open."""

    def joined():
        cuts = sorted(data.draw(st.sets(st.integers(1, len(sizes) - 1)))) if len(sizes) > 1 else []
        bounds = [0, *cuts, len(sizes)]
        return [math.prod(sizes[start:stop]) for start, stop in itertools.pairwise(bounds)]

    shape, new = joined(), joined()
    along = along_of(shape, data.draw(places))
    x = indices(shape, along)
    asked = list(new)
    if data.draw(st.booleans()):
        asked[data.draw(st.integers(0, len(new) - 1))] = -1
    result = x.view(asked)
    found = grouped(torch.Tensor.view, x, along, asked, result)
    assert found == grouped(torch.reshape, x, along, (tuple(asked),), result)
    event("mixed" if found is None else "split" if found.size < shape[along] else "whole")
    if found is not None:
        size, count = shape[along], result.shape[found.dim]
        values, here = along_result(result, found.dim), torch.arange(count)[:, None]
        assert found.size == count
        assert (values // max(size // count, 1) == here // max(count // size, 1)).all()
        left_open = [number - len(new) for number, each in enumerate(asked) if each == -1]
        assert found.given is False or found.dim not in left_open


def test_sums_of_einsum():
    for equation, sums in (("btd,btd->bt", True), ("bt d, sd -> bts", True), ("btd,de->btde", False), ("ij,jk", True)):
        assert summed(equation, 0, -1) == sums
    assert not summed("...d,d->...d", 0, -2) and summed("...d,d->...", 0, -1) and not summed("ij,k", 0, -1)
