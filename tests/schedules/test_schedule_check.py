"""What `check` refuses, against running the orders by brute force; messages; and the CSV torch writes."""

import re
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import (
    _Action,
    _PipelineScheduleRuntime,
    _simulate_comms_compute,
    _validate_schedule,
)
from torch.distributed.pipelining.stage import PipelineStage

from shardlib.errors import ScheduleError
from shardlib.schedules import (
    Action,
    Kind,
    Schedule,
    check,
    dualpipe_v,
    from_orders,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    lower,
    make_schedule,
    one_f_one_b,
    peer,
    read_table,
    tag,
    write_table,
    zbv,
    zero_bubble_h1,
)

MAKERS = [gpipe, one_f_one_b, zero_bubble_h1, zbv, dualpipe_v, interleaved_1f1b, interleaved_zero_bubble, looped_bfs]
EVERY = [make(p, m) for make in MAKERS for p, m in [(1, 1), (1, 4), (2, 3), (3, 1), (3, 7), (4, 4), (4, 8), (5, 9)]]
EVERY += [
    make(p, m, 3)
    for make in (interleaved_1f1b, interleaved_zero_bubble, looped_bfs)
    for p, m in [(2, 4), (3, 5), (4, 6)]
]


def name(schedule: Schedule) -> str:
    return f"{schedule.name}-{schedule.ranks}-{schedule.microbatches}-{schedule.stages}"


def parsed(text: str) -> Action:
    stage, kind, microbatch = re.fullmatch(r"(\d+)([A-Z_]+)(\d+)", text).groups()
    return Action(int(stage), Kind(kind), int(microbatch))


def orders(*rows: str) -> list[list[Action]]:
    return [[parsed(cell) for cell in row.split()] for row in rows]


def refused(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as error:
        check(schedule)
    return str(error.value)


# ---- check ----


@pytest.mark.parametrize("schedule", EVERY, ids=name)
def test_every_generated_schedule_can_run(schedule):
    check(schedule)


def get_stuck(schedule: Schedule, along_the_stage: bool) -> bool:
    """Whether some action can never run, found by trying every rank again and again.

    Between stages a forward waits for the forward before and a backward for the backward after it;
    ``along_the_stage`` a backward also waits for its forward, and W for I.
    """
    left = [[str(action) for action in order] for order in schedule.orders]
    done: set[str] = set()

    def possible(text: str) -> bool:
        stage, kind, i = re.fullmatch(r"(\d+)([FBIW])(\d+)", text).groups()
        before, after, last = int(stage) - 1, int(stage) + 1, schedule.stages - 1
        if kind == "F":
            return stage == "0" or f"{before}F{i}" in done
        if kind == "W":
            return not along_the_stage or f"{stage}I{i}" in done
        own = not along_the_stage or f"{stage}F{i}" in done
        return own and (int(stage) == last or f"{after}B{i}" in done or f"{after}I{i}" in done)

    moved = True
    while moved:
        moved = False
        for row in left:
            if row and possible(row[0]):
                done.add(row.pop(0))
                moved = True
    return any(left)


@st.composite
def shuffled(draw) -> Schedule:
    """A schedule with a few actions exchanged within their rank."""
    make = draw(st.sampled_from(MAKERS))
    schedule = make(draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    rows = [list(order) for order in schedule.orders]
    for _ in range(draw(st.integers(0, 3))):
        row = rows[draw(st.integers(0, schedule.ranks - 1))]
        a = draw(st.integers(0, len(row) - 1))
        b = draw(st.integers(0, len(row) - 1)) if draw(st.booleans()) else min(a + 1, len(row) - 1)
        row[a], row[b] = row[b], row[a]
    sizes = (schedule.ranks, schedule.stages, schedule.microbatches, schedule.rank_of)
    return Schedule("shuffled", *sizes, tuple(map(tuple, rows)))


LINK = re.compile(r"rank (\d+) waits at (\w+) for (\w+), which rank (\d+) runs after (\w+)")


@given(shuffled())
def test_check_says_deadlock_exactly_when_there_is_one(schedule):
    deadlock = get_stuck(schedule, along_the_stage=False)
    try:
        check(schedule)
        result = ""
    except ScheduleError as error:
        result = str(error)
    assert ("deadlock" in result) == deadlock
    assert bool(result) == get_stuck(schedule, along_the_stage=True)
    for line in result.splitlines():
        if "deadlock" not in line:
            continue
        links = LINK.findall(line)
        for (rank, at, wanted, other, before), following in zip(links, [*links[1:], links[0]]):
            # The cycle closes, and every link is right: `at` needs `wanted`, which comes after `before`.
            assert (other, before) == following[0:2]
            waiting, needed = parsed(at), parsed(wanted)
            assert waiting in schedule.orders[int(rank)]
            assert needed.microbatch == waiting.microbatch
            assert needed.stage - waiting.stage == (-1 if waiting.kind is Kind.F else 1)
            cells = [str(action) for action in schedule.orders[int(other)]]
            assert cells.index(before) <= cells.index(wanted)


def test_drawn_schedules_are_of_both_kinds():
    found = set()

    @given(shuffled())
    def draw(schedule):
        found.add((get_stuck(schedule, along_the_stage=False), get_stuck(schedule, along_the_stage=True)))

    draw()
    assert found == {(False, False), (False, True), (True, True)}


def test_deadlocks_are_reported_as_cycles_all_together():
    pair = ("{0}F0 {0}B0 {0}F1 {0}B1", "{1}F0 {1}F1 {1}B0 {1}B1")
    message = refused(from_orders(orders(*(row.format(0, 1) for row in pair), *(row.format(2, 3) for row in pair))))
    for a, b in ((0, 1), (2, 3)):
        one = f"rank {a} waits at {a}B0 for {b}B0, which rank {b} runs after {b}F1"
        other = f"rank {b} waits at {b}F1 for {a}F1, which rank {a} runs after {a}B0"
        assert f"deadlock: {one}; {other}\n" in message or f"deadlock: {other}; {one}\n" in message
    assert message.count("deadlock") == 2


def test_a_rank_can_wait_for_itself():
    message = refused(from_orders(orders("1F0 0F0 1B0 0B0")))
    assert "deadlock: rank 0 waits at 1F0 for 0F0, which rank 0 runs after 1F0\n" in message


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["0F0 0F1 0B0", "1F0 1B0 1F1 1B1"], "rank 0 never runs 0B1"),
        (["0F0 0B0 0B0"], "0B0 is run 2 times: rank 0 position 1, rank 0 position 2"),
        (["0F0 0B0 1B0", "1F0"], "rank 0 runs 1B0, but stage 1 is on rank 1"),
        (["0B0 0F0"], r"rank 0 runs 0B0 \(position 0\) before 0F0 \(position 1\)"),
        (["0F0 0W0 0I0"], r"rank 0 runs 0W0 \(position 1\) before 0I0 \(position 2\)"),
        (["0F0 0I0"], "rank 0 never runs 0W0"),
        (["0F0 0W0"], "rank 0 never runs 0I0"),
        (["0F0 0B0 0W0"], r"rank 0 runs both 0B0 and 0W0; a backward is whole \(B\) or split"),
    ],
)
def test_what_cannot_run_is_named(rows, message):
    result = refused(from_orders(orders(*rows)))
    assert re.search(f"  - {message}", result), result
    assert result.endswith("on its rank, without cycles of waiting.")


def test_all_failures_are_listed():
    rows = orders("0F0 0B0 0F7 2F0 0SEND_F0", "1B0 1F0")
    result = refused(Schedule("bad", 2, 2, 1, (0, 1), tuple(map(tuple, rows))))
    for problem in (
        "rank 0: 0F7 is outside the 2 stages and 1 micro-batches",
        "rank 0: 2F0 is outside",
        "rank 0: 0SEND_F0 is a message; orders hold compute actions",
        "rank 1 runs 1B0 (position 0) before 1F0 (position 1)",
    ):
        assert problem in result


def test_a_whole_and_a_split_backward_may_meet():
    mixed = from_orders(orders("0F0 0F1 0B0 0I1 0W1", "1F0 1I0 1W0 1F1 1B1"))
    check(mixed)
    assert mixed.splits
    assert write_table(mixed, messages=True).count("RECV_B") == 2


# ---- messages ----


def test_a_lowered_schedule():
    lowered = [" ".join(map(str, order)) for order in lower(one_f_one_b(2, 2))]
    assert lowered == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    ]
    turn = [" ".join(map(str, order)) for order in lower(zbv(2, 1))]
    assert turn == [
        "0F0 0SEND_F0 3RECV_F0 3F0 3I0 3SEND_B0 3W0 0RECV_B0 0I0 0W0",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2I0 2W0 1I0 1SEND_B0 1W0",
    ]


@pytest.mark.parametrize("schedule", EVERY, ids=name)
def test_messages_cross_exactly_where_ranks_change(schedule):
    crossed = [s for s in range(schedule.stages - 1) if schedule.rank_of[s] != schedule.rank_of[s + 1]]
    expected = set()
    for low in crossed:
        for i in range(schedule.microbatches):
            expected |= {f"{low}SEND_F{i}", f"{low + 1}RECV_F{i}", f"{low + 1}SEND_B{i}", f"{low}RECV_B{i}"}
    lowered = lower(schedule)
    messages = [str(a) for order in lowered for a in order if "_" in a.kind]
    assert len(messages) == len(set(messages)) and set(messages) == expected
    for rank, order in enumerate(lowered):
        assert tuple(a for a in order if "_" not in a.kind) == schedule.orders[rank]
        assert {schedule.rank_of[a.stage] for a in order} == {rank}
        for before, a in pairwise(order):
            if a.kind.startswith("SEND"):
                assert before.kind in ("F" if a.kind is Kind.SEND_F else "BI")
                assert before[::2] == a[::2]


@pytest.mark.parametrize("schedule", EVERY, ids=name)
def test_messages_arrive_in_order_without_tags(schedule):
    """Run with one queue per pair of ranks: every receive takes the queue's head, and it is its own message."""
    lowered = [list(order) for order in lower(schedule)]
    queues: dict[tuple[int, int], list[int]] = {}
    received: set[Action] = set()
    tags: list[int] = []
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(lowered):
            while order:
                action = order[0]
                stage, kind, microbatch = action
                if kind.startswith("SEND"):
                    queues.setdefault((rank, peer(schedule, action)), []).append(tag(schedule, action))
                    tags.append(tag(schedule, action))
                elif kind.startswith("RECV"):
                    queue = queues.get((peer(schedule, action), rank), [])
                    if not queue:
                        break
                    assert queue.pop(0) == tag(schedule, action)
                    received.add(action)
                elif kind is Kind.F and stage and schedule.rank_of[stage - 1] != rank:
                    assert Action(stage, Kind.RECV_F, microbatch) in received
                elif kind in "BI" and stage < schedule.stages - 1 and schedule.rank_of[stage + 1] != rank:
                    assert Action(stage, Kind.RECV_B, microbatch) in received
                order.pop(0)
                moved = True
    assert not any(lowered) and not any(queues.values())
    assert len(tags) == len(set(tags))
    assert all(0 <= number < 2 * (schedule.stages - 1) * schedule.microbatches for number in tags)


def test_a_receive_is_next_to_its_action_unless_another_would_overtake():
    def early(schedule):
        found = 0
        for order in lower(schedule):
            for a, after in pairwise(order):
                found += a.kind.startswith("RECV") and after[::2] != a[::2]
        return found

    assert all(early(make(4, 8)) == 0 for make in (gpipe, one_f_one_b, zero_bubble_h1))
    # Between two ranks forwards and backwards share a direction once chunks go around.
    assert early(interleaved_zero_bubble(2, 4, 2)) > 0


@pytest.mark.parametrize("schedule", EVERY, ids=name)
def test_a_tag_is_that_of_one_message(schedule):
    """Its send and its receive have it, between the same two ranks, and nothing else has."""
    ends: dict[int, list[tuple[int, int, bool]]] = {}
    for rank, order in enumerate(lower(schedule)):
        for action in order:
            if action.kind.value.startswith(("SEND", "RECV")):
                sends, other = action.kind.value.startswith("SEND"), peer(schedule, action)
                ends.setdefault(tag(schedule, action), []).append((rank, other, sends))
    for found in ends.values():
        (sender, receiver, _), (one, other, _) = sorted(found, key=lambda end: not end[2])
        assert (sender, receiver) == (other, one) and [sends for *_, sends in found].count(True) == 1
    assert set(ends) <= set(range(2 * (schedule.stages - 1) * schedule.microbatches))


def test_only_messages_have_a_peer_and_a_tag():
    for ask in (peer, tag):
        with pytest.raises(ScheduleError, match="0F0 is not a message"):
            ask(gpipe(2, 2), Action(0, Kind.F, 0))


# ---- tables ----


def torch_runtime(schedule: Schedule) -> _PipelineScheduleRuntime:
    """torch's executor for as many stages, without ranks: its stage is a mock."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, schedule.ranks, schedule.stages, None
    return _PipelineScheduleRuntime([stage] * (schedule.stages // schedule.ranks), schedule.microbatches)


def torch_actions(rows) -> dict[int, list[_Action]]:
    return {rank: [_Action.from_str(str(action)) for action in row] for rank, row in enumerate(rows)}


@pytest.mark.parametrize("schedule", EVERY, ids=name)
def test_torch_accepts_generated_tables(schedule):
    sizes = (schedule.ranks, schedule.stages, schedule.microbatches)
    owners = _validate_schedule(torch_actions(schedule.orders), *sizes)
    assert tuple(owners[stage] for stage in range(schedule.stages)) == schedule.rank_of
    ran = _simulate_comms_compute(torch_actions(lower(schedule)), lambda s: schedule.rank_of[s], schedule.stages)
    assert sum(a is not None for row in ran.values() for a in row) == sum(map(len, lower(schedule)))


@pytest.mark.parametrize(
    "schedule", [one_f_one_b(2, 3), interleaved_1f1b(2, 4), interleaved_zero_bubble(2, 4), zbv(3, 6)], ids=name
)
def test_tables_go_to_torch_and_back(schedule, tmp_path):
    runtime = torch_runtime(schedule)
    ours, simple, full = tmp_path / "ours.csv", tmp_path / "simple.csv", tmp_path / "full.csv"
    ours.write_text(write_table(schedule))
    runtime._load_csv(str(ours))
    runtime._dump_csv(str(simple), "compute_only")
    runtime._dump_csv(str(full), "compute_comms")
    assert "UNSHARD" in full.read_text() and "REDUCE_GRAD" in full.read_text()
    for path in (ours, simple, full):
        found = read_table(path)
        assert (found.orders, found.rank_of, found.name) == (schedule.orders, schedule.rank_of, path.stem)
    # The same messages as torch's own lowering inserts.
    theirs = {
        str(a) for row in runtime.pipeline_order_with_comms.values() for a in row if "_F" in str(a) or "_B" in str(a)
    }
    assert theirs == {str(a) for order in lower(schedule) for a in order if "_" in a.kind}
    ours.write_text(write_table(schedule, messages=True))
    runtime._load_csv(str(ours), "compute_comms")
    assert runtime.pipeline_order_with_comms == torch_actions(lower(schedule))


def test_torchs_table_of_overlapped_actions(tmp_path):
    """``(0F3;3B1)OVERLAP_F_B`` is one cell of two actions, in the table of computations and in the lowered one."""
    for form in ("compute_only", "compute_comms"):
        runtime = torch_runtime(dualpipe_v(2, 5))
        runtime.pipeline_order = {rank: list(row) for rank, row in enumerate(get_schedule_ops("DualPipeV", 2, 5))}
        runtime.stage_index_to_group_rank = dict(enumerate(dualpipe_v(2, 5).rank_of))
        runtime._prepare_schedule_with_comms(runtime.pipeline_order)
        runtime._dump_csv(str(tmp_path / "theirs.csv"), form)
        assert ")OVERLAP_F_B" in (tmp_path / "theirs.csv").read_text()
        found = make_schedule(tmp_path / "theirs.csv", 2, 5)
        assert (found.orders, found.rank_of) == (dualpipe_v(2, 5).orders, dualpipe_v(2, 5).rank_of)


def test_tables_of_text():
    text = write_table(one_f_one_b(2, 2))
    assert text == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    idle = "0F0,,0F1,,0SEND_F1,0B0,0B1,\r\n,1UNSHARD,1F0,1B0,1F1,1B1,1REDUCE_GRAD\r\n\r\n"
    for source in (text, idle):
        assert read_table(source, "own").orders == one_f_one_b(2, 2).orders
        assert make_schedule(source, 2, 2).name == "table"
    assert write_table(read_table(text), messages=True).splitlines()[0].startswith("0F0,0SEND_F0,0F1")


def test_a_table_by_its_path(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(write_table(zbv(2, 4)))
    assert make_schedule(path, 2, 4) == make_schedule(str(path), 2, 4)
    assert make_schedule(path, 2, 4).orders == zbv(2, 4).orders
    with pytest.raises(FileNotFoundError):
        read_table(tmp_path / "none.csv")


def test_every_cell_that_cannot_be_read_is_named():
    with pytest.raises(ScheduleError) as error:
        read_table("0F0,0X1,0B\n1F0,hello,(0F0;1Y0)OVERLAP_F_B\n")
    for problem in (
        "rank 0, cell 1: '0X1' has the unknown word 'X'",
        "rank 0, cell 2: '0B' has no micro-batch",
        "rank 1, cell 1: 'hello' is not an action",
        "rank 1, cell 2: '1Y0' has the unknown word 'Y'",
        "leave it empty.",
    ):
        assert problem in str(error.value)
    with pytest.raises(ScheduleError, match="'table' cannot run"):
        make_schedule("0B0,0F0", 1, 1)
