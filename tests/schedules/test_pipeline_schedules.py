"""Pipeline schedules against published tables, closed forms, and torch's own generators."""

import re
from fractions import Fraction

import pytest
from helpers.profile import NIGHTLY
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _format_pipeline_order, get_schedule_class

from shardlib.errors import ScheduleError
from shardlib.schedules import (
    NAMES,
    Action,
    Costs,
    Kind,
    Schedule,
    check,
    dualpipe_v,
    from_orders,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    make_schedule,
    named_schedule,
    one_f_one_b,
    peak_in_flight,
    peak_of_stages,
    simulate,
    zbv,
    zero_bubble_h1,
)

# Micro-batches: fewer than ranks, up to twice as many and one, where formulas change; and more.
SIZES = [(p, m) for p in range(1, 9) for m in (range(1, 33) if NIGHTLY else (*range(1, 18), 24, 32))]
# Forward, input gradient, weight gradient: equal, and two in which nothing is.
COSTS = [(1, 1, 1), (3, 4, 2), (5, 2, 1)]


def action(text: str, rank: int) -> Action:
    """An action of the tables, where the stage is left out if it is the rank's number."""
    stage, kind, microbatch = re.fullmatch(r"(\d*)([FBIW])(\d+)", text).groups()
    return Action(int(stage or rank), Kind(kind), int(microbatch))


def table(text: str) -> tuple[tuple[Action, ...], ...]:
    rows = [line.split()[1:] for line in text.strip().splitlines()]
    return tuple(tuple(action(cell, rank) for cell in row) for rank, row in enumerate(rows))


# Written by hand from the papers' figures, independently of the code.
TABLES = [
    (
        one_f_one_b(4, 8),
        """
        r0 F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
        r1 F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
        r2 F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
        r3 F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
        """,
    ),
    (
        one_f_one_b(4, 2),
        """
        r0 F0 F1 B0 B1
        r1 F0 F1 B0 B1
        r2 F0 F1 B0 B1
        r3 F0 B0 F1 B1
        """,
    ),
    (
        interleaved_1f1b(2, 4, 2),
        """
        r0 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        r1 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
        """,
    ),
    (
        gpipe(2, 3),
        """
        r0 F0 F1 F2 B0 B1 B2
        r1 F0 F1 F2 B0 B1 B2
        """,
    ),
    (
        zero_bubble_h1(2, 3),
        """
        r0 F0 F1 I0 W0 F2 I1 W1 I2 W2
        r1 F0 I0 F1 I1 W0 F2 I2 W1 W2
        """,
    ),
]


@pytest.mark.parametrize(("schedule", "text"), TABLES, ids=lambda value: getattr(value, "name", ""))
def test_the_tables_action_for_action(schedule, text):
    assert schedule.orders == table(text)
    header, *rows = str(schedule).splitlines()
    assert rows == [line.strip() for line in text.strip().splitlines()]
    assert header.startswith(f"{schedule.name} p={schedule.ranks} m={schedule.microbatches}")


@pytest.mark.parametrize(
    ("schedule", "costs", "makespan"),
    [
        (one_f_one_b(4, 8), Costs(1, 1, 1), 33),
        (interleaved_1f1b(4, 8, 2), Costs(Fraction(1, 2), Fraction(1, 2), Fraction(1, 2)), Fraction(57, 2)),
        (interleaved_1f1b(4, 8, 4), Costs(Fraction(1, 4), Fraction(1, 4), Fraction(1, 4)), Fraction(105, 4)),
        (interleaved_1f1b(2, 4, 2), Costs(Fraction(1, 2), Fraction(1, 2), Fraction(1, 2)), Fraction(27, 2)),
        (zero_bubble_h1(4, 8), Costs(1, 1, 1), 27),
    ],
)
def test_the_published_makespans(schedule, costs, makespan):
    assert simulate(schedule, costs).makespan == makespan


@pytest.mark.parametrize(
    ("make", "bubbles"),
    [
        (gpipe, (0.75, 0.375, 0.1875)),
        (lambda p, m: interleaved_1f1b(p, m, 2), (0.375, 0.1875, 0.09375)),
        (lambda p, m: interleaved_zero_bubble(p, m, 2), (0.125, 0.0625, 0.03125)),
        (zbv, (0.25, 0.0625, 0.03125)),
    ],
)
def test_the_published_bubbles(make, bubbles):
    assert tuple(simulate(make(4, m)).bubble for m in (4, 8, 16)) == bubbles


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_gpipe_and_1f1b_have_equal_bubbles_and_different_memory(make):
    for p, m in SIZES:
        schedule = make(p, m)
        for f, i, w in COSTS:
            assert simulate(schedule, Costs(f, i, w)).makespan == (m + p - 1) * (f + i + w), (p, m)
        peaks = [m] * p if make is gpipe else [min(p - rank, m) for rank in range(p)]
        assert peak_in_flight(schedule) == tuple(peaks), (p, m)


@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_interleaving_divides_the_bubble(v):
    for p, m in SIZES:
        schedule = interleaved_1f1b(p, m, v)
        # Chunks of cost 1, 1, 1. With fewer micro-batches than ranks it is GPipe over pv stages.
        assert simulate(schedule).makespan == (3 * (m * v + p - 1) if m >= p else 3 * (p * v + m - 1)), (p, m)
        if m % p == 0 and v > 1:
            assert peak_in_flight(schedule)[0] == min(p * v + p - 1, m * v), (p, m)
    assert simulate(interleaved_1f1b(4, 11, v), Costs(3, 4, 2)).makespan == 9 * (11 * v + 3)


def test_zb_h1():
    for p, m in SIZES:
        schedule = zero_bubble_h1(p, m)
        for f, i, w in COSTS:
            # A rank has weight gradients to fill the bubble with only as long as there are micro-batches.
            bubble = (p - 1) * (f + i) - (min(m, p) - 1) * w
            assert simulate(schedule, Costs(f, i, w)).makespan == m * (f + i + w) + bubble, (p, m)
        assert peak_in_flight(schedule) == (min(p, m),) * p, (p, m)
    # Weight gradients longer than the gaps they fill lengthen the ends.
    assert simulate(zero_bubble_h1(4, 8), Costs(1, 2, 5)).makespan == 8 * 8 + 3 * max(1, 2)


@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_interleaved_zero_bubble(v):
    for p, m in SIZES:
        schedule = interleaved_zero_bubble(p, m, v)
        makespan = simulate(schedule).makespan
        if m >= p:
            assert makespan == 3 * m * v + (p - 1), (p, m)
        else:
            assert makespan == 2 * p * v + m + max(m - 1, p * v - 1 - (p - m) * (2 * v - 1)), (p, m)
        if m % p == 0:
            assert peak_in_flight(schedule) == (p * v,) * p, (p, m)
    assert simulate(interleaved_zero_bubble(4, 11, v), Costs(3, 4, 2)).makespan == 9 * 11 * v + 3 * (3 + 4 - 2)
    assert interleaved_zero_bubble(4, 8, 1).orders == zero_bubble_h1(4, 8).orders
    assert interleaved_1f1b(4, 8, 1).orders == one_f_one_b(4, 8).orders


def test_zb_v():
    for p, m in SIZES:
        timeline = simulate(zbv(p, m))
        assert timeline.makespan == 6 * m + max(p - 1, 4 * (p - 1) - 2 * (m - 1)), (p, m)
        assert max(timeline.peak_in_flight) == 2 * min(p, m), (p, m)
        if m >= 2 * p - 1:
            spans = [events[-1].end - events[0].start for events in timeline.events]
            assert spans == list(timeline.busy) == [6 * m] * p, (p, m)
    assert zbv(3, 5).rank_of == (0, 1, 2, 2, 1, 0)


def test_micro_batches_that_a_stage_holds():
    assert peak_of_stages(one_f_one_b(4, 8)) == (4, 3, 2, 1)
    schedule = interleaved_1f1b(2, 4, 2)
    assert peak_of_stages(schedule) == (4, 3, 2, 1)  # counted in the table above
    assert peak_in_flight(schedule) == (5, 3)


def theirs(name: str, p: int, m: int, v: int | None = None) -> list[list[tuple[int, str, int]]]:
    """torch's compute actions: without the idle slots and what its runtime adds."""
    rows = get_schedule_ops(name, p, m, v)
    return [
        [
            (part.stage_index, part.computation_type.value, part.microbatch_index)
            for a in row
            if a is not None and a.is_compute_op
            for part in a.sub_actions or [a]
        ]
        for row in rows
    ]


def ours(schedule: Schedule) -> list[list[tuple[int, str, int]]]:
    return [[(a.stage, a.kind.value, a.microbatch) for a in order] for order in schedule.orders]


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (2, 8), (3, 8), (4, 3), (4, 7), (4, 8), (4, 10), (8, 16)])
def test_torch_generates_the_same(p, m):
    for v in (2, 3):
        assert ours(interleaved_1f1b(p, m, v)) == theirs("Interleaved1F1B", p, m, v)
        assert ours(interleaved_zero_bubble(p, m, v)) == theirs("InterleavedZeroBubble", p, m, v)
        assert ours(looped_bfs(p, m, v)) == theirs("LoopedBFS", p, m, v)
    assert ours(zbv(p, m)) == theirs("ZBVZeroBubble", p, m, 2)
    if m >= 2 * p:  # torch has it for no fewer
        assert ours(dualpipe_v(p, m)) == theirs("DualPipeV", p, m, 2)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 8), (3, 7), (4, 8), (8, 16)])
def test_torch_generates_the_same_single_stages(p, m):
    def renamed(rows):  # without ranks its mocked stages all claim to be the first
        return [[(rank, kind, i) for _, kind, i in row] for rank, row in enumerate(rows)]

    assert ours(gpipe(p, m)) == renamed(theirs("GPipe", p, m))
    torchs = renamed(theirs("1F1B", p, m))
    # torch 2.13 numbers the last rank's forwards from 1; everything else agrees.
    torchs[-1] = [(stage, kind, i - (kind == "F")) for stage, kind, i in torchs[-1]]
    assert ours(one_f_one_b(p, m)) == torchs


def test_dualpipe_v():
    for p, m in SIZES:
        schedule = dualpipe_v(p, m)
        assert max(peak_in_flight(schedule)) <= 2 * p + 1, (p, m)
        if m < 2 * p:
            continue
        assert simulate(schedule).makespan == 6 * m + p - 1, (p, m)
        for f, i, w in [*COSTS, (2, 2, 1), (4, 3, 3), (7, 3, 3)]:
            # DeepSeek's table counts the pair as one action; here a forward's result is sent before its pair's backward.
            bubble = simulate(schedule, Costs(f, i, w)).makespan - 2 * m * (f + i + w)
            assert bubble <= (p - 1) * (f + (i + w) + (i + w) - 3 * w), (p, m, f, i, w)
        # Where forwards take longest, nothing is gained by that: the published number itself.
        assert simulate(schedule, Costs(5, 2, 1)).makespan == 2 * m * 8 + (p - 1) * (5 + 3 + 3 - 3), (p, m)


@pytest.mark.parametrize("v", [1, 2, 3])
def test_looped_bfs(v):
    for p, m in SIZES:
        schedule = looped_bfs(p, m, v)
        assert peak_in_flight(schedule) == (m * v,) * p
        for f, i, w in COSTS if m >= p else ():
            assert simulate(schedule, Costs(f, i, w)).makespan == (m * v + p - 1) * (f + i + w), (p, m)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("GPipe", "gpipe"), ("1F1B", "1f1b"), ("Interleaved1F1B", "interleaved-1f1b"), ("LoopedBFS", "looped-bfs"),
        ("InterleavedZeroBubble", "interleaved-zb"), ("ZBVZeroBubble", "zb-v"), ("DualPipeV", "dualpipe-v"),
    ],
)  # fmt: skip
def test_torchs_names(theirs, ours):
    """Names that get_schedule_class takes, the names of its classes, and names similar to shardlib's."""
    for spelling in (
        theirs,
        theirs.upper(),
        theirs.lower(),
        get_schedule_class(theirs).__name__,
        ours.replace("-", "_"),
    ):
        assert named_schedule(spelling) == ours
        assert make_schedule(spelling, 2, 4) == make_schedule(ours, 2, 4)
    assert named_schedule("PipelineScheduleMulti") is None  # a base class of torch's, no schedule


def test_what_torch_holds_and_prints():
    """Its lists of actions, whole and with idle slots, its ``pipeline_order``, and the grid in its error messages."""
    for name, ours in (("DualPipeV", dualpipe_v(3, 7)), ("ZBVZeroBubble", zbv(3, 7)), ("LoopedBFS", looped_bfs(3, 7))):
        rows = get_schedule_ops(name, 3, 7)
        order = dict(enumerate(rows))
        for spec in (
            rows,
            order,
            _format_pipeline_order(order),
            "\nfailed:\n " + _format_pipeline_order(order, 2),
        ):
            assert make_schedule(spec, 3, 7).orders == ours.orders


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (3, 2), (4, 6)])
def test_schedules_by_name(name, p, m):
    schedule = make_schedule(name, p, m)
    assert (schedule.name, schedule.ranks, schedule.microbatches) == (name, p, m)
    assert schedule.splits == (name.startswith(("zb", "interleaved-zb")) or (name == "dualpipe-v" and p > 1))
    assert schedule.stages == p * (1 if name in ("gpipe", "1f1b", "zb-h1") else 2)
    for rank in range(p):
        assert {a.stage for a in schedule.orders[rank]} == set(schedule.stages_of(rank))
    assert make_schedule(name.upper(), p, m) == schedule
    assert make_schedule(schedule, p, m) == schedule
    assert make_schedule([list(order) for order in schedule.orders], p, m).orders == schedule.orders


def test_chunks():
    assert make_schedule("interleaved-1f1b", 2, 4, chunks=3) == interleaved_1f1b(2, 4, 3)
    assert make_schedule("interleaved-zb", 2, 4, 4) == interleaved_zero_bubble(2, 4, 4)
    assert make_schedule("zb-v", 2, 4, 2) == zbv(2, 4)


OWN = [[Action(0, Kind.F, 0), Action(0, Kind.B, 0)], [Action(1, Kind.F, 0), Action(1, Kind.B, 0)]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_schedule("2f2b", 2, 2), r"'2f2b' is no schedule's name \(gpipe, 1f1b, .*take one of"),
        (lambda: make_schedule("1f1b", 0, 4), "ranks p=0; give positive numbers"),
        (lambda: make_schedule("zb-v", 2, 0), "micro-batches m=0; give"),
        (lambda: make_schedule("interleaved-zb", 2, 4, 0), "chunks per rank v=0; give"),
        (
            lambda: make_schedule("zb-v", 2, 4, 3),
            "'zb-v' has 2 stages per rank, and chunks=3 is wanted; leave chunks out",
        ),
        (lambda: make_schedule("gpipe", 2, 4, 2), "'gpipe' has 1 stage per rank, and chunks=2"),
        (
            lambda: make_schedule(gpipe(2, 4), 3, 8, 2),
            r"made for other sizes:\n  - it has 2 ranks, and 3 are wanted\n  - it has 4 micro-batches, and 8 .*\n"
            r"  - it has 1 stages per rank, and 2 are wanted\nGive",
        ),
        (lambda: make_schedule([*OWN, []], 3, 1), "rank 2 has no stage"),
        (lambda: make_schedule([["0F0"], OWN[1]], 2, 1), "rank 0, position 0: 0F0 is not a compute action"),
        (lambda: make_schedule([[Action(0, Kind.SEND_F, 0)]], 1, 1), "0SEND_F0 is not a compute action"),
        (lambda: make_schedule([OWN[0], [Action(2, Kind.F, 0)]], 2, 1), "no rank runs a forward of stage 1"),
        (lambda: from_orders([]), "it has no actions"),
        (
            lambda: Schedule("x", 2, 2, 0, (0,), ()),
            r"microbatches is 0.*\n.*0 orders for 2.*\n.*1 entries for 2.*\n.*rank 1",
        ),
        (lambda: Schedule("x", 1, 2, 1, (0, 1), ((),)), "stage 1 is on rank 1, which is none of the 1 ranks"),
        (lambda: simulate(gpipe(2, 2), Costs((1, 2, 3), -1)), "forward has 3 entries for 2 stages\n.*stage 0 is -1"),
        (lambda: simulate(gpipe(1, 1), Costs(float("nan"))), "forward of stage 0 is nan"),
    ],
)
def test_what_cannot_be_made_is_refused(make, message):
    with pytest.raises(ScheduleError, match=message):
        make()


def test_a_clock_knows_stages_and_messages():
    timeline = simulate(
        one_f_one_b(2, 1), Costs(forward=(1, 2), input_gradient=(3, 4), weight_gradient=5, message=(7, 9))
    )
    first, second = timeline.events
    assert [(str(a), start, end) for a, start, end in first] == [("0F0", 0, 1), ("0B0", 28, 36)]
    assert [(str(a), start, end) for a, start, end in second] == [("1F0", 8, 10), ("1B0", 10, 19)]
    assert (timeline.makespan, timeline.busy, timeline.idle) == (36, (9, 11), (27, 25))
    assert timeline.bubble == 52 / 20
    # The turn of the V is on one rank: no message there.
    assert simulate(zbv(1, 2), Costs(message=100)).makespan == 12


def test_an_action_is_a_value():
    assert str(Action(2, Kind.F, 3)) == "2F3"
    assert str(Action(0, Kind.SEND_F, 1)) == "0SEND_F1"
    assert len({Action(0, Kind.I, 1), Action(0, Kind.I, 1), Action(0, Kind.W, 1)}) == 2
    check(one_f_one_b(3, 5))
