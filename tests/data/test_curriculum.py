"""Curricula: rows, lengths and samples as functions of the step, on any ranks, resumed anywhere."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.data.order import Growing, Shuffled
from shardlib.errors import BatchError, RankMismatch
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport import EchoGroup
from shardlib.plan.drops import TokenDrop

discrete, constant = sl.data.discrete_pace, sl.data.constant_pace


def rank_of(count, index):
    """The mesh as one rank sees it, without the others."""
    return Mesh({"data": count}, index, {"data": EchoGroup(count)}, torch.device("cpu"))


def batches_of(dataset, plan, ranks, steps, samples=0, **how):
    """Global batches, as lists of their rows, and the samples consumed."""
    shares = []
    for index in range(ranks):
        loader = sl.data.loader(dataset, rank_of(ranks, index), plan, samples=samples, **how)
        shares.append([batch.tolist() for batch in itertools.islice(loader, steps)])
        after = loader.samples
    return [list(itertools.chain(*parts)) for parts in zip(*shares, strict=True)], after


# Limits that rise at samples of their own.
limits_ = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=6).map(
    lambda phases: (
        tuple(itertools.accumulate((length for length, _ in phases[:-1]), initial=0)),
        tuple(itertools.accumulate(joining for _, joining in phases)),
    )
)


@given(limits_, st.integers(0, 99), st.booleans())
def test_an_epoch_has_every_sample_that_may_be_drawn_once(phases, seed, shuffle):
    """Those that join do so in the epoch under way."""
    starts, limits = phases
    order = Growing(starts, limits, seed, shuffle)
    ranks = order.ranks(np.arange(300))
    drawn, ended = set(), 0
    for number, rank in enumerate(ranks.tolist()):
        limit = limits[np.searchsorted(starts, number, side="right") - 1]
        assert rank < limit and rank not in drawn
        drawn.add(rank)
        if len(drawn) == limit:
            drawn, ended = set(), ended + 1
            assert order.end(ended) == number + 1


@given(limits_, st.lists(st.integers(0, 2**40), min_size=1, max_size=20))
def test_a_rank_does_not_depend_on_what_is_asked_beside_it(phases, numbers):
    order = Growing(*phases, 3, True)
    asked = np.array([*numbers, *(number % 300 for number in numbers)])
    assert order.ranks(asked).tolist() == [int(order.ranks(np.array([number]))[0]) for number in asked]


def test_one_limit_is_the_order_of_a_dataset():
    numbers = np.arange(200)
    assert np.array_equal(Growing((0,), (37,), 5, True).ranks(numbers), Shuffled(37, 5).indices(numbers))
    assert Growing((0,), (7,), 5, False).ranks(numbers).tolist() == (numbers % 7).tolist()


def test_every_order_of_a_joined_pool_comes_up_as_often():
    """Two samples left of three, and two that join: 4! orders of the pool, and the one drawn first."""
    counts = {}
    for seed in range(4000):
        order = tuple(Growing((0, 1), (3, 5), seed, True).ranks(np.arange(5)).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 3 * 24
    expected = 4000 / 72
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 112  # χ²(71): 0.1 %


def test_limits_of_a_billion_samples_cost_no_list():
    """A rise every step for a hundred steps, and sample numbers beyond 32 bits."""
    starts = tuple(range(0, 51200, 512))
    order = Growing(starts, tuple(10**7 * (rise + 1) for rise in range(100)), 0, True)
    numbers = np.concatenate([np.arange(51100, 51300), np.arange(10**12, 10**12 + 50)])
    ranks = order.ranks(numbers)
    assert len(set(ranks[:200].tolist())) == 200 and 10**8 < ranks.max() < 10**9


values_ = st.lists(st.integers(0, 6), min_size=1, max_size=25)


@given(values_, st.integers(0, 9), st.data())
def test_no_sample_is_harder_than_its_step_allows(values, seed, data):
    first = data.draw(st.integers(min(values), 6))
    pace = discrete([first, 6], [data.draw(st.integers(0, 4))])
    rows = data.draw(st.integers(1, 4))
    plan = sl.data.curriculum(rows, difficulty=values, up_to=pace)
    found, _ = batches_of(list(range(len(values))), plan, 1, 8, seed=seed)
    assert all(values[sample] <= pace(step) for step, batch in enumerate(found) for sample in batch)


ramps_ = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=4)


@given(values_, ramps_, st.integers(0, 9), st.integers(1, 9), st.data())
def test_a_run_resumes_anywhere_on_any_ranks(values, ramp, seed, steps, data):
    """With rows that change, too: batches are those of one uninterrupted rank, shared in order."""
    rows = discrete([12 * n for _, n in ramp], list(itertools.accumulate(length for length, _ in ramp))[:-1])
    pace = discrete([sorted(values)[len(values) // 2], 6], [data.draw(st.integers(0, 5))])
    plan = sl.data.curriculum(rows, difficulty=values, up_to=pace)
    whole, _ = batches_of(list(range(len(values))), plan, 1, steps, seed=seed)
    done, samples = [], 0
    while len(done) < steps:
        ranks, more = data.draw(st.sampled_from([1, 2, 3, 4])), data.draw(st.integers(1, steps - len(done)))
        found, samples = batches_of(list(range(len(values))), plan, ranks, more, samples, seed=seed)
        done += found
    assert done == whole and samples == rows.total(steps)


def test_rows_follow_their_pace_to_the_end_of_the_last_epoch():
    plan = discrete([2, 4, 6], [1, 2])
    found, samples = batches_of(list(range(7)), plan, 2, 99, epochs=3, shuffle=False)
    assert [len(rows) for rows in found] == [2, 2, 4, 6, 6, 1] and samples == 21
    assert [*itertools.chain(*found)] == [*range(7)] * 3
    loader = sl.data.loader(list(range(7)), sl.make_mesh(), plan, samples=5, shuffle=False)
    # Within the third step: it goes on with the step's rows.
    assert [batch.tolist() for batch in itertools.islice(loader, 2)] == [[5, 6, 0, 1], [2, 3, 4, 5, 6, 0]]


def test_epochs_of_samples_that_may_be_drawn():
    """Two of the three easiest, then what is left of the five that come up to the limit; never the hardest."""
    plan = sl.data.curriculum(2, difficulty=[3, 1, 9, 2, 3, 2], up_to=discrete([2, 3], [0]))
    for ranks in (1, 2):
        found, samples = batches_of(list(range(6)), plan, ranks, 99, epochs=3)
        assert [len(rows) for rows in found] == [2] * 7 + [1] and samples == 15
        rows = [*itertools.chain(*found)]
        assert {*rows[:2]} < {1, 3, 5}
        assert all(sorted(rows[first : first + 5]) == [0, 1, 3, 4, 5] for first in (0, 5, 10))


def test_workers_read_a_curriculum_too():
    text = torch.arange(96).reshape(12, 8)
    plan = sl.data.curriculum(2, length=discrete([4, 8], [0]), difficulty=range(12), up_to=discrete([2, 12], [1]))
    loaders = [sl.data.loader(text, sl.make_mesh(), plan, workers=workers) for workers in (0, 2)]
    one, two = ([batch.tolist() for batch in itertools.islice(loader, 5)] for loader in loaders)
    assert one == two and [len(batch[0]) for batch in one] == [4, 8, 8, 8, 8]


def test_rows_are_truncated():
    text = {"tokens": np.arange(32).reshape(4, 8), "weight": torch.arange(4.0)}
    plan = sl.data.curriculum(2, length=sl.data.linear_pace(2, 8, 3, 2))
    loader = sl.data.loader(text, sl.make_mesh(), plan, shuffle=False)
    batches = list(itertools.islice(loader, 4))
    assert [batch["tokens"].shape for batch in batches] == [(2, 2), (2, 4), (2, 6), (2, 8)]
    assert batches[1]["tokens"].tolist() == [[16, 17, 18, 19], [24, 25, 26, 27]] and len(batches[1]["weight"]) == 2
    assert [plan.tokens(step) for step in range(6)] == [0, 4, 12, 24, 40, 56] and plan.tokens_at(1) == 8


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_cut_off_becomes_rows(ranks):
    """Every token of whole pieces is there once, and leaves without a sequence go along."""

    def consume(mesh):
        text = {"tokens": torch.arange(64).reshape(8, 8), "document": torch.arange(8)}
        plan = sl.data.curriculum(4, length=discrete([2, 3, 8], [0, 1]), surplus="reshape")
        return list(itertools.islice(sl.data.loader(text, mesh, plan, shuffle=False), 3)), plan

    results = sl.simulate(consume, mesh={"data": ranks})
    first, second, third = (
        {name: torch.cat([batches[step][name] for batches, _ in results]) for name in ("tokens", "document")}
        for step in range(3)
    )
    assert first["tokens"].tolist() == torch.arange(32).reshape(16, 2).tolist()
    assert first["document"].tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert second["tokens"][:3].tolist() == [[32, 33, 34], [35, 36, 37], [40, 41, 42]]
    assert third["tokens"].shape == (4, 8)
    assert [results[0][1].tokens(step) for step in range(4)] == [0, 32, 56, 88]


FORMS = {"numpy": np.asarray, "torch": torch.as_tensor}


@pytest.mark.parametrize("masks", FORMS)
@pytest.mark.parametrize("tokens", FORMS)
@pytest.mark.parametrize("surplus", ["truncate", "reshape"])
def test_leaves_of_every_form_are_cut(tokens, masks, surplus):
    """Arrays and tensors, and masks on all sides that count positions; against loops over positions."""
    whole, length, rows = 7, 3, 2
    drawn = np.random.default_rng(0)
    pieces = 1 if surplus == "truncate" else 2
    kinds = {
        "square": drawn.integers(0, 2, (rows, whole, whole)).astype(bool),
        "one": drawn.normal(size=(rows, 1, whole, whole)),
        "heads": drawn.integers(0, 2, (rows, 3, whole, whole)),
        "keys": drawn.normal(size=(rows, 1, 1, whole)),
        "line": drawn.integers(0, 2, (rows, 1, whole)).astype(bool),
        "wide": drawn.normal(size=(rows, whole, 1, whole)),
        "deep": drawn.normal(size=(rows, whole, 5)),
    }
    labels, image = drawn.integers(0, 9, rows), drawn.normal(size=(rows, 3, 5))
    ids = np.arange(rows * whole).reshape(rows, whole)
    text = {"ids": FORMS[tokens](ids), "names": np.array([["a", "b"]] * rows)}
    text |= {name: FORMS[masks](leaf) for name, leaf in (kinds | {"labels": labels, "image": image}).items()}

    plan = sl.data.curriculum(rows, length=constant(length), sequence=whole, surplus=surplus)
    batch = next(iter(sl.data.loader([0] * rows, sl.make_mesh(), plan, shuffle=False, collate=lambda _: text)))
    assert all(type(batch[name]) is type(text[name]) for name in text)
    for row, piece in itertools.product(range(rows), range(pieces)):
        at = [piece * length + place for place in range(length)]
        mine = {name: np.asarray(leaf)[row * pieces + piece] for name, leaf in batch.items()}
        assert mine["ids"].tolist() == [ids[row, q] for q in at]
        assert mine["square"].tolist() == [[kinds["square"][row, q, k] for k in at] for q in at]
        for name in ("one", "heads"):
            heads = range(kinds[name].shape[1])
            assert mine[name].tolist() == [[[kinds[name][row, h, q, k] for k in at] for q in at] for h in heads]
        assert mine["keys"].tolist() == [[[kinds["keys"][row, 0, 0, k] for k in at]]]
        assert mine["line"].tolist() == [[kinds["line"][row, 0, k] for k in at]]
        for name in ("wide", "deep"):
            assert mine[name].tolist() == [kinds[name][row, q].tolist() for q in at]
        assert mine["labels"] == labels[row] and mine["image"].tolist() == image[row].tolist()
        assert mine["names"].tolist() == ["a", "b"]
    assert len(batch["ids"]) == len(batch["square"]) == rows * pieces


@pytest.mark.parametrize(
    "leaf, remedy",
    [
        (torch.zeros(2, 8, 8), r"leaf: \(2, 8, 8\) of torch.float32: a mask of numbers is \(rows, 1, 8, 8\)"),
        (np.zeros((2, 8, 8), np.uint8), r"values of each token are \(rows, 8, 1, 8\)"),
        (torch.zeros(2, 3, 8, 8), "one head for all; flatten the last two dimensions"),
        (torch.zeros(2, 8, 8, 8, dtype=torch.bool), "fewer heads, or flatten"),
    ],
)
def test_leaves_whose_positions_are_not_clear_are_refused(leaf, remedy):
    plan = sl.data.curriculum(2, length=constant(4), sequence=8)
    text = {"tokens": torch.zeros(2, 8), "leaf": leaf}
    loader = sl.data.loader([0] * 2, sl.make_mesh(), plan, collate=lambda _: text)
    with pytest.raises(BatchError, match=remedy):
        next(iter(loader))


@pytest.mark.parametrize(
    ("surplus", "field", "message"),
    [
        (
            "reshape",
            lambda samples: ["a"] * len(samples),
            "makes 4 rows of each, .*extra: a list with str for each of 2",
        ),
        ("reshape", lambda samples: Held(samples), "extra: Held is not a pytree"),
        ("truncate", lambda samples: Held(samples), "sequences of 8 are made shorter, .*extra: Held is not a pytree"),
    ],
)
def test_what_cannot_be_cut_with_the_sequences_is_refused(surplus, field, message):
    def collate(samples):
        return {"tokens": torch.stack(samples), "extra": field(samples)}

    plan = sl.data.curriculum(2, length=constant(2), sequence=8, surplus=surplus)
    with pytest.raises(BatchError, match=f"(?s){message}"):
        next(iter(sl.data.loader(list(torch.zeros(4, 8)), sl.make_mesh(), plan, collate=collate)))


class Held:
    def __init__(self, samples):
        self.tokens = torch.stack(samples)


def test_a_map_sees_the_batch_that_was_cut():
    plan = sl.data.curriculum(2, length=constant(3), sequence=8)
    loader = sl.data.loader(torch.zeros(4, 8), sl.make_mesh(), plan, map=lambda batch, step: (tuple(batch.shape), step))
    assert list(itertools.islice(loader, 2)) == [((2, 3), 0), ((2, 3), 1)]


def test_steps_keep_their_tokens_with_more_rows():
    lengths = sl.data.linear_pace(8, 64, 10, 8)
    plan = sl.data.curriculum(sl.data.map_paces(lambda length: 512 // length, lengths), length=lengths)
    assert [plan.tokens_at(step) for step in (0, 4, 99)] == [512, 504, 512]
    steps = torch.arange(20.0, dtype=torch.float64)
    assert plan.tokens(steps).tolist() == [plan.tokens(step) for step in range(20)]


def test_percentiles_and_ties():
    values = [5, 1, 1, 1, 9]
    plan = sl.data.curriculum(1, difficulty=values, up_to=discrete([30, 60, 61, 100], [0, 1, 2]), percentile=True)
    assert plan.limits.values == (2, 3, 4, 5) and plan.index.samples.tolist() == [1, 2, 3, 0, 4]
    ties = sl.data.curriculum(1, difficulty=values, up_to=discrete([1, 5], [0]))
    assert ties.limits.values == (3, 4)  # the fifth is never drawn
    one = sl.data.curriculum(1, difficulty=[2.5], up_to=constant(2.5))
    assert batches_of([7], one, 1, 3)[0] == [[7]] * 3


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([3, 1, 2], dtype=torch.bfloat16),
        torch.tensor([3.0, 1, 2], requires_grad=True),
        [torch.tensor(value, requires_grad=True) for value in (3.0, 1.0, 2.0)],
        [torch.tensor(value, dtype=torch.bfloat16) for value in (3.0, 1.0, 2.0)],
        np.array([3, 1, 2], np.uint8),
    ],
)
def test_difficulties_of_every_form(values):
    plan = sl.data.curriculum(1, difficulty=values, up_to=constant(2))
    assert plan.index.samples.tolist() == [1, 2, 0] and plan.limits.values == (2,)


def test_a_curriculum_goes_to_other_processes():
    plan = sl.data.curriculum(2, length=constant(4), difficulty=[1, 2], up_to=constant(2))
    assert pickle.loads(pickle.dumps(plan)).limits == plan.limits


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: sl.data.curriculum(2, difficulty=[3, 4], up_to=constant(2)), "the easiest 3: begin there"),
        (
            lambda: sl.data.curriculum(2, difficulty=[3, 4], up_to=discrete([4, 3], [5])),
            "at step 6 the samples .* fall from 2 to 1: let up_to rise",
        ),
        (lambda: sl.data.curriculum(2, difficulty=[3, 4]), "go together"),
        (lambda: sl.data.curriculum(2, up_to=constant(2)), "go together"),
        (lambda: sl.data.curriculum(2, difficulty=[3], up_to=4), "up_to=4: use a pace"),
        (
            lambda: sl.data.curriculum(2, difficulty=[3], up_to=constant(101), percentile=True),
            "percentiles from 101 to 101",
        ),
        (lambda: sl.data.curriculum(2, difficulty=[[3]], up_to=constant(4)), r"shape \(1, 1\): give one number"),
        (
            lambda: sl.data.curriculum(2, difficulty=[3, float("nan")], up_to=constant(4)),
            "the metric of sample 1 is nan",
        ),
        (
            lambda: sl.data.curriculum(2, length=constant(9), sequence=8),
            "a length of 9, and .* sequence=8: let the pace end",
        ),
        (
            lambda: sl.data.curriculum(2, length=constant(4), surplus="keep"),
            "surplus='keep': use 'truncate' or 'reshape'",
        ),
        (lambda: sl.data.curriculum(2).tokens(3), "give sequence="),
        (lambda: sl.data.curriculum(2, length=constant(4), sequence="x"), "sequence='x': give the length"),
        (lambda: sl.data.curriculum(2, sequence=0), "sequence=0: give the length"),
        (lambda: sl.data.curriculum(2, length=constant(4), sequence=8.5), "sequence=8.5: give the length"),
        (lambda: sl.data.curriculum(2, percentile="no"), "percentile='no': use True or False"),
        (lambda: sl.data.curriculum(2, difficulty=[[1], [2, 3]], up_to=constant(4)), "give one number for each sample"),
        (lambda: sl.data.layer_tokens(None, sl.data.curriculum(2)), r"drop=None: give plan\.step\.token_drop"),
        (lambda: sl.data.layer_tokens(TokenDrop(4, 1, ()), 4), "plan=4: give what each step reads, such as"),
        (
            lambda: sl.data.loader([1, 2, 3], sl.make_mesh(), sl.data.curriculum(2, difficulty=[1], up_to=constant(1))),
            "difficulties of 1 samples, and the dataset has 3",
        ),
        (
            lambda: sl.data.loader(
                sl.data.mixture([[1, 2]]), sl.make_mesh(), sl.data.curriculum(2, difficulty=[1, 1], up_to=constant(1))
            ),
            "Mixture has an order of its own, and so has a curriculum",
        ),
        (lambda: sl.data.loader([1], rank_of(2, 0), discrete([2, 3], [4])), "3 rows at step 5 does not divide over 2"),
        (
            lambda: next(
                iter(sl.data.loader(torch.zeros(3, 5), sl.make_mesh(), sl.data.curriculum(1, length=constant(4))))
            ),
            r"no tensor of the batch is \(rows, 4, …\):\n.*\(1, 5\)",
        ),
    ],
)
def test_wrong_curricula_are_refused(make, message):
    with pytest.raises(BatchError, match=f"(?s){message}"):
        make()


def test_ranks_with_other_curricula_are_named():
    def make(mesh):
        return sl.data.loader([1, 2], mesh, sl.data.curriculum(2, length=constant(1 + mesh.rank), sequence=4))

    with pytest.raises(RankMismatch, match="length"):
        sl.simulate(make, mesh={"data": 2})
