"""Slots of experts: every rank's rows go to one copy of each expert, and every slot has the weights of its expert."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlib.nn.moe.slots import Slots


@st.composite
def layers(draw):
    ranks, room, spare = draw(st.integers(2, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    experts = ranks * room
    copies = draw(st.lists(st.integers(0, ranks * spare - 1), unique=True, max_size=experts))
    replicas = draw(st.permutations(copies + [-1] * (experts - len(copies))))
    return Slots(tuple(draw(st.permutations(range(experts)))), tuple(replicas), ranks, spare)


@given(layers())
def test_a_slot_has_rows_of_one_expert_and_one_half(slots):
    each = sum(slots.of_rank)
    found = {}
    for source in range(slots.ranks):
        for expert, slot in enumerate(slots.of_rows(source)):
            found.setdefault(slot, set()).add((expert, 2 * source // slots.ranks))
    assert all(len(what) == 1 for what in found.values())
    for slot, ((expert, half),) in ((slot, tuple(what)) for slot, what in found.items()):
        rank, place = divmod(slot, each)
        if place < 2 * slots.room:
            assert (rank * slots.room + place % slots.room, place // slots.room) == (slots.seats[expert], half)
        else:
            assert rank * slots.spare + place - 2 * slots.room == slots.replicas[expert]
            assert 2 * (slots.seats[expert] // slots.room) // slots.ranks != half


@given(layers())
def test_a_spare_slot_has_the_row_of_its_expert(slots):
    sent = {rank: iter(slots.rows(rank)) for rank in range(slots.ranks)}
    rows = [owner * slots.room + next(sent[owner]) for owner in slots.owners]
    for slot, row in enumerate(rows):
        expert = slots.replicas.index(slot) if slot in slots.replicas else None
        assert row == (slot // slots.spare * slots.room if expert is None else slots.seats[expert])
    assert all(next(left, None) is None for left in sent.values())


def test_a_copy_in_a_slot_that_there_is_not_is_none():
    """As after a restart on fewer ranks."""
    slots = Slots((0, 1), (5, -1), 2, 1)
    assert slots.of_rows(0) == [0, 3] and slots.of_rows(1) == [1, 4] and slots.owners == (0, 1)


@pytest.mark.parametrize(("ranks", "room", "spare"), [(2, 2, 1), (4, 2, 3), (3, 1, 1)])
def test_a_plan_takes_slots_to_be_full(ranks, room, spare):
    slots = Slots.assumed(ranks * room, ranks, spare)
    away = [owner != slot // spare for slot, owner in enumerate(slots.owners)]
    assert sum(away) == ranks * min(spare, room)


@pytest.mark.parametrize(("seats", "replicas"), [((0, 0), (-1, -1)), ((0, 1), (1, 1))])
def test_what_is_refused(seats, replicas):
    with pytest.raises(ValueError, match="a slot has one expert"):
        Slots(seats, replicas, 2, 1)
