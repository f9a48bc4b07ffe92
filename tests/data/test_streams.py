"""Iterable datasets: the same batches on any mesh that divides them, and a state that goes on on another."""

import itertools

import pytest

import shardlib as sl
from shardlib.errors import BatchError


class Numbers:
    """An epoch of ``size`` numbers from ``start`` on. The state is with the dataset."""

    def __init__(self, start, size):
        self.start, self.size, self.at, self.epoch = start, size, 0, 0

    def set_epoch(self, epoch):
        self.epoch, self.at = epoch, 0

    def __iter__(self):
        while self.at < self.size:
            self.at += 1
            yield self.start + 10 * self.epoch + self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Walk:
    """The same, with the state at the iterator."""

    def __init__(self, start, size):
        self.start, self.size = start, size

    def __iter__(self):
        return _Walking(self)


class _Walking:
    def __init__(self, walk):
        self.walk, self.at = walk, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.walk.size:
            raise StopIteration
        self.at += 1
        return self.walk.start + self.at - 1

    def state_dict(self):
        return self.at

    def load_state_dict(self, state):
        self.at = state


def consume(mesh, kind, steps, state, ahead=False):
    batches = sl.data.streams([kind(100 * index, 3 + index) for index in range(4)], mesh, 8, ahead=ahead)
    if state is not None:
        batches.load_state_dict(state)
    rows = [batch.tolist() for _, batch in zip(range(steps), batches, strict=False)]
    return rows, batches.state_dict()


@pytest.mark.parametrize("kind", [Numbers, Walk])
def test_a_state_goes_on_on_another_number_of_ranks(kind):
    want, end = consume(sl.make_mesh(), kind, 9, None)
    state, ledger = None, []
    for count, steps in ((2, 3), (4, 0), (1, 1), (4, 5)):
        results = sl.simulate(consume, kind, steps, state, mesh={"data": count})
        states = [after for _, after in results]
        assert all(after == states[0] for after in states)
        state = states[0]
        ledger += [[row for rows, _ in results for row in rows[step]] for step in range(steps)]
    assert ledger == want and state == end


def test_what_is_read_ahead_does_not_count():
    plain, state = consume(sl.make_mesh(), Numbers, 3, None)
    assert consume(sl.make_mesh(), Numbers, 3, None, ahead=True) == (plain, state)


def test_a_curriculum_goes_on_too():
    batches = sl.data.streams([Numbers(0, 5)], sl.make_mesh(), 2, map=lambda batch, step: batch + 1000 * step)
    first = [batch.tolist() for _, batch in zip(range(2), batches, strict=False)]
    assert [*first, next(iter(batches)).tolist()] == [[0, 1], [1002, 1003], [2004, 2010]]


def test_what_cannot_be_streamed_is_refused():
    with pytest.raises(BatchError, match="3 datasets, 1 ranks that share a batch, batches of 4 rows"):
        sl.data.streams([Numbers(0, 1)] * 3, sl.make_mesh(), 4)
    for batch in (sl.data.linear_pace(2, 4, 3), sl.data.curriculum(2), 1.5, True, "2"):
        with pytest.raises(BatchError, match="give a number of rows, an integer of at least 1"):
            sl.data.streams([[1]], sl.make_mesh(), batch)
    with pytest.raises(BatchError, match=r"count is no list of datasets: pass \[dataset\]"):
        sl.data.streams(itertools.count(), sl.make_mesh(), 1)
    for state in (None, {"samples": 1}):
        with pytest.raises(BatchError, match=r"is no state of streams: give what state_dict\(\) returned"):
            sl.data.streams([[1]], sl.make_mesh(), 1).load_state_dict(state)
    with pytest.raises(BatchError, match="int cannot be iterated over"):
        sl.data.streams([3], sl.make_mesh(), 4)
    with pytest.raises(BatchError, match=r"streams: map=3: give a function .*, map\(batch, step\)"):
        sl.data.streams([[1]], sl.make_mesh(), 1, map=3)
    with pytest.raises(BatchError, match="list has no samples"):
        next(iter(sl.data.streams([[]], sl.make_mesh(), 1)))
    with pytest.raises(BatchError, match="a state of 1 datasets, and these are 2"):
        sl.data.streams([[1], [2]], sl.make_mesh(), 2).load_state_dict({"samples": 0, "streams": [None]})


def test_a_dataset_without_a_state_can_only_be_read():
    batches = sl.data.streams([itertools.repeat(7)], sl.make_mesh(), 2)
    assert next(iter(batches)).tolist() == [7, 7]
    with pytest.raises(BatchError, match=r"datasets 0 have no state_dict\(\)"):
        batches.state_dict()
    assert next(iter(batches)).tolist() == [7, 7]  # an iterator goes on
    for ahead in (False, True):
        batches = sl.data.streams([range(100) if not ahead else iter(range(100))], sl.make_mesh(), 2, ahead=ahead)
        first = iter(batches)
        assert [next(first).tolist(), next(first).tolist()] == [[0, 1], [2, 3]]
        with pytest.raises(
            BatchError, match=r"datasets 0 have no state_dict\(\), and would begin again .* rows = iter"
        ):
            next(iter(batches))
