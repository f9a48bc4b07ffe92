"""Records among an operator's parameters: the operator takes their fields, the function the records."""

import inspect
from typing import NamedTuple

from shardlib.kernels.common.operators import layout_of


class Pair(NamedTuple):
    low: int
    high: int


class Odd(NamedTuple):
    alone: int


class Call(NamedTuple):
    first: int
    pair: Pair
    odd: Odd
    last: int | None


class Sizes(NamedTuple):
    width: int
    height: int


def given(name: str, call: Call, between: bool, sizes: Sizes, end: float) -> list[int]:
    return [name, call, between, sizes, end]


def test_fields_replace_their_record():
    layout = layout_of(given)
    spread = layout.spread(given)
    found = spread("x", 1, 2, 3, 4, None, True, 6, 7, 0.5)
    assert found == ["x", Call(1, Pair(2, 3), Odd(4), None), True, Sizes(6, 7), 0.5]
    assert [type(value) for value in (found[1], *found[1][1:3], found[3])] == [Call, Pair, Odd, Sizes]
    signature = inspect.signature(spread)
    assert [parameter.annotation for parameter in signature.parameters.values()] == [
        str, int, int, int, int, int | None, bool, int, int, float,
    ]  # fmt: skip
    assert signature.return_annotation == list[int]


def test_fakes_take_records_too():
    fake = layout_of(given).spread(lambda name, call, *rest: (call.pair.high, rest))
    assert fake("x", 1, 2, 3, 4, None, True, 6, 7, 0.5) == (3, (True, Sizes(6, 7), 0.5))


def test_a_function_without_records_stays_as_it_is():
    def plain(x: int) -> int:
        return x

    assert layout_of(plain).spread(plain) is plain
