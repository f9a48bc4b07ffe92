"""The loader: the same global batches on any mesh, every sample once, and one number from which all goes on."""

import itertools
import random

import numpy as np
import pytest
import torch
from helpers.profile import NIGHTLY
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib as sl
from shardlib.errors import BatchError, MeshError, RankMismatch, TreeError
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport import EchoGroup

MESHES = [{"data": 1}, {"data": 2}, {"data": 3}, {"data": 2, "model": 2}, {"pipe": 2, "data": 1}]


def rank_of(shape, rank):
    """The mesh as one rank sees it, without the others."""
    groups = {axis: EchoGroup(size) for axis, size in shape.items()}
    return Mesh(shape, rank, groups, torch.device("cpu"))


def ranks(shape):
    return [rank_of(shape, rank) for rank in range(int(np.prod(list(shape.values()))))]


def uninterrupted(size, seed, count):
    stream = itertools.chain.from_iterable(sl.data.loader(range(size), sl.make_mesh(), 64, seed=seed))
    return [int(sample) for sample in itertools.islice(stream, count)]


def run(size, shape, batch, seed, samples, steps, workers):
    """The ids of each of ``steps`` global batches, and the samples consumed, from every rank's loader."""
    shares = {}
    for mesh in ranks(shape):
        batches = sl.data.loader(list(range(size)), mesh, batch, seed=seed, samples=samples, workers=workers)
        ids = [rows.tolist() for _, rows in zip(range(steps), batches, strict=False)]
        # Ranks along other axes than "data" have the same rows.
        assert shares.setdefault(mesh.coords["data"], ids) == ids
        samples_now = batches.samples
    shares = [shares[index] for index in range(shape["data"])]
    return [[row for share in shares for row in share[step]] for step in range(steps)], samples_now


@st.composite
def lives(draw, meshes=MESHES, most=3):
    """A run in pieces: for each its mesh, its batch, the steps until it is killed and those that its checkpoint has."""
    pieces = []
    for _ in range(draw(st.integers(1, most))):
        shape = draw(st.sampled_from(meshes))
        steps = draw(st.integers(0, 5))
        pieces.append((shape, shape["data"] * draw(st.integers(1, 5)), steps, draw(st.integers(0, steps))))
    return pieces


def check_ledger(size, seed, pieces, workers):
    ledger, samples = [], 0
    for shape, batch, steps, saved in pieces:
        batches, after = run(size, shape, batch, seed, samples, steps, workers)
        assert after == samples + steps * batch
        ledger += itertools.chain(*batches[:saved])  # what came after the checkpoint is consumed anew
        samples += saved * batch
    assert ledger == uninterrupted(size, seed, samples)
    for epoch in range(samples // size):
        assert sorted(ledger[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(st.integers(1, 40), st.integers(0, 9), lives())
def test_the_ledger_of_runs_that_are_killed_and_change_their_mesh(size, seed, pieces):
    check_ledger(size, seed, pieces, workers=0)


@settings(max_examples=20 if NIGHTLY else 3)
@given(st.integers(1, 40), st.integers(0, 9), lives(meshes=MESHES[:2], most=2))
def test_the_ledger_with_workers_that_read_ahead(size, seed, pieces):
    check_ledger(size, seed, pieces, workers=2)


def test_real_ranks_share_the_batches_of_one():
    def consume(mesh):
        batches = sl.data.loader(list(range(11)), mesh, 6, seed=4)
        return torch.stack([rows for _, rows in zip(range(5), batches, strict=False)])

    for count in (1, 2, 3):
        assert torch.cat(sl.simulate(consume, mesh={"data": count}), 1).flatten().tolist() == uninterrupted(11, 4, 30)


def test_the_plan_says_which_ranks_share_a_batch():
    """Along a model axis ranks have the same rows, whatever the axes are called; along both of a hybrid their own."""

    def consume(mesh, transform):
        params = sl.shard({"w": torch.ones(4, 4)}, mesh, transform)
        state, _ = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), params, sl.optim.sgd(0.1))
        return [next(iter(sl.data.loader(list(range(8)), where, 4))).tolist() for where in (params, state)]

    want = uninterrupted(8, 0, 4)
    hybrid = sl.simulate(consume, sl.zero(2, axis="local", replicate="node"), mesh={"node": 2, "local": 2})
    assert hybrid == [[[row], [row]] for row in want]
    slices = sl.chain(sl.tensor_slicing({"w": "row"}, axis="data"), sl.zero(1, axis="rows"))
    sliced = sl.simulate(consume, slices, mesh={"data": 2, "rows": 2})
    assert sliced == [[want[:2]] * 2, [want[2:]] * 2] * 2


def test_a_train_step_takes_the_batches():
    features = torch.arange(20.0).reshape(10, 2)
    state, step = sl.make_train_step(lambda p, x: (x @ p["w"]).square().mean(), {"w": torch.ones(2)}, sl.optim.sgd(0.0))
    for batch in itertools.islice(sl.data.loader(features, state, 4, epochs=1), 2):
        state, metrics = step(state, batch)
    assert state.step == 2 and float(metrics["loss"]) > 0


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_an_end_has_the_rows_that_are_left(size, ranks_, rows, epochs, shuffle):
    """No row is dropped or repeated; shares of the last batch differ by at most one row, and keep dtype and shape."""
    data = torch.arange(size * 3, dtype=torch.int16).reshape(size, 3)
    batch = ranks_ * rows
    shares = [
        list(sl.data.loader(data, mesh, batch, epochs=epochs, shuffle=shuffle)) for mesh in ranks({"data": ranks_})
    ]
    counts = [[len(rows) for rows in share] for share in zip(*shares, strict=True)]
    assert [sum(count) for count in counts] == [batch] * (size * epochs // batch) + [size * epochs % batch] * (
        size * epochs % batch > 0
    )
    assert all(max(count) - min(count) <= 1 for count in counts)
    assert all(part.dtype == torch.int16 and part.shape[1:] == (3,) for share in shares for part in share)
    rows = torch.cat([torch.cat(parts) for parts in zip(*shares, strict=True)])
    for epoch in rows.split(size):
        assert torch.equal(epoch if not shuffle else epoch[epoch[:, 0].argsort()], data)


class Item:
    def __init__(self, samples):
        self.rows = torch.tensor(samples)


def test_a_rank_without_rows_has_no_entries_of_lists_either():
    def collate(samples):
        return {
            "x": torch.tensor(samples),
            "names": [f"sample {x}" for x in samples],
            "pairs": [[x, x] for x in samples],
        }

    shares = [list(sl.data.loader([0, 1, 2], mesh, 2, epochs=1, collate=collate)) for mesh in ranks({"data": 2})]
    last = [share[-1] for share in shares]
    assert sorted(len(batch["x"]) for batch in last) == [0, 1]
    for batch in last:
        assert len(batch["names"]) == len(batch["pairs"]) == len(batch["x"])
    with pytest.raises(BatchError, match=r"(?s)has no rows of the last batch.*item: Item is not a pytree.*vars\(...\)"):
        for mesh in ranks({"data": 2}):
            list(sl.data.loader([0, 1, 2], mesh, 2, epochs=1, collate=lambda samples: {"item": Item(samples)}))


def test_an_evaluation_over_uneven_ends_is_exact():
    data = torch.arange(11.0)

    def mean(mesh):
        params = sl.shard({"w": torch.ones(1)}, mesh, stage=1)
        evaluate = sl.make_eval_step(lambda p, x: sl.Mean((p["w"] * x).sum(), x.numel()), params)
        rows = sl.data.loader(data, params, 8, epochs=1, shuffle=False)
        return [float(evaluate.over(params, rows.seek(0))) for _ in range(2)]

    assert sl.simulate(mean, mesh={"data": 4}) == [[5.0, 5.0]] * 4


def test_a_loop_goes_on_where_the_last_one_stopped():
    batches = sl.data.loader(list(range(10)), sl.make_mesh(), 3, seed=2, epochs=2)
    rows = [next(iter(batches)).tolist(), *(rows.tolist() for rows in batches)]
    assert list(itertools.chain(*rows)) == uninterrupted(10, 2, 20)
    assert batches.samples == 20
    with pytest.raises(
        BatchError, match=r"came to the end, at sample 20, and another one has no batches: give epochs="
    ):
        list(batches)
    other = sl.data.loader(list(range(10)), sl.make_mesh(), 4, seed=2)
    other.load_state_dict(batches.seek(6).state_dict())
    assert batches.state_dict() == {"samples": 6} and next(iter(other)).tolist() == uninterrupted(10, 2, 10)[6:]


def test_two_loops_at_once_are_refused():
    batches = sl.data.loader(list(range(10)), sl.make_mesh(), 3)
    first = iter(batches)
    next(first)
    next(iter(batches))
    with pytest.raises(BatchError, match=r"stands at sample 3, and another loop or seek\(\) moved the loader to 6"):
        next(first)


def test_torchs_random_numbers_are_left_alone():
    torch.manual_seed(1)
    want = torch.rand(3)
    torch.manual_seed(1)
    next(iter(sl.data.loader(list(range(10)), sl.make_mesh(), 3)))
    assert torch.equal(torch.rand(3), want)


class Augmented:
    """A dataset that draws from all of a process' generators."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])


def test_workers_draw_other_numbers_for_other_rows_seeds_and_loops():
    def draws(mesh, seed):
        batches = sl.data.loader(Augmented(), mesh, 2, seed=seed, workers=1)
        return [next(iter(batches))[0].tolist() for _ in range(2)]

    found = [draws(mesh, 0) for mesh in ranks({"data": 2, "model": 2})]
    assert found[0] == found[1] and found[2] == found[3]  # the same rows
    different = [row for loops in (found[0], found[2], draws(sl.make_mesh(), 1)) for row in loops]
    assert all(len({*column}) == 6 for column in zip(*different))
    assert draws(sl.make_mesh(), 1) == different[4:]


class Words:
    """A dataset of dictionaries that reads many samples at once, as Hugging Face's do."""

    def __init__(self, many=True):
        if many:
            self.__getitems__ = lambda indices: [self[index] for index in indices]

    def __len__(self):
        return 7

    def __getitem__(self, index):
        return {"id": index, "text": f"word {index}", "vector": np.full(2, index, np.float32)}


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_datasets_of_dictionaries(many, workers):
    rows = next(iter(sl.data.loader(Words(many and not workers), sl.make_mesh(), 3, seed=1, workers=workers)))
    ids = uninterrupted(7, 1, 3)
    assert rows["id"].tolist() == ids and rows["text"] == [f"word {index}" for index in ids]
    assert torch.equal(rows["vector"], torch.tensor(ids, dtype=torch.float32)[:, None].expand(3, 2))


def test_arrays_are_datasets_of_their_rows():
    ids = uninterrupted(9, 3, 4)
    data = {"x": np.arange(18, dtype=np.uint16).reshape(9, 2), "y": (torch.arange(9),)}
    rows = next(iter(sl.data.loader(data, sl.make_mesh(), 4, seed=3)))
    assert rows["x"].dtype == torch.uint16 and rows["x"].tolist() == [[2 * i, 2 * i + 1] for i in ids]
    assert rows["y"][0].tolist() == ids


def test_a_curriculum_is_a_function_of_the_step():
    def shorter(batch, step):
        return batch[:, : 1 + step]

    data = torch.zeros(9, 5)
    widths = [rows.shape[1] for rows in sl.data.loader(data, sl.make_mesh(), 3, map=shorter, epochs=1)]
    resumed = sl.data.loader(data, sl.make_mesh(), 3, map=shorter, epochs=1, samples=6)
    assert widths == [1, 2, 3] and [rows.shape[1] for rows in resumed] == [3]


def test_a_collate_function_gets_the_samples():
    batches = sl.data.loader(["a", "bb", "ccc"], sl.make_mesh(), 3, collate=lambda samples: sorted(map(len, samples)))
    assert next(iter(batches)) == [1, 2, 3]


def test_resuming_costs_the_same_everywhere():
    """The next batch at sample 10^17 of a dataset of 10^15 is there at once: nothing is listed or skipped."""

    class Numbers:
        def __len__(self):
            return 10**15

        def __getitem__(self, index):
            return index

    batches = sl.data.loader(Numbers(), sl.make_mesh(), 4, samples=10**17 + 3)
    assert len(set(next(iter(batches)).tolist())) == 4 and batches.samples == 10**17 + 7


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return itertools.count()


WRONG = {
    "does not divide over 4 ranks .data=4.: use a multiple of 4, such as 8": {"batch": 9},
    "batch is 0 at step 0": {"batch": 0},
    "list has no samples": {"dataset": []},
    "generator has no length": {"dataset": (i for i in range(3))},
    "Endless has no length.*streams": {"dataset": Endless()},
    "set has no __getitem__": {"dataset": {1, 2}},
    "b: str, not an array with rows\n.*x: 3 rows": {"dataset": {"b": "text", "a": torch.ones(2), "x": torch.ones(3)}},
    "workers=-1": {"workers": -1},
    "epochs=0: use 1 or more": {"epochs": 0},
    "epochs=1.5: use 1 or more, an integer": {"epochs": 1.5},
    "epochs='2': use 1 or more": {"epochs": "2"},
    "workers=1.5": {"workers": 1.5},
    r"loader: collate=3: give a function that returns a batch, collate\(samples\)": {"collate": 3},
    r"loader: map='upper': give a function that returns a batch, map\(batch, step\)": {"map": "upper"},
    "samples=1.5: the first is 0; give an integer": {"samples": 1.5},
    "samples=-1: the first is 0": {"samples": -1},
    "samples=9: the first is 0, and the last of 8": {"samples": 9, "epochs": 1},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_refused(message):
    arguments = {"dataset": list(range(8)), "where": rank_of({"data": 4}, 0), "batch": 8} | WRONG[message]
    with pytest.raises(BatchError, match=f"(?s){message}"):
        sl.data.loader(arguments.pop("dataset"), arguments.pop("where"), arguments.pop("batch"), **arguments)


@pytest.mark.parametrize("state", [None, {}, {"streams": []}])
def test_a_state_of_something_else_is_refused(state):
    with pytest.raises(BatchError, match=r"is no state of a loader: give what state_dict\(\) returned"):
        sl.data.loader([1], sl.make_mesh(), 1).load_state_dict(state)


def test_seeds_are_those_of_keys():
    assert uninterrupted(9, -1, 9) == uninterrupted(9, 2**64 - 1, 9)
    with pytest.raises(ValueError, match="a seed of 65 bits"):
        sl.data.loader([1], sl.make_mesh(), 1, seed=2**64)


def test_a_mesh_of_axes_without_a_known_use():
    mesh = rank_of({"node": 2, "data": 2, "model": 2}, 5)  # node 1, data 0, model 1
    with pytest.raises(MeshError, match=r"'node' of mesh\(node=2, data=2, model=2\).*over=\('node', 'data'\)"):
        sl.data.loader(list(range(8)), mesh, 8)
    batches = sl.data.loader(list(range(8)), mesh, 8, over=("node", "data"))
    assert next(iter(batches)).tolist() == uninterrupted(8, 0, 8)[4:6]
    with pytest.raises(MeshError, match="axis 'rows' is not on"):
        sl.data.loader(list(range(8)), mesh, 8, over=("rows",))


def test_a_plan_needs_no_axes_and_a_plain_tree_has_none():
    params = sl.shard({"w": torch.ones(2)}, sl.make_mesh(), stage=1)
    with pytest.raises(MeshError, match="the plan of the parameters says"):
        sl.data.loader([1], params, 1, over=("data",))
    with pytest.raises(TreeError, match="a plain dict does not say"):
        sl.data.loader([1], {"w": torch.ones(2)}, 1)


class Backwards:
    """A dataset with an order of its own."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return index

    def order(self, seed, shuffle):
        return self

    def indices(self, numbers):
        return 4 - numbers % 5


def test_a_dataset_may_bring_its_order():
    def consume(mesh):
        batches = sl.data.loader(Backwards(), mesh, 4)
        return [rows.tolist() for _, rows in zip(range(2), batches, strict=False)]

    assert sl.simulate(consume, mesh={"data": 2}) == [[[4, 3], [0, 4]], [[2, 1], [3, 2]]]


def test_ranks_with_different_datasets_are_named():
    def differ(mesh):
        sl.data.loader(list(range(8 + mesh.rank // 3)), mesh, 4)

    with pytest.raises(RankMismatch, match=r"samples in the dataset: rank 0, 1, 2: 8; rank 3: 9"):
        sl.simulate(differ, mesh={"data": 4})


def test_lists_of_numbers_are_rows():
    """Hugging Face's datasets give lists of token ids where they have no format."""
    samples = [{"ids": [n, n + 1, n + 2], "boxes": [[0.5 * n], [1.0]], "text": [f"a{n}", "b"]} for n in range(8)]
    batch = next(iter(sl.data.loader(samples, sl.make_mesh(), 4, shuffle=False)))
    assert torch.equal(batch["ids"], torch.arange(4)[:, None] + torch.arange(3))
    assert batch["boxes"].shape == (4, 2, 1) and batch["boxes"].dtype == torch.float32
    assert batch["text"] == [("a0", "a1", "a2", "a3"), ("b",) * 4]  # as torch's default_collate has it
    samples[2]["ids"] = [7]
    with pytest.raises(BatchError, match=r"ids: \(1,\), \(3,\)\nPad them by collate="):
        next(iter(sl.data.loader(samples, sl.make_mesh(), 4, shuffle=False)))


def test_a_last_batch_that_does_not_divide_is_left_out():
    def trained(mesh, **options):
        params = sl.shard({"w": torch.ones(2)}, mesh, sl.chain(sl.zero(1), sl.accumulate(2)))
        state, step = sl.make_train_step(lambda p, x: (x @ p["w"]).square().mean(), params, sl.optim.sgd(0.1))
        batches = sl.data.loader(torch.ones(22, 2), state, batch=8, epochs=1, **options)
        for batch in batches:
            state, _ = step(state, batch)
        return state.step, batches.samples

    with pytest.raises(BatchError, match="drop_last=True"):
        sl.simulate(trained, mesh={"data": 2})
    dropping = sl.simulate(lambda mesh: trained(mesh, drop_last=True), mesh={"data": 2})
    assert dropping == [(2, 16)] * 2
    with pytest.raises(BatchError, match="leaves out the only batch, of 5 samples for 8 rows: use smaller batches"):
        sl.data.loader(torch.ones(5), sl.make_mesh(), 8, epochs=1, drop_last=True)
