"""Partition specs: refused when malformed, and the arithmetic of shards."""

import copy
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.errors import SpecError, axes_named
from shardlib.mesh.specs import IndexMap, Leaf, check_leaves, shard_of

P = sl.P
SIZES = {"data": 2, "model": 3, "expert": 2, "one": 1}


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (P(), "P()"),
        (P("data"), "P('data')"),
        (P("data", None, ("model", "expert")), "P('data', None, ('model', 'expert'))"),
        (P(None, "model", None), "P(None, 'model')"),
        (P.flat("data"), "P.flat('data')"),
        (P.flat("data", "model"), "P.flat('data', 'model')"),
        (P("model", flat=("data",)), "P('model', flat=('data',))"),
        (P("model", padded=True), "P('model', padded=True)"),
        (
            P(("model", "data"), "expert", flat=("one",), padded=True),
            "P(('model', 'data'), 'expert', flat=('one',), padded=True)",
        ),
    ],
)
def test_a_spec_prints_as_it_is_written(spec, text):
    assert repr(spec) == text
    assert eval(text, {"P": P}) == spec
    assert hash(eval(text, {"P": P})) == hash(spec)
    assert pickle.loads(pickle.dumps(spec)) == spec == copy.deepcopy(spec)


def test_different_specs_are_unequal():
    specs = [P(), P("data"), P(None, "data"), P.flat("data"), P(("data", "model")), P(("model", "data"))]
    specs.append(P("data", padded=True))
    assert len(set(specs)) == len(specs)
    assert P("data") == P("data", None) == P(("data",))
    assert P("data") != "P('data')"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: P("data", "data"), "uses axis 'data' twice"),
        (lambda: P(("data", "model"), flat=("model",)), "uses axis 'model' twice"),
        (lambda: P(0), "0 is not a spec entry; use an axis name"),
        (lambda: P(["data"]), r"\['data'\] is not a spec entry"),
        (lambda: P(("data", None)), "is not a spec entry"),
        (lambda: P(None, "data", padded=True), r"pads dimension 0, which no axis lies on; P.flat\(axis\)"),
    ],
)
def test_a_malformed_spec_is_refused_when_it_is_made(make, message):
    with pytest.raises(SpecError, match=message):
        make()


def test_a_spec_is_immutable():
    with pytest.raises(AttributeError, match="immutable"):
        P("data").entries = ()


def test_splitting_prefers_dimension_0_where_it_divides():
    assert P().split(("data",), (4, 3), SIZES) == P("data")
    assert P().split(("data",), (3, 4), SIZES) == P.flat("data")
    assert P().split(("data", "model"), (12, 5), SIZES) == P(("data", "model"))
    assert P("model").split(("data",), (12,), SIZES) == P(("model", "data"))
    assert P("model").split(("data",), (9,), SIZES) == P("model", flat=("data",))
    assert P(None, "model").split(("data",), (4, 6), SIZES) == P("data", "model")
    assert P().split(("one",), (3,), SIZES) == P()
    assert P().split(("data",), (), SIZES) == P.flat("data")
    assert P("model", padded=True).split(("data",), (11,), SIZES) == P(("model", "data"), padded=True)
    assert P("model", padded=True).split(("data",), (7,), SIZES) == P("model", flat=("data",), padded=True)


def test_every_leaf_that_does_not_fit_is_listed():
    leaves = [
        Leaf("fine", (4, 3), torch.float32, P("data", "model")),
        Leaf("odd", (5, 3), torch.float32, P("data")),
        Leaf("far", (4,), torch.float32, P("pipe")),
        Leaf("flat", (12,), torch.float32, P(None, "data")),
        Leaf("deep", (4, 4), torch.float32, P(None, ("data", "model"))),
    ]
    with pytest.raises(SpecError) as caught:
        check_leaves(leaves, SIZES)
    message = str(caught.value)
    for part in (
        "4 specs do not fit the mesh (data=2, model=3, expert=2, one=1)",
        "odd: shape (5, 3) with P('data'): dimension 0 of size 5 is not divisible by 2 (data=2)",
        "far: shape (4,) with P('pipe'): axis 'pipe' is not on the mesh",
        "flat: shape (12,) with P(None, 'data'): P(None, 'data') has 2 entries for 1 dimensions",
        "dimension 1 of size 4 is not divisible by 6 (data=2 × model=3)",
        "P.flat(axis)",
    ):
        assert part in message
    assert "fine" not in message


AXES = st.permutations(["data", "model", "expert"])


@given(AXES, st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 3))
def test_shards_partition_the_tensor(axes, factors, cut):
    """Whatever axes lie on whatever dimensions: the shards of all ranks are the tensor, each element once."""
    entries = [tuple(axes[:cut]), *[(axis,) for axis in axes[cut:]]][: len(factors)]
    spec = P(*entries)
    shape = [factor * math.prod(SIZES[axis] for axis in entry) for factor, entry in zip(factors, [*entries, (), ()])]
    whole = torch.arange(math.prod(shape)).view(shape)
    assert not spec.problems(shape, SIZES)
    used = {axis: SIZES[axis] for axis in spec.axes}
    seen = []
    for index in range(math.prod(used.values())):
        coords = {}
        for axis, size in used.items():
            index, coords[axis] = divmod(index, size)
        part = shard_of(whole, spec, SIZES, coords)
        assert tuple(part.shape) == spec.local_shape(shape, SIZES)
        seen.append(part.reshape(-1))
    assert torch.equal(torch.cat(seen).sort().values, whole.reshape(-1))


@pytest.mark.parametrize("axes", [("data", "model"), ("model", "data")])
@pytest.mark.parametrize("padded", [False, True])
def test_axes_of_a_dimension_go_from_major_to_minor(axes, padded):
    """The first axis cuts into the largest parts, as ranks are numbered."""
    whole, (major, minor) = torch.arange(12), axes
    for first, second in itertools.product(range(SIZES[major]), range(SIZES[minor])):
        place = 2 * (first * SIZES[minor] + second)
        found = shard_of(whole, P(axes, padded=padded), SIZES, {major: first, minor: second})
        assert found.tolist() == [place, place + 1]


@given(AXES, st.integers(0, 40), st.integers(1, 2), st.integers(0, 3), st.booleans())
def test_padded_shards_partition_the_tensor(axes, rows, columns, cut, split):
    """Equal shards on all ranks, of which the windows are the tensor, each element once and in order."""
    spec = P(tuple(axes[: cut + 1]), *axes[cut + 1 : cut + 2], padded=True)
    shape = (rows, columns * SIZES[spec.entries[1][0]] if len(spec.entries) > 1 else columns)
    if split:
        spec = spec.split([axis for axis in axes if axis not in spec.axes], shape, SIZES)
    assert not spec.problems(shape, SIZES)
    whole, found = torch.arange(math.prod(shape)).view(shape), torch.full(shape, -1)
    local = P(*spec.entries, padded=True).local_shape(shape, SIZES)
    ways = math.prod(SIZES[axis] for axis in spec.entries[0])
    assert 0 <= local[0] * ways - rows < ways
    used = [axis for axis in spec.axes if axis not in spec.flat_axes]
    for position in itertools.product(*(range(SIZES[axis]) for axis in used)):
        coords = dict.fromkeys(SIZES, 0) | dict(zip(used, position))
        window, part = spec.window(shape, SIZES, coords), shard_of(whole, spec, SIZES, coords)
        assert tuple(part.shape) == window.sizes and window.sizes[1:] == local[1:] and window.sizes[0] <= local[0]
        assert torch.equal(IndexMap(window, 0).flat(window.numel), part.reshape(-1))
        assert (window.of(found) == -1).all()
        window.of(found).copy_(part)
    assert torch.equal(found, whole)


@given(st.lists(st.integers(0, 6), max_size=3), st.sampled_from([("data",), ("data", "model")]))
def test_flat_shards_hold_everything_and_little_more(shape, axes):
    ways = math.prod(SIZES[axis] for axis in axes)
    numel, local = math.prod(shape), P.flat(*axes).local_numel(shape, SIZES)
    assert 0 <= local * ways - numel < ways
    assert Leaf("x", tuple(shape), torch.bfloat16, P.flat(*axes)).local_bytes(SIZES) == 2 * local


@given(st.lists(st.integers(0, 6), max_size=3), st.sampled_from([("data",), ("data", "model"), ()]))
def test_a_split_always_fits(shape, axes):
    assert not P().split(axes, shape, SIZES).problems(shape, SIZES)


@pytest.mark.parametrize(
    ("axes", "result"),
    [(["a"], "axis 'a'"), (["a", "b"], "axes 'a' and 'b'"), (["a", "b", "c"], "axes 'a', 'b' and 'c'")],
)
def test_axes_in_messages(axes, result):
    assert axes_named(axes) == result
    with pytest.raises(SpecError, match=rf"uses {result} twice; each axis may appear once"):
        P(tuple(axes), tuple(axes))
