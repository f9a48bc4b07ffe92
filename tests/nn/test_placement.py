"""The placement of experts: a layer whose experts lie in other rows is the same function, and chosen seats and copies balance
loads; every rank's rows go to one copy of each expert, and every slot has the weights of its expert."""

from itertools import combinations, permutations, product

import pytest
import torch
from helpers.trees import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib as sl
from shardlib.nn import routers
from shardlib.nn.moe.placement import ExpertPlacement

EXPERTS, WIDTH = 6, 8
SEATS = torch.tensor([4, 0, 5, 2, 1, 3])
ROUTERS = {
    "top-k": routers.top_k(2),
    "capacity": routers.top_k(2, capacity=routers.Capacity(0.5, 1, "choice")),
    "switch": routers.switch(),
    "experts choose": routers.expert_choice(1.5),
}


@pytest.mark.parametrize("router", ROUTERS)
def test_a_layer_is_the_same_function_of_its_experts(router):
    """Outputs, gradients and routings are equal to the bit."""
    config = sl.nn.MoEConfig(ROUTERS[router], jitter=0.1)
    own = sl.nn.init_moe(sl.Key(0), config, experts=EXPERTS, width=WIDTH, hidden=16, balance=True, std=0.3)
    moved = {"router": own["router"] | {"seats": SEATS}, "experts": {}}
    for name, leaf in own["experts"].items():
        moved["experts"][name] = torch.empty_like(leaf).index_copy_(0, SEATS, leaf)
    x = torch.randn(3, 7, WIDTH, generator=torch.Generator().manual_seed(0))
    results = []
    for params in (own, moved):
        experts = {name: leaf.clone().requires_grad_() for name, leaf in params["experts"].items()}
        rows = x.clone().requires_grad_()
        y, routing = sl.nn.moe(params | {"experts": experts}, rows, config, sl.Key(1))
        y.square().sum().backward()
        order = torch.arange(EXPERTS) if params is own else SEATS
        results.append((y.detach(), rows.grad, {name: leaf.grad[order] for name, leaf in experts.items()}, routing))
    assert_same(results[1], results[0])


def test_seats_of_choices_that_are_none():
    routing = routers.Routing.of(torch.tensor([[0, -1], [2, 0], [-1, -1]]), torch.ones(3, 2), 3)
    seated = routing.seated(torch.tensor([1, 2, 0]))
    assert seated.experts.tolist() == [[1, -1], [0, 1], [-1, -1]] and seated.counts.tolist() == [1, 2, 0]
    assert seated.kept.tolist() == [2, 0, 3, 6, 6, 6]


def test_fresh_layers_have_seats_where_asked():
    config = sl.nn.MoEConfig(routers.switch())
    params = sl.nn.init_moe(sl.Key(0), config, experts=3, width=2, hidden=2, seats=True)
    assert params["router"]["seats"].equal(torch.arange(3))
    twice = sl.nn.init_moe(sl.Key(0), config, experts=3, width=2, hidden=2, seats=True, replicas=True)
    assert twice["router"]["replicas"].equal(torch.tensor([-1, -1, -1]))
    assert sl.nn.init_moe(sl.Key(0), config, experts=3, width=2, hidden=2)["router"].keys() == {"weight"}


def loads(counts, seats, ranks):
    return torch.tensor(counts)[seats.argsort()].view(ranks, -1).sum(1)


def least(counts, ranks):
    """The smallest possible largest load, by trying all."""

    def tried(left):
        if not left:
            return 0
        first, *rest = left
        return min(
            max(counts[first] + sum(counts[i] for i in others), tried([i for i in rest if i not in others]))
            for others in combinations(rest, len(counts) // ranks - 1)
        )

    return tried(list(range(len(counts))))


@st.composite
def layers(draw):
    ranks, room = draw(st.sampled_from([(1, 3), (2, 1), (2, 3), (2, 4), (3, 2), (3, 3), (4, 2)]))
    counts = draw(st.lists(st.integers(0, 30), min_size=ranks * room, max_size=ranks * room))
    return counts, ranks, torch.tensor(draw(st.permutations(range(ranks * room))))


@given(layers())
def test_chosen_seats_are_balanced(case):
    counts, ranks, present = case
    seats = routers.balanced_seats(torch.tensor(counts), ranks, present)
    assert sorted(seats.tolist()) == list(range(len(counts)))
    largest = loads(counts, seats, ranks).max()
    assert largest <= loads(counts, present, ranks).max()
    assert largest <= 4 / 3 * least(counts, ranks)


@given(layers())
def test_balanced_experts_stay(case):
    counts, ranks, present = case
    seats = routers.balanced_seats(torch.tensor(counts), ranks, present)
    assert routers.balanced_seats(torch.tensor(counts), ranks, seats).equal(seats)
    shares = torch.tensor(counts).double() / 64  # without rounding
    assert routers.balanced_seats(shares, ranks, present).equal(seats)


def test_an_expert_that_keeps_its_rank_keeps_its_seat():
    seats = routers.balanced_seats(torch.tensor([9, 1, 8, 2, 1, 1]), 2, torch.tensor([1, 0, 2, 5, 3, 4]))
    assert loads([9, 1, 8, 2, 1, 1], seats, 2).tolist() == [11, 11]
    assert (seats != torch.tensor([1, 0, 2, 5, 3, 4])).sum() == 2


@pytest.mark.parametrize(
    ("counts", "ranks", "seats"),
    [([1, 2, 3], 2, None), ([1, 2], 2, [0, 0]), ([1, -2], 2, None), ([1.0, float("nan")], 1, None), ([1, 2], 0, None)],
)
def test_what_is_refused(counts, ranks, seats):
    with pytest.raises(ValueError, match="balanced_seats"):
        routers.balanced_seats(torch.tensor(counts), ranks, None if seats is None else torch.tensor(seats))


def loads_with_copies(counts, seats, replicas, ranks, spare):
    found = [0.0] * ranks
    for count, seat, slot in zip(counts, seats, replicas, strict=True):
        found[seat // (len(counts) // ranks)] += count if slot < 0 else count / 2
        if slot >= 0:
            found[slot // spare] += count / 2
    return found


def least_with_copies(counts, ranks, spare):
    """The smallest possible largest load, by trying all ranks for experts and for their copies."""
    best = float("inf")
    for seats in permutations(range(len(counts))):
        if any(seats[i] > seats[j] for i, j in combinations(range(len(counts)), 2) if counts[i] == counts[j]):
            continue  # experts with equal counts are as good in each other's seats
        for copies in product(range(-1, ranks), repeat=len(counts)):
            if all(copies.count(rank) <= spare for rank in range(ranks)):
                slots = [rank if rank < 0 else rank * spare for rank in copies]
                best = min(best, max(loads_with_copies(counts, seats, slots, ranks, spare)))
    return best


@st.composite
def hot_layers(draw):
    ranks, room, spare = draw(st.sampled_from([(2, 1, 1), (3, 1, 1), (2, 2, 1), (2, 2, 2), (4, 1, 1)]))
    counts = draw(st.lists(st.integers(0, 30), min_size=ranks * room, max_size=ranks * room))
    copies = draw(st.lists(st.integers(0, ranks * spare - 1), unique=True, max_size=ranks * room))
    copies = draw(st.permutations(copies + [-1] * (ranks * room - len(copies))))
    return counts, ranks, spare, torch.tensor(draw(st.permutations(range(ranks * room)))), torch.tensor(copies)


@settings(max_examples=40)
@given(hot_layers())
def test_chosen_copies_are_balanced(case):
    """Never worse than what was there or than seats alone, and near the best there is; and again they are as they are."""
    counts, ranks, spare, present, copies = case
    seats, replicas = routers.balanced_replicas(torch.tensor(counts), ranks, spare, present, copies)
    slots = [slot for slot in replicas.tolist() if slot >= 0]
    assert sorted(seats.tolist()) == list(range(len(counts))) and len({*slots}) == len(slots)
    assert {*slots} <= {*range(ranks * spare)}
    largest = max(loads_with_copies(counts, seats.tolist(), replicas.tolist(), ranks, spare))
    assert largest <= max(loads_with_copies(counts, present.tolist(), copies.tolist(), ranks, spare))
    assert largest <= loads(counts, routers.balanced_seats(torch.tensor(counts), ranks, present), ranks).max()
    assert largest <= 4 / 3 * least_with_copies(counts, ranks, spare)
    again = routers.balanced_replicas(torch.tensor(counts), ranks, spare, seats, replicas)
    assert again[0].equal(seats) and again[1].equal(replicas)


def test_one_hot_expert_gets_a_copy_on_an_idle_rank():
    seats, replicas = routers.balanced_replicas(torch.tensor([8, 4, 0, 4]), 4, 1)
    assert seats.tolist() == [0, 1, 2, 3] and replicas.tolist() == [2, -1, -1, -1]


@pytest.mark.parametrize(("spare", "copies"), [(-1, None), (1, [0, 0]), (1, [2, -1]), (0, [0, -1]), (1, [-2, -1])])
def test_copies_that_are_refused(spare, copies):
    with pytest.raises(ValueError, match="Give each copy a slot of its own"):
        routers.balanced_replicas(
            torch.tensor([1, 2]), 2, spare, None, None if copies is None else torch.tensor(copies)
        )


# --- slots ----------------------------------------------------------------------------------------------------


@st.composite
def placements(draw):
    ranks, room, spare = draw(st.integers(2, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    experts = ranks * room
    copies = draw(st.lists(st.integers(0, ranks * spare - 1), unique=True, max_size=experts))
    replicas = draw(st.permutations(copies + [-1] * (experts - len(copies))))
    return ExpertPlacement(tuple(draw(st.permutations(range(experts)))), tuple(replicas), ranks, spare)


@given(placements())
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


@given(placements())
def test_a_spare_slot_has_the_row_of_its_expert(slots):
    sent = {rank: iter(slots.rows(rank)) for rank in range(slots.ranks)}
    rows = [owner * slots.room + next(sent[owner]) for owner in slots.owners]
    for slot, row in enumerate(rows):
        expert = slots.replicas.index(slot) if slot in slots.replicas else None
        assert row == (slot // slots.spare * slots.room if expert is None else slots.seats[expert])
    assert all(next(left, None) is None for left in sent.values())


def test_a_copy_in_a_slot_that_there_is_not_is_none():
    """As after a restart on fewer ranks."""
    slots = ExpertPlacement((0, 1), (5, -1), 2, 1)
    assert slots.of_rows(0) == [0, 3] and slots.of_rows(1) == [1, 4] and slots.owners == (0, 1)


@pytest.mark.parametrize(("ranks", "room", "spare"), [(2, 2, 1), (4, 2, 3), (3, 1, 1)])
def test_a_plan_takes_slots_to_be_full(ranks, room, spare):
    slots = ExpertPlacement.assumed(ranks * room, ranks, spare)
    away = [owner != slot // spare for slot, owner in enumerate(slots.owners)]
    assert sum(away) == ranks * min(spare, room)


@pytest.mark.parametrize(("seats", "replicas"), [((0, 0), (-1, -1)), ((0, 1), (1, 1))])
def test_slots_that_are_refused(seats, replicas):
    with pytest.raises(ValueError, match="a slot has one expert"):
        ExpertPlacement(seats, replicas, 2, 1)
